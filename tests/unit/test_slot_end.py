"""How a slot's part of the run ends, or goes on, after its replica's training. The test plays the ReplicaActor."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.clock import SystemClock
from elastic_train.config import RunConfig
from elastic_train.events import EventLog, LineFile, Record, read_all
from elastic_train.lifecycle import ReplicaState
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.generation import Generation
from elastic_train.orchestrator.manager import OrchestrationManager
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler.local import LocalScheduler
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext, SlotEnd
from elastic_train.replica.actor import SegmentPart
from elastic_train.replica.ending import Ending
from elastic_train.replica.watch.failure import ReplicaFailure

END_S = 60
CONFIG = RunConfig()
KILLED = ReplicaFailure(cause="signal", rank=0, step=9, error="killed by SIGKILL", signal="SIGKILL")


class Actor:
    """A ReplicaActor. Its replica's training ends when the test says so, each time in its own way."""

    heard_at: float | None = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.events: list[Record] = []
        self.deaf = False
        """Whether what the replica has written cannot be read."""
        self.writes: Callable[[], Awaitable[ReplicaFailure | None]] | None = None
        self._endings: asyncio.Queue[Ending | ReplicaFailure] = asyncio.Queue()

    def ends(self, ending: Ending | ReplicaFailure) -> None:
        self._endings.put_nowait(ending)

    def says(self, name: str, incarnation: int = 0, **fields: Any) -> None:
        self.events.append({"t": 0.0, "event": name, "replica": 0, "incarnation": incarnation, **fields})

    async def start(self, incarnation: Any) -> None:
        self.asked.append("start")

    async def ask(self, endpoint: str, *arguments: Any) -> Any:
        self.asked.append(endpoint)
        if endpoint == "save":
            return None if self.writes is None else await self.writes()
        assert endpoint == "train"
        return await self._endings.get()

    async def ask_soon(self, endpoint: str, *arguments: Any) -> Any:
        if endpoint == "leave":
            self.asked.append(endpoint)
            return True
        assert endpoint == "read_segment"
        if self.deaf:
            raise TimeoutError
        return SegmentPart(events=self.events[arguments[1][0] :], metrics=[], offsets=(len(self.events), 0))

    async def close(self, grace_s: float) -> None:
        self.asked.append("close")

    async def stop(self) -> None: ...


class Scene:
    """Slot 0 of a run of two replicas, from the cold start on."""

    def __init__(self, folder: Path, config: RunConfig = CONFIG) -> None:
        self.folder = RunFolder(folder)
        self.run = RunContext(
            config=config,
            folder=self.folder,
            log=EventLog(self.folder.events, SystemClock()),
            metrics=LineFile(folder / "metrics.jsonl"),
            clock=SystemClock(),
            scheduler=LocalScheduler(),
            generation=Generation(barrier=ColdStart(2)),
            on_metrics=[],
        )
        self.actor = Actor()
        self.slot = ReplicaSlot(0, self.run, lambda slot: 1)

    async def trains(self) -> asyncio.Task[SlotEnd]:
        """Begin, with slot 1; returns once the replica trains."""
        actor: Any = self.actor
        self.slot._ensure_supervisor = lambda: actor  # type: ignore[method-assign]
        living = self.slot._live

        async def live() -> Ending | ReplicaFailure:
            self.slot._supervisor = actor
            return await living()

        self.slot._live = live  # type: ignore[method-assign]
        task = asyncio.ensure_future(self.slot._run_to_end())
        barrier = self.run.generation.barrier
        arriving = asyncio.ensure_future(barrier.arrive(1))
        await barrier.release_when_ready(END_S, least=2)
        await arriving
        self.run.generation.holders.add(1)
        await self.until(lambda: "train" in self.actor.asked)
        return task

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(END_S):
            while not condition():
                await asyncio.sleep(0.001)

    def events(self, name: str) -> list[Record]:
        return [event for event in read_all(self.folder.events) if event["event"] == name]

    @property
    def states(self) -> list[str]:
        return [event["to"] for event in self.events("replica_state")]


