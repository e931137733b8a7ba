"""When a slot has a standby made beside its replica, and what becomes of one whose ReplicaActor is gone."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.clock import SystemClock
from elastic_train.config import RunConfig
from elastic_train.events import EventLog, LineFile
from elastic_train.lifecycle import Trigger
from elastic_train.orchestrator import slot as module
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.generation import Generation
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler.local import LocalScheduler
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext
from elastic_train.orchestrator.supervisor import SupervisorLost
from elastic_train.orchestrator.turns import StandbyTurns
from elastic_train.replica.actor import SegmentPart

SLOT = 1


class FakeSupervisor:
    """A ReplicaActor that makes a standby when the test lets it, and tells its end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ready = asyncio.Event()
        self._answers: asyncio.Queue[bool | SupervisorLost] = asyncio.Queue()

    def gone(self, *, taken: bool) -> None:
        self._answers.put_nowait(taken)

    def dies(self) -> None:
        self._answers.put_nowait(SupervisorLost(None, "its process has ended"))

    async def ask(self, endpoint: str, *arguments: Any) -> Any:
        assert not arguments
        self.asked.append(endpoint)
        if endpoint == "make_standby":
            await self.ready.wait()
            return None
        answer = await self._answers.get()
        if isinstance(answer, SupervisorLost):
            raise answer
        return answer


def new_slot(folder: Path, turns: StandbyTurns | None = None) -> ReplicaSlot:
    context = RunContext(
        config=RunConfig(),
        folder=RunFolder(folder),
        log=EventLog(folder / "events.jsonl", SystemClock()),
        metrics=LineFile(folder / "metrics.jsonl"),
        clock=SystemClock(),
        scheduler=LocalScheduler(),
        generation=Generation(barrier=ColdStart(2)),
        on_metrics=[],
        turns=turns or StandbyTurns(),
    )
    return ReplicaSlot(SLOT, context, lambda slot: 1)


def hears(slot: ReplicaSlot, name: str, incarnation: int, **fields: Any) -> None:
    event = {"t": 0.0, "event": name, "replica": SLOT, "incarnation": incarnation, **fields}
    slot._take(SegmentPart(events=[event], metrics=[], offsets=(1, 0)))


def begins(slot: ReplicaSlot, number: int) -> None:
    """As the slot does when it starts an incarnation."""
    slot._number = number
    slot._trains.clear()
    slot._run.turns.starts(SLOT)


