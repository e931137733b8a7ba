"""Who leaves and who writes, without processes."""

import asyncio
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from elastic_train.clock import SystemClock
from elastic_train.config import RunConfig
from elastic_train.events import EventLog, LineFile, read_all
from elastic_train.lifecycle import ReplicaState
from elastic_train.metrics import RunFold
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.drain import Drain
from elastic_train.orchestrator.generation import Generation
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler.local import LocalScheduler
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext
from elastic_train.replica.durable.folder import DurableSnapshot, Facts

CONFIG = RunConfig()


@dataclass
class Replica:
    """A slot as far as it is drained."""

    slot: int
    log: EventLog
    outer_step: int
    leaves: bool = True
    writes: bool = True
    has_left: bool = False
    state: ReplicaState = ReplicaState.RUNNING
    asked: list[float] = field(default_factory=list)
    saves: int = 0
    finished: bool = False

    async def drain(self, within_s: float) -> None:
        self.asked.append(within_s)
        self.has_left = self.leaves
        self.state = ReplicaState.STOPPED

    async def save(self, *, whole: bool) -> bool:
        assert whole
        self.saves += 1
        if self.writes:
            self.log.emit("checkpoint_saved", outer_step=self.outer_step, path="p", duration_s=0.0)
        return self.writes


class Scene:
    """A run of replicas that hold states of these outer steps."""

    def __init__(
        self, folder: Path, *outer_steps: int, config: RunConfig = CONFIG, began_at: int | None = None
    ) -> None:
        facts = Facts(step=0, outer_step=began_at or 0, state_hash="", whole=True, origin={})
        snapshot = None if began_at is None else DurableSnapshot(path=folder, facts=facts)
        self.events = folder / "events.jsonl"
        self.run = RunContext(
            config=config,
            folder=RunFolder(folder),
            log=EventLog(self.events, SystemClock()),
            metrics=LineFile(folder / "metrics.jsonl"),
            clock=SystemClock(),
            scheduler=LocalScheduler(),
            generation=Generation(barrier=ColdStart(len(outer_steps)), snapshot=snapshot),
            on_metrics=[],
        )
        self.fold = RunFold()
        self.run.log.subscribe(self.fold.apply)
        self.replicas = [Replica(slot, self.run.log, outer_step) for slot, outer_step in enumerate(outer_steps)]

    def drain(self, *, released: bool = True) -> None:
        async def play() -> None:
            generation = self.run.generation
            if released:
                await generation.barrier.release_when_ready(0.0, least=0)
                generation.holders.update(replica.slot for replica in self.replicas)
            training: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            drain = Drain(self.run, cast("list[ReplicaSlot]", self.replicas), self.fold, self.hear)
            draining = asyncio.ensure_future(drain.run(training))
            if any(replica.finished for replica in self.replicas):
                await asyncio.sleep(0)
                assert not draining.done()
                training.set_result(None)
            await draining

        asyncio.run(play())

    async def hear(self) -> None:
        return

    @property
    def saves(self) -> list[int]:
        return [replica.saves for replica in self.replicas]

    @property
    def notes(self) -> str:
        return " | ".join(event["text"] for event in read_all(self.events) if event["event"] == "note")


def test_one_of_those_with_the_newest_state_writes_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3, 4, 4)
    scene.drain()
    assert scene.run.draining
    assert [replica.asked for replica in scene.replicas] == [[CONFIG.orchestrator.drain_timeout_s]] * 3
    assert scene.saves == [0, 1, 0]
    assert "could not be written" not in scene.notes


def test_if_one_cannot_write_the_next_does(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4, 4)
    scene.replicas[0].writes = False
    scene.drain()
    assert scene.saves == [1, 1]
    assert "could not be written" not in scene.notes


def test_if_nobody_can_write_it_is_said(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4, 4)
    for replica in scene.replicas:
        replica.writes = False
    scene.drain()
    assert "the last committed state could not be written" in scene.notes


def test_who_has_not_left_is_not_asked_to_write(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4, 3)
    scene.replicas[0].leaves = False
    scene.drain()
    assert scene.saves == [0, 1]


def test_what_is_on_the_disk_already_is_not_written_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4, 4)
    scene.run.log.emit("checkpoint_saved", outer_step=4, path="p", duration_s=0.0)
    scene.drain()
    assert scene.saves == [0, 0]
    assert "could not be written" not in scene.notes


def test_there_is_nothing_to_write_before_the_first_commit(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2, 2, began_at=2)
    scene.drain()
    assert scene.saves == [0, 0]
    assert "nothing was committed since the run began" in scene.notes


def test_torchfts_engine_leaves_no_state_to_go_on_from(tmp_path: Path) -> None:
    stock = dataclasses.replace(CONFIG, diloco=dataclasses.replace(CONFIG.diloco, engine="torchft"))
    scene = Scene(tmp_path, 4, config=stock)
    scene.drain()
    assert scene.saves == [0]
    assert "no state to go on from" in scene.notes


def test_nobody_is_asked_before_the_release(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 0, 0)
    scene.drain(released=False)
    assert [replica.asked for replica in scene.replicas] == [[], []]


def test_an_end_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    config = dataclasses.replace(
        CONFIG,
        orchestrator=dataclasses.replace(CONFIG.orchestrator, finish_timeout_s=0.01),
        recovery=dataclasses.replace(CONFIG.recovery, save_hang_timeout_s=0.01),
    )
    scene = Scene(tmp_path, 4, 4, config=config)

    async def play() -> None:
        generation = scene.run.generation
        await generation.barrier.release_when_ready(0.0, least=0)
        generation.holders.update({0, 1})
        scene.replicas[1].finished = True
        training: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await Drain(scene.run, cast("list[ReplicaSlot]", scene.replicas), scene.fold, scene.hear).run(training)
        assert not training.done()

    asyncio.run(play())
    assert scene.saves == [0, 0]


def test_a_run_that_comes_to_its_end_meanwhile_ends_by_itself(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 4, 4)
    scene.replicas[1].finished = True
    scene.drain()
    assert scene.saves == [0, 0]
    assert "could not be written" not in scene.notes