async def ended(task: asyncio.Task[SlotEnd]) -> SlotEnd:
    return await asyncio.wait_for(task, END_S)


@pytest.mark.parametrize("deaf", [False, True])
def test_one_that_left_has_not_finished_whether_its_events_are_heard_or_not(tmp_path: Path, deaf: bool) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        task = await scene.trains()
        scene.actor.says("replica_left", inner_step=20, outer_step=2)
        scene.actor.deaf = deaf
        scene.run.draining = True
        await scene.slot.drain(1.0)
        scene.actor.ends(Ending.LEFT)
        end = await ended(task)
        assert (end.state, scene.slot.has_left, scene.slot.finished) == (ReplicaState.STOPPED, True, False)
        assert scene.slot.outer_step == (0 if deaf else 2)
        assert scene.actor.asked == ["start", "train", "leave"]

    asyncio.run(play())


@pytest.mark.parametrize("draining", [False, True])
def test_one_that_trained_to_the_end_has_finished_also_while_it_drains(tmp_path: Path, draining: bool) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        task = await scene.trains()
        if draining:
            scene.run.draining = True
            await scene.slot.drain(1.0)
        scene.actor.ends(Ending.FINISHED)
        end = await ended(task)
        assert (end.state, scene.slot.has_left, scene.slot.finished) == (ReplicaState.SUCCEEDED, False, True)

    asyncio.run(play())