@contextlib.asynccontextmanager
async def keeping(slot: ReplicaSlot, supervisor: FakeSupervisor) -> AsyncIterator[None]:
    slot._supervisor = supervisor  # type: ignore[assignment]
    task = asyncio.ensure_future(slot._keep_standby())
    try:
        async with asyncio.timeout(60):
            yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def settle() -> None:
    """Let everything go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until_asked(supervisor: FakeSupervisor, *endpoints: str) -> None:
    while supervisor.asked != list(endpoints):
        await asyncio.sleep(0.001)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STANDBY_PAUSE_S", 0.001)


def test_there_is_none_before_the_first_step(tmp_path: Path) -> None:
    async def check() -> None:
        slot, supervisor = new_slot(tmp_path), FakeSupervisor()
        begins(slot, 0)
        async with keeping(slot, supervisor):
            hears(slot, "procs_started", 0, pids=[], created=[])
            await settle()
            assert supervisor.asked == []
            hears(slot, "first_step", 0)
            await until_asked(supervisor, "make_standby")

    asyncio.run(check())


def test_they_are_made_one_after_the_other(tmp_path: Path) -> None:
    async def check() -> None:
        turns = StandbyTurns()
        slots = [new_slot(tmp_path / name, turns) for name in "ab"]
        first, second = FakeSupervisor(), FakeSupervisor()
        async with keeping(slots[0], first), keeping(slots[1], second):
            begins(slots[0], 0)
            hears(slots[0], "first_step", 0)
            await until_asked(first, "make_standby")
            slots[1]._number = 0
            hears(slots[1], "first_step", 0)
            await settle()
            assert second.asked == []
            first.ready.set()
            await until_asked(second, "make_standby")
            await until_asked(first, "make_standby", "standby_gone")

    asyncio.run(check())


def test_it_is_made_again_after_it_was_taken_once_the_replica_trains(tmp_path: Path) -> None:
    async def check() -> None:
        slot, supervisor = new_slot(tmp_path), FakeSupervisor()
        supervisor.ready.set()
        begins(slot, 0)
        hears(slot, "first_step", 0)
        async with keeping(slot, supervisor):
            await until_asked(supervisor, "make_standby", "standby_gone")
            begins(slot, 1)
            supervisor.gone(taken=True)
            await settle()
            hears(slot, "first_step", 0)
            await settle()
            assert len(supervisor.asked) == 2
            # No pause: with one of hours this would not be reached.
            hears(slot, "first_step", 1)
            await until_asked(supervisor, *["make_standby", "standby_gone"] * 2)

    asyncio.run(check())


def test_one_that_was_lost_is_made_again_after_a_pause_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        if seconds >= module._STANDBY_PAUSE_S:
            pauses.append(seconds)
            seconds = 0
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)

    async def check() -> None:
        slot, supervisor = new_slot(tmp_path), FakeSupervisor()
        supervisor.ready.set()
        begins(slot, 0)
        hears(slot, "first_step", 0)
        async with keeping(slot, supervisor):
            for rounds, taken in enumerate([False] * 9 + [True, False], start=1):
                await until_asked(supervisor, *["make_standby", "standby_gone"] * rounds)
                supervisor.gone(taken=taken)
            await until_asked(supervisor, *["make_standby", "standby_gone"] * 12)

    asyncio.run(check())
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0, 5.0]


@pytest.mark.usefixtures("no_pause")
def test_a_new_replica_actor_has_one_made_as_well(tmp_path: Path) -> None:
    async def check() -> None:
        slot, lost, new = new_slot(tmp_path), FakeSupervisor(), FakeSupervisor()
        lost.ready.set()
        begins(slot, 0)
        hears(slot, "first_step", 0)
        async with keeping(slot, lost):
            await until_asked(lost, "make_standby", "standby_gone")
            begins(slot, 1)
            slot._supervisor = None
            lost.dies()
            await settle()
            slot._supervisor = new  # type: ignore[assignment]
            hears(slot, "first_step", 1)
            await until_asked(new, "make_standby")
            assert len(lost.asked) == 2

    asyncio.run(check())


@pytest.mark.usefixtures("no_pause")
def test_without_a_replica_actor_it_waits_and_lets_the_others_go_on(tmp_path: Path) -> None:
    async def check() -> None:
        slot, supervisor = new_slot(tmp_path), FakeSupervisor()
        begins(slot, 0)
        hears(slot, "first_step", 0)
        async with keeping(slot, supervisor):
            slot._supervisor = None
            await settle()
            assert supervisor.asked == []
            slot._supervisor = supervisor  # type: ignore[assignment]
            await until_asked(supervisor, "make_standby")

    asyncio.run(check())


def test_a_replica_that_failed_while_it_waited_for_its_turn_gets_none(tmp_path: Path) -> None:
    async def check() -> None:
        turns = StandbyTurns()
        slot, supervisor = new_slot(tmp_path, turns), FakeSupervisor()
        turns.starts(0)
        begins(slot, 0)
        hears(slot, "first_step", 0)
        async with keeping(slot, supervisor):
            await settle()
            begins(slot, 1)
            slot.apply(Trigger.ALLOCATED)
            slot.apply(Trigger.FAILED)
            turns.started(0)
            await settle()
            assert supervisor.asked == []

    asyncio.run(check())


def test_others_may_make_one_once_a_replica_has_failed_to_start(tmp_path: Path) -> None:
    async def check() -> None:
        slot = new_slot(tmp_path)
        begins(slot, 0)
        slot.apply(Trigger.ALLOCATED)
        had = asyncio.Event()

        async def other() -> None:
            async with slot._run.turns.turn():
                had.set()

        task = asyncio.ensure_future(other())
        await settle()
        assert not had.is_set()
        slot.apply(Trigger.FAILED)
        await asyncio.wait_for(task, 60)

    asyncio.run(check())


@pytest.mark.parametrize("made_beside", [2, 1], ids=["this incarnation", "the one before"])
def test_a_standby_without_an_actor_is_ended(tmp_path: Path, made_beside: int) -> None:
    slot = new_slot(tmp_path)
    slot._number = 2
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            created = psutil.Process(process.pid).create_time()
            hears(slot, "standby_started", made_beside, pids=[process.pid], created=[created])
            asyncio.run(slot.shut_down())
            assert process.wait(60) == -9
        finally:
            process.kill()
