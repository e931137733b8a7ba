"""Durable snapshots of a replica of one rank; everything is real but the trainer that holds it together."""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
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

from elastic_train.config import ConfigError, DilocoConfig, RunConfig
from elastic_train.diloco.control import ControlGroup
from elastic_train.replica import trainer as training
from elastic_train.replica.data.position import PositionTable, ShardPosition
from elastic_train.replica.durable import writer as writing
from elastic_train.replica.durable.content import parameters, read, whole_state
from elastic_train.replica.durable.folder import DurableSnapshot, Facts, newest_sound, staging_folder
from elastic_train.replica.durable.writer import NotWritten, SnapshotWriter
from elastic_train.replica.titan.lr import lr_step
from elastic_train.replica.trainer import ElasticTrainer
from tests.groups import group_of_one

SHARDS = 3
NUMEL = 8
END_S = 30.0


class Positions:
    """What a snapshot sees of a data loader."""

    def __init__(self) -> None:
        self.committed = PositionTable.start(SHARDS)
        self.restored: PositionTable | None = None

    def commit(self, table: PositionTable) -> None:
        self.committed = table

    def restore(self, table: PositionTable) -> None:
        self.restored = table

    def state_dict(self) -> dict[str, Any]:
        return {"positions": self.committed.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.committed = PositionTable(state["positions"])


class Outer:
    """What a snapshot sees of the engine."""

    def __init__(self) -> None:
        self.flats = (torch.randn(NUMEL), torch.randn(NUMEL))

    def anchor(self) -> dict[str, torch.Tensor]:
        return {"0": self.flats[0]}

    def momentum(self) -> dict[str, torch.Tensor]:
        return {"0": self.flats[1]}


class Replica(SimpleNamespace):
    """What a snapshot sees of a trainer."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 64 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizers.zero_grad()
            linear = self.model_parts[0]
            linear(torch.ones(1, 3, dtype=linear.weight.dtype)).square().sum().backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.step += 1
        self.optimizers.zero_grad()
        self.dataloader.committed = PositionTable.start(SHARDS).replace({1: ShardPosition(1, 2, 3, self.step)})

    @property
    def facts(self) -> Facts:
        return Facts(step=self.step, outer_step=self.step, state_hash="00ff", whole=True, origin={})


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


def make(seed: int = 0, *, width: int = 2, dtype: torch.dtype = torch.float32, **diloco: Any) -> Any:
    torch.manual_seed(seed)
    parts: list[nn.Module] = [nn.Linear(3, width, dtype=dtype)]
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
        engine=Outer(),
        run_config=SimpleNamespace(diloco=DilocoConfig(**diloco)),
    )


class Told:
    """A writer and what it told."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.saved: list[DurableSnapshot] = []
        self.failed: list[str] = []
        self.writer = SnapshotWriter(
            folder,
            slot=1,
            incarnation=2,
            keep=keep,
            device=torch.device("cpu"),
            control=ControlGroup(END_S),
            on_saved=lambda snapshot, duration_s: self.saved.append(snapshot),
            on_failed=self.failed.append,
        )

    def write(self, replica: Any) -> DurableSnapshot:
        self.writer.start(whole_state(replica), replica.facts)
        self.writer.wait()
        return self.saved[-1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Any, other: Any) -> bool:
    mine, theirs = one.optimizers.state_dict(), other.optimizers.state_dict()
    moments = [torch.equal(mine[key], theirs[key]) for key in mine if key.startswith("state.")]
    return all(moments) and torch.equal(one.model_parts[0].weight, other.model_parts[0].weight)


def test_a_run_goes_on_from_it_as_if_never_interrupted(tmp_path: Path) -> None:
    before, after = make(seed=0), make(seed=1)
    before.train(3)

    outer = read(after, Told(tmp_path).write(before))

    assert after.step == lr_step(after.lr_schedulers) == 3
    assert after.dataloader.committed == after.dataloader.restored == before.dataloader.committed
    assert outer.anchor is None
    flat = torch.cat([outer.momentum[name].reshape(-1) for name in ("weight", "bias")])
    assert torch.equal(flat, before.engine.flats[1])
    assert same(before, after)
    for replica in (before, after):
        replica.train(2)
    assert same(before, after)


@pytest.mark.parametrize(
    "settings",
    [{"overlap_steps": 1}, {"fragments": 1, "overlap_steps": 2, "merge_alpha": 0.5}, {"dtype": torch.bfloat16}],
)
def test_the_anchor_is_there_where_the_parameters_are_something_else(settings: dict[str, Any], tmp_path: Path) -> None:
    before, after = make(seed=0, **settings), make(seed=1, dtype=settings.get("dtype", torch.float32))
    before.train(1)

    outer = read(after, Told(tmp_path).write(before))

    assert outer.anchor is not None
    flat = torch.cat([outer.anchor[name].reshape(-1) for name in ("weight", "bias")])
    assert torch.equal(flat, before.engine.flats[0])


def test_torchtitan_loads_it(tmp_path: Path) -> None:
    saved, loaded = make(seed=0), make(seed=1)
    saved.train(3)
    Told(tmp_path / "ckpt").write(saved)

    reader = CheckpointManager.Config(enable=True, folder="ckpt").build(
        dataloader=loaded.dataloader,
        model_parts=loaded.model_parts,
        optimizers=loaded.optimizers,
        lr_schedulers=loaded.lr_schedulers,
        states={"train_state": loaded},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    assert reader.load(step=-1)
    reader.close()

    assert (loaded.step, loaded.dataloader.committed) == (3, saved.dataloader.committed)
    assert same(saved, loaded)


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, told, other = make(), Told(tmp_path), make(seed=1)
    replica.train(1)
    go_on, weight = threading.Event(), replica.model_parts[0].weight.detach().clone()
    save = dcp.save

    def slow_save(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(END_S)
        return save(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", slow_save)
    told.writer.start(whole_state(replica), replica.facts)
    assert told.writer.is_busy()
    replica.train(2)
    assert newest_sound(tmp_path) == (None, [])
    go_on.set()
    told.writer.wait()

    assert not told.writer.is_busy()
    read(other, told.saved[0])
    assert (other.step, torch.equal(other.model_parts[0].weight, weight)) == (1, True)


def no_space(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", [(dcp, "save"), (writing, "finish")])
def test_a_full_disk_costs_the_snapshot_and_nothing_else(
    where: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, told = make(), Told(tmp_path)
    replica.train(1)
    told.write(replica)
    replica.train(1)
    with monkeypatch.context() as patched:
        patched.setattr(*where, no_space)
        told.writer.start(whole_state(replica), replica.facts)
        with pytest.raises(NotWritten, match="No space left on device"):
            told.writer.wait()

    assert len(told.failed) == 1
    assert "the snapshot of step 2 could not be written: OSError: [Errno 28] No space left" in told.failed[0]
    assert names(tmp_path) == ["step-1"]
    told.write(replica)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_an_error_of_a_file_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    replica, told = make(), Told(tmp_path / "file" / "ckpt")

    told.writer.start(whole_state(replica), replica.facts)
    with pytest.raises(NotWritten, match=r"^.*NotADirectoryError: .*$"):
        told.writer.wait()

    assert [len(text.splitlines()) for text in told.failed] == [1]


def test_what_earlier_incarnations_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    for slot, incarnation in ((1, 0), (1, 2), (2, 0)):
        (staging_folder(tmp_path, slot, incarnation) / "part").mkdir(parents=True)

    told = Told(tmp_path)

    assert names(tmp_path) == [staging_folder(tmp_path, 2, 0).name]
    told.write(make())
    assert names(tmp_path) == [staging_folder(tmp_path, 2, 0).name, "step-0"]


class Saving(SimpleNamespace):
    """What writing a snapshot sees of a trainer."""

    def __init__(self, **fields: Any) -> None:
        self.notes: list[str] = []
        self.started: list[Any] = []
        super().__init__(
            step=7,
            outer_step=3,
            run_config=RunConfig(),
            beacon=SimpleNamespace(during=lambda phase: contextlib.nullcontext()),
            engine=SimpleNamespace(anchor_hash=lambda gather: "00ff"),
            control=ControlGroup(END_S),
            journal=SimpleNamespace(note=self.notes.append),
            _gathered=None,
            _copied=lambda model_as: ElasticTrainer._copied(self, model_as),  # type: ignore[arg-type]
            _writer=SimpleNamespace(
                join=lambda: None, wait=lambda: None, start=lambda state, facts: self.started.append(facts)
            ),
            **fields,
        )


def no_memory(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_without_memory_for_a_copy_the_replica_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = Saving()
    with monkeypatch.context() as patched:
        patched.setattr(training, "whole_state", no_memory)
        patched.setattr(training, "parameters", no_memory)
        ElasticTrainer.save(trainer, whole=True, wait=False)
        with pytest.raises(NotWritten, match="could not copy its state"):
            ElasticTrainer.save(trainer, whole=False, wait=True)

    assert (len(trainer.notes), trainer.started) == (2, [])
    assert "no snapshot of step 7: a rank could not copy its state" in trainer.notes[0]


def test_the_last_of_a_run_is_the_model_alone_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    replica, told = make(), Told(tmp_path)

    told.writer.start(parameters(replica, torch.bfloat16), replica.facts)
    told.writer.wait()

    tensors = dcp.FileSystemReader(told.saved[0].path).read_metadata().state_dict_metadata
    assert sorted(tensors) == ["bias", "weight"]
    assert {entry.properties.dtype for entry in tensors.values()} == {torch.bfloat16}  # type: ignore[union-attr]


REFUSALS: dict[str, Callable[[], Any]] = {
    "Size mismatch": lambda: make(width=3),
    "dataloader.positions": lambda: make_with_shards(SHARDS + 1),
}


def make_with_shards(shards: int) -> Any:
    replica = make()
    replica.dataloader.committed = PositionTable.start(shards)
    return replica


@pytest.mark.parametrize("words", REFUSALS)
def test_what_does_not_fit_is_refused_with_what_to_do(words: str, tmp_path: Path) -> None:
    snapshot = Told(tmp_path).write(make())

    with pytest.raises(ConfigError, match=f"(?i){words}.*resume with the model") as refused:
        read(REFUSALS[words](), snapshot)

    assert "\n" not in str(refused.value)
