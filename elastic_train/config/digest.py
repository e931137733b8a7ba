"""A short name for everything that replicas must agree on to train one model together."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from elastic_train.config.keys import value_of
from elastic_train.config.schema import RunConfig

# What changes what is learned or what replicas send each other. The rest may differ: where a replica runs and
# writes, how long it waits, how it uses its memory, which faults strike it.
_AGREED: tuple[str, ...] = (
    "model",
    "optimizer",
    "lr_scheduler",
    "training",
    "parallelism",
    "debug.seed",
    "orchestrator.replicas",
    "orchestrator.procs_per_replica",
    "diloco.engine",
    "diloco.sync_every",
    "diloco.interval",
    "diloco.weighting",
    "diloco.outer_lr",
    "diloco.outer_momentum",
    "diloco.outer_nesterov",
    "diloco.outer_weight_decay",
    "diloco.fragments",
    "diloco.overlap_steps",
    "diloco.merge_alpha",
    "diloco.compression",
    "diloco.bucket_mb",
    # A host and an accelerator round differently, and anchors must agree to the last bit.
    "diloco.anchor_device",
    "diloco.backend",
    "peer_ckpt.transport",
)
_HEX_DIGITS = 16


def digest(config: RunConfig) -> str:
    """A hexadecimal hash that is equal for configs whose replicas can train together."""
    agreed = {path: _plain(value_of(config, path)) for path in _AGREED}
    text = json.dumps(agreed, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]


def _plain(value: Any) -> Any:
    is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_section else value
