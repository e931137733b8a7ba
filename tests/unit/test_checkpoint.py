"""Durable snapshots of a replica of one rank; everything is real but the trainer that holds it together."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from elastic_train.config import CheckpointConfig
from elastic_train.diloco.control import ControlGroup
from elastic_train.replica.titan.checkpoint import save_checkpoint
from tests.groups import group_of_one


class Positions:
    """What a data loader gives to a checkpoint."""

    def __init__(self) -> None:
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"positions": torch.tensor([self.read])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = int(state["positions"])


class Replica(SimpleNamespace):
    """What ``save_checkpoint`` sees of a trainer."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizers.zero_grad()
            self.model_parts[0](torch.ones(1, 3)).square().sum().backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.dataloader.read += 1
            self.step += 1


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


def make(seed: int, number: int = 0) -> Any:
    torch.manual_seed(seed)
    parts: list[nn.Module] = [nn.Linear(3, 2)]
    optimizers: OptimizersContainer = OptimizersContainer.Config(
        implementation="for-loop",
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})],
    ).build(model_parts=parts)
    return Replica(
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=20),
        dataloader=Positions(),
        step=0,
        rank=0,
        engine=SimpleNamespace(momentum=dict),
        control=ControlGroup(30.0),
        incarnation=SimpleNamespace(slot=1, number=number),
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_torchtitan_loads_what_was_saved(tmp_path: Path) -> None:
    saved, loaded = make(seed=0), make(seed=1)
    saved.train(3)
    momentum = {"0.0.weight": torch.full((2, 3), 5.0)}
    saved.engine.momentum = lambda: momentum
    taken = {"0.0.weight": torch.zeros(2, 3)}

    path, duration_s = save_checkpoint(saved, CheckpointConfig(folder="ckpt"), tmp_path, last=False)

    assert path == tmp_path / "ckpt" / "step-3"
    assert duration_s > 0
    reader = CheckpointManager.Config(enable=True, folder="ckpt").build(
        dataloader=loaded.dataloader,
        model_parts=loaded.model_parts,
        optimizers=loaded.optimizers,
        lr_schedulers=loaded.lr_schedulers,
        states={"train_state": loaded, "outer_momentum": taken},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    assert reader.load(step=-1)
    reader.close()
    assert (loaded.step, loaded.dataloader.read) == (3, 3)
    assert torch.equal(taken["0.0.weight"], momentum["0.0.weight"])
    for replica in (saved, loaded):
        replica.train(2)
    assert torch.equal(loaded.model_parts[0].weight, saved.model_parts[0].weight)


def test_nothing_else_is_left(tmp_path: Path) -> None:
    replica = make(seed=0)
    replica.train(2)

    save_checkpoint(replica, CheckpointConfig(folder="ckpt"), tmp_path, last=False)

    assert names(tmp_path) == ["ckpt"]
    assert names(tmp_path / "ckpt") == ["step-2"]


@pytest.mark.parametrize(("keep", "left"), [(2, ["step-10", "step-9"]), (0, ["step-10", "step-8", "step-9"])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[str]) -> None:
    replica = make(seed=0)
    for step in (8, 9, 10):
        replica.step = step
        save_checkpoint(replica, CheckpointConfig(folder="ckpt", keep_latest_k=keep), tmp_path, last=False)

    assert names(tmp_path / "ckpt") == left


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    """As after a step that was trained twice: the first copy has lost its place in the run."""
    replica, config = make(seed=0), CheckpointConfig(folder="ckpt")
    replica.step = 5
    save_checkpoint(replica, config, tmp_path, last=False)
    with torch.no_grad():
        replica.model_parts[0].weight.fill_(7)

    path, _ = save_checkpoint(replica, config, tmp_path, last=False)

    state = {"weight": torch.zeros(2, 3)}
    dcp.load(state, checkpoint_id=str(path))
    assert torch.equal(state["weight"], torch.full((2, 3), 7.0))


def test_the_last_of_a_run_is_the_model_alone_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    replica = make(seed=0)
    replica.train(1)
    config = CheckpointConfig(folder="ckpt", last_save_model_only=True, export_dtype="bfloat16")

    path, _ = save_checkpoint(replica, config, tmp_path, last=True)

    tensors = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert sorted(tensors) == ["bias", "weight"]
    assert {entry.properties.dtype for entry in tensors.values()} == {torch.bfloat16}  # type: ignore[union-attr]


def test_an_earlier_one_is_whole_whatever_the_last_will_be(tmp_path: Path) -> None:
    replica = make(seed=0)
    replica.train(1)
    config = CheckpointConfig(folder="ckpt", last_save_model_only=True)

    path, _ = save_checkpoint(replica, config, tmp_path, last=False)

    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert stored.keys() >= {
        "weight",
        "optimizer.state.weight.exp_avg",
        "lr_scheduler.last_epoch",
        "dataloader.positions",
        "train_state.step",
    }


def test_a_save_that_fails_leaves_the_ones_before(tmp_path: Path) -> None:
    replica, config = make(seed=0), CheckpointConfig(folder="ckpt", keep_latest_k=2)
    replica.train(1)
    save_checkpoint(replica, config, tmp_path, last=False)
    replica.train(1)
    replica.dataloader.state_dict = lambda: 1 / 0

    with pytest.raises(Exception, match="division by zero"):
        save_checkpoint(replica, config, tmp_path, last=False)

    assert [name for name in names(tmp_path / "ckpt") if not name.startswith(".")] == ["step-1"]


def test_what_an_incarnation_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    for half_written in (".writing-replica_1-0", ".writing-replica_1-2", ".writing-replica_11-0"):
        (tmp_path / "ckpt" / half_written / "step-4").mkdir(parents=True)
    replica = make(seed=0, number=3)

    save_checkpoint(replica, CheckpointConfig(folder="ckpt"), tmp_path, last=False)

    assert names(tmp_path / "ckpt") == [".writing-replica_11-0", "step-0"]