def test_one_that_fails_while_the_run_drains_is_stopped(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        task = await scene.trains()
        scene.run.draining = True
        await scene.slot.drain(1.0)
        scene.actor.ends(KILLED)
        end = await ended(task)
        assert (end.state, end.cause) == (ReplicaState.STOPPED, "signal")
        assert scene.events("restart_scheduled") == []

    asyncio.run(play())


def test_nobody_is_started_that_waited_when_the_run_began_to_drain(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        task = await scene.trains()
        # While nobody holds the state, there is nobody to join.
        scene.run.generation.holders.clear()
        scene.actor.ends(KILLED)
        await scene.until(lambda: bool(scene.events("restart_scheduled")))
        scene.run.draining = True
        scene.run.generation.holders.add(1)
        end = await ended(task)
        assert (end.state, end.cause) == (ReplicaState.STOPPED, "signal")
        assert scene.actor.asked == ["start", "train"]

    asyncio.run(play())


def test_nobody_is_started_who_got_its_hosts_while_the_run_drains(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        allocate = scene.run.scheduler.allocate

        async def late(name: str) -> Any:
            scene.run.draining = True
            return await allocate(name)

        scene.run.scheduler.allocate = late  # type: ignore[method-assign]
        end = await asyncio.wait_for(scene.slot._run_to_end(), END_S)
        assert end.state is ReplicaState.STOPPED
        assert scene.actor.asked == []

    asyncio.run(play())


def test_one_that_is_preempted_is_ended_before_the_pause(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        task = await scene.trains()
        scene.actor.says("sync_committed", outer_step=2)
        scene.actor.says("drain_started", within_s=1.0, cause="preempted", rank=0)
        scene.actor.says("replica_left", inner_step=20, outer_step=2)
        closed_with: list[ReplicaState] = []
        close = scene.actor.close

        async def closing(grace_s: float) -> None:
            closed_with.append(scene.slot.state)
            # The other one goes as well: the pause lasts until somebody holds the state.
            scene.run.generation.holders.clear()
            await close(grace_s)

        scene.actor.close = closing  # type: ignore[method-assign]
        scene.actor.ends(Ending.LEFT)
        await scene.until(lambda: bool(closed_with) and scene.slot._allocation is None)
        assert closed_with == [ReplicaState.BACKOFF]
        assert scene.states[-2:] == ["DRAINING", "BACKOFF"]
        assert not task.done()
        (lost,) = scene.events("allocation_lost")
        assert (lost["cause"], lost["hosts"], lost["incarnation"]) == ("preempted", ["localhost"], 0)
        # Slot 1 held the state when it left.
        assert "save" not in scene.actor.asked

        scene.run.generation.holders.add(1)
        await scene.until(lambda: scene.actor.asked.count("train") == 2)
        assert len(scene.events("allocation_granted")) == 2
        # The segment is read on from where it was, which is on the same machine.
        scene.actor.says("first_step", incarnation=1)
        await scene.slot.pump()
        assert [len(scene.events(name)) for name in ("first_step", "sync_committed", "replica_left")] == [1, 1, 1]
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(play())


@pytest.mark.parametrize("way", ["writes", "fails", "hangs", "is not wanted"])
def test_the_last_one_with_the_state_writes_it_before_it_is_ended(tmp_path: Path, way: str) -> None:
    short = dataclasses.replace(CONFIG.recovery, save_hang_timeout_s=0.01)
    config = dataclasses.replace(CONFIG, recovery=short) if way == "hangs" else CONFIG

    async def play() -> None:
        scene = Scene(tmp_path, config)
        task = await scene.trains()
        generation = scene.run.generation
        generation.holders.discard(1)
        held: list[bool] = []

        async def write() -> ReplicaFailure | None:
            held.append(0 in generation.holders)
            if way == "is not wanted":
                generation.end()
            if way in ("hangs", "is not wanted"):
                await asyncio.Event().wait()
            return None if way == "writes" else KILLED

        scene.actor.writes = write
        scene.actor.says("sync_committed", outer_step=2)
        scene.actor.ends(Ending.LEFT)
        await scene.until(lambda: "close" in scene.actor.asked)
        # Nobody goes back to an older one meanwhile.
        assert held == [True]
        assert scene.actor.asked[:4] == ["start", "train", "save", "close"]
        assert 0 not in generation.holders
        assert scene.events("failure_detected")[-1]["cause"] == "preempted"
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(play())


@pytest.mark.parametrize("why", ["nothing new", "stock"])
def test_what_nobody_could_go_on_from_is_not_written(tmp_path: Path, why: str) -> None:
    stock = dataclasses.replace(CONFIG.diloco, engine="torchft")

    async def play() -> None:
        scene = Scene(tmp_path, dataclasses.replace(CONFIG, diloco=stock) if why == "stock" else CONFIG)
        task = await scene.trains()
        scene.run.generation.holders.discard(1)
        if why == "stock":
            scene.actor.says("sync_committed", outer_step=2)
        scene.actor.ends(Ending.LEFT)
        await scene.until(lambda: "close" in scene.actor.asked)
        assert "save" not in scene.actor.asked
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(play())


def test_the_others_may_train_to_the_end_as_well_while_they_drain(tmp_path: Path) -> None:
    async def play() -> None:
        two_replicas = dataclasses.replace(CONFIG.orchestrator, replicas=2)
        scene = Scene(tmp_path, dataclasses.replace(CONFIG, orchestrator=two_replicas))
        manager = OrchestrationManager(scene.run, "run")
        one, two = manager._slots
        # What it did last was not heard.
        one.lifecycle._state = ReplicaState.HEALING
        one.finished = True
        two.lifecycle._state = ReplicaState.DRAINING
        saved: list[bool] = []

        async def save(*, whole: bool) -> bool:
            saved.append(whole)
            return True

        one.save = save  # type: ignore[method-assign]
        going_on = asyncio.Event()

        async def first() -> SlotEnd:
            return SlotEnd(state=ReplicaState.SUCCEEDED)

        async def second() -> SlotEnd:
            await going_on.wait()
            two.finished = True
            return SlotEnd(state=ReplicaState.SUCCEEDED)

        looked = asyncio.Event()

        async def look() -> None:
            looked.set()

        manager._pump_all = look  # type: ignore[method-assign]
        tasks = {asyncio.ensure_future(first()): one, asyncio.ensure_future(second()): two}
        following = asyncio.ensure_future(manager._follow(tasks))
        await asyncio.wait_for(looked.wait(), END_S)
        going_on.set()
        end = await asyncio.wait_for(following, END_S)
        assert (end.status, two.finished, saved) == ("succeeded", True, [False])

    asyncio.run(play())
