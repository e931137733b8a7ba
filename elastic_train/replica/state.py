"""The state of one rank that a joiner takes over from its donor.

Under the elastic engine it is what ``diloco.publication`` shows: the outer state, and from here the inner optimizer's
moments and the counters. Under stock DiLoCo it is exported whole, when torchft asks for it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from elastic_train.diloco.torchft_engine import TorchftEngine
from elastic_train.peer_ckpt.shards import (
    StateMismatch,
    export_optimizer,
    export_tensors,
    load_optimizer,
    load_tensors,
    local,
    raw_bytes,
)
from elastic_train.replica.data.loader import PositionTable
from elastic_train.replica.titan.lr import lr_step, set_lr_step

if TYPE_CHECKING:
    from elastic_train.replica.trainer import ElasticTrainer


def moments(trainer: ElasticTrainer) -> dict[str, torch.Tensor]:
    """The inner optimizers' live tensors, this rank's shards: ``<optimizer>.<parameter>.<key>``."""
    return {
        f"{number}.{index}.{key}": local(value)
        for number, optimizer in enumerate(trainer.optimizers)
        for index, state in enumerate(_states(optimizer))
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def load_moments(trainer: ElasticTrainer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take over what a peer's same rank has as ``moments``.

    Raises:
        StateMismatch: they do not fit this rank's shards.
    """
    optimizers = list(trainer.optimizers)
    sources: list[list[dict[str, Any]]] = [[{} for _ in _states(optimizer)] for optimizer in optimizers]
    for name, tensor in tensors.items():
        number, index, key = name.split(".", 2)
        try:
            sources[int(number)][int(index)][key] = tensor
        except IndexError:
            raise StateMismatch(f"the peer's optimizers have a parameter {number}.{index}, ours have none") from None
    for optimizer, source in zip(optimizers, sources, strict=True):
        load_optimizer(optimizer, source)


def counters(trainer: ElasticTrainer) -> dict[str, Any]:
    """What a joiner takes over besides tensors, as JSON has it.

    ``step`` nominal step, ``lr`` steps of its schedule, ``tokens`` seen by this rank, ``rng`` state (base64),
    ``positions`` committed data positions of all shards.
    """
    return {
        "step": trainer.step,
        "lr": lr_step(trainer.lr_schedulers),
        "tokens": trainer.ntokens_seen,
        "rng": base64.b64encode(raw_bytes(torch.get_rng_state())).decode(),
        "positions": trainer.dataloader.committed.to_list(),
    }


def load_counters(trainer: ElasticTrainer, source: Mapping[str, Any]) -> None:
    """Take over a peer's ``counters``, and read on from its data positions."""
    trainer.step = source["step"]
    set_lr_step(trainer.lr_schedulers, source["lr"])
    trainer.ntokens_seen = source["tokens"]
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(source["rng"])), dtype=torch.uint8))
    positions = PositionTable.from_list(source["positions"])
    trainer.dataloader.commit(positions)
    trainer.dataloader.restore(positions)


def export_state(trainer: ElasticTrainer) -> dict[str, Any]:
    """Everything of this rank that training needs, as host clones, and the hash of it all.

    ``theta`` model shards, ``inner`` optimizer moments, ``outer`` anchor and outer momentum, ``step`` nominal step
    (the LR schedule follows it), ``tokens`` seen, ``rng``, ``positions`` committed data positions of all shards.
    """
    state: dict[str, Any] = {
        "theta": export_tensors(_parameters(trainer)),
        "inner": [export_optimizer(optimizer) for optimizer in trainer.optimizers],
        "outer": _stock(trainer).export_state(),
        "step": trainer.step,
        "lr": lr_step(trainer.lr_schedulers),
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
    _stock(trainer).load_state(state["outer"])
    trainer.step = state["step"]
    set_lr_step(trainer.lr_schedulers, state["lr"])
    trainer.ntokens_seen = state["tokens"]
    torch.set_rng_state(state["rng"])
    positions = PositionTable.from_list(state["positions"])
    trainer.dataloader.commit(positions)
    trainer.dataloader.restore(positions)


def _stock(trainer: ElasticTrainer) -> TorchftEngine:
    engine = trainer.engine
    assert isinstance(engine, TorchftEngine)
    return engine


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The state of each parameter, in the order of the groups."""
    return [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]


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
