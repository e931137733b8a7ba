"""The state of one rank that a joiner takes over from its donor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from elastic_train.peer_ckpt.shards import export_optimizer, export_tensors, load_optimizer, load_tensors, raw_bytes
from elastic_train.replica.data.loader import PositionTable
from elastic_train.replica.titan.lr import set_lr_step

if TYPE_CHECKING:
    from elastic_train.replica.trainer import ElasticTrainer


def export_state(trainer: ElasticTrainer) -> dict[str, Any]:
    """Everything of this rank that training needs, as host clones, and the hash of it all.

    ``theta`` model shards, ``inner`` optimizer moments, ``outer`` anchor and outer momentum, ``step`` nominal step
    (the LR schedule follows it), ``tokens`` seen, ``rng``, ``positions`` committed data positions of all shards.
    """
    state: dict[str, Any] = {
        "theta": export_tensors(_parameters(trainer)),
        "inner": [export_optimizer(optimizer) for optimizer in trainer.optimizers],
        "outer": trainer.engine.export_state(),
        "step": trainer.step,
        "lr": trainer.lr_schedulers.state_dict()["last_epoch"],
        "tokens": trainer.ntokens_seen,
        "rng": torch.get_rng_state(),
        "positions": trainer.dataloader.committed.to_list(),
    }
    return {**state, "hash": _hash(state)}


def load_state(trainer: ElasticTrainer, state: Mapping[str, Any]) -> None:
    """Take over what a peer's same rank exported.

    Raises:
        StateMismatch: the state does not fit this rank's shards.
    """
    load_tensors(_parameters(trainer), state["theta"])
    for optimizer, source in zip(trainer.optimizers, state["inner"], strict=True):
        load_optimizer(optimizer, source)
    trainer.engine.load_state(state["outer"])
    trainer.step = state["step"]
    set_lr_step(trainer.lr_schedulers, state["lr"])
    trainer.ntokens_seen = state["tokens"]
    torch.set_rng_state(state["rng"])
    positions = PositionTable.from_list(state["positions"])
    trainer.dataloader.commit(positions)
    trainer.dataloader.restore(positions)


def _parameters(trainer: ElasticTrainer) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{part}.{name}", parameter)
        for part, module in enumerate(trainer.model_parts)
        for name, parameter in module.named_parameters()
    ]


def _hash(state: object) -> int:
    """Signed 64-bit hash of a nested structure of dicts, lists, tensors and plain values (xxh3)."""
    digest = xxhash.xxh3_64()
    _feed(digest, state)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _feed(digest: xxhash.xxh3_64, value: object) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(raw_bytes(value))
    elif isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())
