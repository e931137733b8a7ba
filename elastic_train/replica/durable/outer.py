"""The outer state by parameter, as a durable snapshot has it: any number of ranks can read it, in any fragments.

In memory it is flat: one tensor for all parameters of a fragment, of this rank's shards (``diloco.flat``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn

from elastic_train.diloco.fragments import split
from elastic_train.peer_ckpt.shards import local

Flat = Mapping[str, torch.Tensor]
"""A float32 tensor for each fragment, by its number (``OuterSync.anchor``)."""


def by_parameter(model_parts: Sequence[nn.Module], fragments: int, flat: Flat) -> dict[str, torch.Tensor]:
    """Host copies by parameter, each with its parameter's shape and sharding."""
    named = like_parameters(model_parts)
    for name, part in _parts(model_parts, fragments, flat):
        shard = local(named[name])
        shard.copy_(part.view(shard.shape))
    return named


def into_flat(model_parts: Sequence[nn.Module], fragments: int, named: Mapping[str, torch.Tensor], flat: Flat) -> None:
    """The inverse of :func:`by_parameter`: fill ``flat``."""
    for name, part in _parts(model_parts, fragments, flat):
        part.copy_(local(named[name]).reshape(-1))


def like_parameters(model_parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Float32 host tensors of the parameters' shapes and shardings, to be filled."""
    return {name: torch.empty_like(p.detach(), dtype=torch.float32, device="cpu") for name, p in _named(model_parts)}


def _named(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Under the names that torchtitan gives them in a checkpoint."""
    for part in model_parts:
        for name, parameter in part.named_parameters():
            yield canonical_fqn(name), parameter


def _parts(model_parts: Sequence[nn.Module], fragments: int, flat: Flat) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter's name, and the part of ``flat`` that belongs to it."""
    names = {id(parameter): name for name, parameter in _named(model_parts)}
    for index, module in enumerate(split(model_parts, fragments)):
        start = 0
        for parameter in module.parameters():
            stop = start + local(parameter.detach()).numel()
            yield names[id(parameter)], flat[str(index)][start:stop]
            start = stop
