"""What the numbers of a durable snapshot mean, as far as the config of the run that wrote it says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_train.config import RunConfig
from elastic_train.config.keys import value_of

_KEYS = (
    "diloco.engine",
    "model.name",
    "model.flavor",
    # What a position in the data counts: documents of this dataset, cut by this tokenizer into these sequences.
    "model.hf_assets_path",
    "training.dataset",
    "training.dataset_path",
    "training.seq_len",
    "training.dataloader.virtual_shards",
)


def origin_of(config: RunConfig) -> dict[str, Any]:
    """The keys that a run which goes on from a snapshot must have in common with the one that wrote it."""
    return {key: value_of(config, key) for key in _KEYS}


def differences(origin: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The keys of ``config`` that are something else in ``origin``, each with both values."""
    return [
        f"{key} was {origin.get(key)!r} and is {value!r}"
        for key, value in origin_of(config).items()
        if key not in origin or origin[key] != value
    ]
