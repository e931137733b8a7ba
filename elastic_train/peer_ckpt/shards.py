"""Copies of what one rank holds of a model and its optimizers.

Everything here is local: a rank exports its own shards (``DTensor.to_local``), never a full tensor, never
through ``Module.state_dict`` (whose hooks may run collectives), and always as clones on the host, so that
training may go on mutating its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

Tensors = dict[str, torch.Tensor]


class StateMismatch(ValueError):
    """A peer's state does not fit this rank: other names, shapes or types. Its config or sharding must differ."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``: a view that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A clone of this rank's part on the host."""
    return local(tensor.detach()).to("cpu", copy=True)


@torch.no_grad()
def export_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Host clones of this rank's part of each tensor, by name."""
    return {name: host_copy(tensor) for name, tensor in named}


@torch.no_grad()
def load_tensors(named: Iterable[tuple[str, torch.Tensor]], source: Mapping[str, torch.Tensor]) -> None:
    """Copy ``source`` into this rank's part of each tensor.

    Raises:
        StateMismatch: names, shapes or types differ; nothing was copied.
    """
    targets = {name: local(tensor.detach()) for name, tensor in named}
    if targets.keys() != source.keys():
        raise StateMismatch(f"tensors differ: {sorted(targets.keys() ^ source.keys())[:4]}")
    for name, target in targets.items():
        if target.shape != source[name].shape:
            raise StateMismatch(f"{name} has shape {tuple(source[name].shape)}, not {tuple(target.shape)}")
        if target.dtype != source[name].dtype:
            raise StateMismatch(f"{name} is {source[name].dtype}, not {target.dtype}")
    for name, target in targets.items():
        target.copy_(source[name])


@torch.no_grad()
def export_optimizer(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Per parameter, in the order of the groups: its state with tensors as host clones of this rank's part."""
    return [
        {
            key: host_copy(value) if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, source: list[dict[str, Any]]) -> None:
    """Take over what a peer's :func:`export_optimizer` gave.

    State tensors of a parameter's shape become tensors of its kind (device, sharding); others, such as a step
    counter, are cloned as they are.

    Raises:
        StateMismatch: another number of parameters, or shapes that differ; nothing was taken over.
    """
    owned = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if len(owned) != len(source):
        raise StateMismatch(f"the optimizer has {len(owned)} parameters, the peer's {len(source)}")
    states: list[dict[str, Any]] = []
    for (group, parameter), entries in zip(owned, source, strict=True):
        counters_on_device = group.get("fused") or group.get("capturable")
        state: dict[str, Any] = {}
        shape = local(parameter.detach()).shape
        for key, value in entries.items():
            if not isinstance(value, torch.Tensor):
                state[key] = value
            elif value.dim() == 0 and shape != value.shape:
                state[key] = value.to(parameter.device if counters_on_device else "cpu", copy=True)
            elif value.shape == shape:
                state[key] = torch.zeros_like(parameter, dtype=value.dtype)
                local(state[key]).copy_(value)
            else:
                raise StateMismatch(f"optimizer state {key} has shape {tuple(value.shape)}, not {tuple(shape)}")
        states.append(state)
    for (_, parameter), state in zip(owned, states, strict=True):
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def tensor_bytes(state: object) -> int:
    """Bytes of all tensors in a nested structure of dicts, lists and tuples."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(tensor_bytes(value) for value in state)
    return 0


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor, without a copy if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> int:
    """Signed 64-bit hash of the raw bytes of host tensors in the order of their names (xxh3)."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(raw_bytes(tensors[name]))
    return int.from_bytes(digest.digest(), "big", signed=True)


def combine(hashes: Iterable[int]) -> int:
    """One signed 64-bit hash of several, in their order (xxh3)."""
    digest = xxhash.xxh3_64()
    for value in hashes:
        digest.update(value.to_bytes(8, "big", signed=True))
    return int.from_bytes(digest.digest(), "big", signed=True)


def combine_hashes(rank_hashes: Iterable[int]) -> str:
    """One hash for a replica, from the hashes of its ranks in rank order, as the log shows it."""
    return hash_text(combine(rank_hashes))


def hash_text(value: int) -> str:
    """A signed 64-bit hash as the log shows it."""
    return f"{value & (2**64 - 1):016x}"
