"""What a durable snapshot holds: torchtitan's keys, and beside them the outer state by parameter.

The model's parameters lie at the top level, ``optimizer``, ``lr_scheduler``, ``dataloader`` and ``train_state`` below
their names, so that torchtitan's tools read it. ``outer_momentum`` and, where the parameters are something else,
``outer_anchor`` come from the elastic engine. Tensors are sharded as they are in memory, and a reader with other
ranks gets shards of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE, ModelWrapper

from elastic_train.config import ConfigError
from elastic_train.replica.data.position import PositionTable
from elastic_train.replica.durable.folder import DurableSnapshot
from elastic_train.replica.durable.outer import by_parameter, like_parameters
from elastic_train.replica.titan.lr import set_lr_step

if TYPE_CHECKING:
    from elastic_train.replica.trainer import ElasticTrainer

OUTER_ANCHOR = "outer_anchor"
OUTER_MOMENTUM = "outer_momentum"

_POSITIONS = "positions"
_MOMENTS = "state."
"""What the optimizer's entries for its tensors begin with; the others are what the config says."""


@dataclass(frozen=True, kw_only=True)
class OuterContent:
    """The outer state that was read, by parameter: this rank's shards."""

    momentum: Mapping[str, torch.Tensor]
    anchor: Mapping[str, torch.Tensor] | None
    """None: the parameters are the anchor."""


def whole_state(trainer: ElasticTrainer) -> dict[str, Any]:
    """Host copies of all that a run can go on from, as it stands after a commit. Every rank calls."""
    diloco = trainer.run_config.diloco
    state: dict[str, Any] = {
        **parameters(trainer),
        OPTIMIZER: host_copy(trainer.optimizers.state_dict()),
        LR_SCHEDULER: host_copy(trainer.lr_schedulers.state_dict()),
        # Not where this replica reads now: what it reads beside a sync is not in the anchor.
        DATALOADER: {_POSITIONS: trainer.dataloader.committed.rows},
        TRAIN_STATE: trainer.state_dict(),
    }
    if diloco.engine == "elastic":
        parts, engine = trainer.model_parts, trainer.engine
        state[OUTER_MOMENTUM] = by_parameter(parts, diloco.fragments, engine.momentum())
        if diloco.fragments > 1 or diloco.overlap_steps or _are_rounded(parts):
            # Else the parameters are the anchor right after a commit.
            state[OUTER_ANCHOR] = by_parameter(parts, diloco.fragments, engine.anchor())
    return state


def parameters(trainer: ElasticTrainer, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Host copies of the model's parameters and buffers, those of floating point in ``dtype``. Every rank calls."""
    state: dict[str, Any] = host_copy(ModelWrapper(trainer.model_parts).state_dict())
    if dtype is None:
        return state
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


@torch.no_grad()
def host_copy(state: Any) -> Any:
    """A copy of a nested state, its tensors on the host and sharded as they were."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: host_copy(value) for key, value in state.items()}
    return state


@torch.no_grad()
def read(trainer: ElasticTrainer, snapshot: DurableSnapshot) -> OuterContent:
    """Take over a snapshot: parameters, moments, LR, step and data positions. Each rank reads its part by itself.

    Learning rates, weight decay and the like are those of this run's config.

    Raises:
        ConfigError: it is of another model or optimizer.
    """
    model, positions = ModelWrapper(trainer.model_parts), torch.zeros_like(trainer.dataloader.committed.rows)
    momentum = like_parameters(trainer.model_parts)
    state: dict[str, Any] = {
        **model.state_dict(),
        # The live tensors: reading fills them.
        OPTIMIZER: {k: v for k, v in trainer.optimizers.state_dict().items() if k.startswith(_MOMENTS)},
        DATALOADER: {_POSITIONS: positions},
        OUTER_MOMENTUM: momentum,
    }
    anchor = None
    try:
        if _holds(snapshot, OUTER_ANCHOR):
            state[OUTER_ANCHOR] = anchor = like_parameters(trainer.model_parts)
        with warnings.catch_warnings():
            # It warns that it takes this process to be alone, which is meant.
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=dcp.FileSystemReader(snapshot.path), no_dist=True)
    except (CheckpointException, OSError) as error:
        raise ConfigError(
            f"the snapshot {snapshot.path} cannot be taken over ({what_failed(error)}): resume with the model, the "
            "optimizer and the training.dataloader.virtual_shards of the run that wrote it, on hosts that all see it"
        ) from error
    model.load_state_dict(state)
    table = PositionTable(positions)
    trainer.dataloader.commit(table)
    trainer.dataloader.restore(table)
    trainer.step = snapshot.facts.step
    set_lr_step(trainer.lr_schedulers, trainer.step)
    return OuterContent(momentum=momentum, anchor=anchor)


def what_failed(error: BaseException) -> str:
    """One line for an error of torch's distributed checkpoint, which shows all ranks' tracebacks else."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _are_rounded(model_parts: Sequence[nn.Module]) -> bool:
    """Whether parameters are less exact than the anchor."""
    return any(parameter.dtype != torch.float32 for part in model_parts for parameter in part.parameters())


def _holds(snapshot: DurableSnapshot, section: str) -> bool:
    keys = dcp.FileSystemReader(snapshot.path).read_metadata().state_dict_metadata
    return any(key.startswith(f"{section}.") for key in keys)
