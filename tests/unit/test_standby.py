"""The life of a standby, with processes that do what the test says."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from elastic_train.replica import standby as module
from elastic_train.replica.procs import Procs
from elastic_train.replica.standby import Standby, StandbyState

LONG_S = 3600.0
"""Nothing in these tests takes so long."""


class FakeProcs:
    """The processes of a standby: they start, import, answer and end when the test lets them."""

    def __init__(self, *, stopped: bool = False) -> None:
        self.running = asyncio.Event()
        self.imported = asyncio.Event()
        self.error: Exception | None = None
        self.alive = False
        self.stopped = stopped
        self.asked = 0
        self.ended = 0

    async def started(self) -> None:
        await self.running.wait()
        self.alive = True
        if self.error:
            raise self.error

    async def warm(self) -> None:
        await self.imported.wait()

    @property
    def all_alive(self) -> bool:
        return self.alive

    async def answer(self, timeout_s: float) -> bool:
        self.asked += 1
        if self.stopped:
            await asyncio.sleep(min(timeout_s, 0.001))
        return self.alive and not self.stopped

    async def end(self) -> None:
        self.ended += 1
        self.alive = False


class Bench:
    """A standby that is made of fake processes."""

    def __init__(self, *, silence_s: float = LONG_S, start_s: float = LONG_S, stopped: bool = False) -> None:
        self.standby = Standby(silence_s=silence_s, start_s=start_s)
        self.procs = FakeProcs(stopped=stopped)
        self.told: list[Any] = []
        self.making: asyncio.Task[bool] | None = None

    def make(self) -> asyncio.Task[bool]:
        procs: Any = self.procs
        self.making = asyncio.ensure_future(self.standby.make(lambda: procs, self.told.append))
        return self.making

    async def made_until_it_imports(self) -> asyncio.Task[bool]:
        making = self.make()
        self.procs.running.set()
        while not self.told:
            await asyncio.sleep(0)
        return making

    async def take(self) -> Any:
        return await self.standby.take()

    async def made(self) -> None:
        making = await self.made_until_it_imports()
        self.procs.imported.set()
        assert await making


def run(check: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await check

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    monkeypatch.setattr(module, "_ASK_EVERY_S", 0.002)


def test_it_is_made_and_then_taken() -> None:
    async def check() -> None:
        bench = Bench()
        assert bench.standby.state is StandbyState.NONE
        making = bench.make()
        await asyncio.sleep(0)
        assert (bench.standby.state, bench.told) == (StandbyState.WARMING, [])
        bench.procs.running.set()
        bench.procs.imported.set()
        assert await making
        assert (bench.standby.state, bench.told) == (StandbyState.READY, [bench.procs])

        gone = asyncio.ensure_future(bench.standby.gone())
        assert await bench.take() is bench.procs
        assert await gone is True
        assert (bench.standby.state, bench.procs.ended) == (StandbyState.NONE, 0)

    run(check())


def test_without_one_there_is_nothing_to_take_or_to_wait_for() -> None:
    async def check() -> None:
        standby = Standby(silence_s=LONG_S, start_s=LONG_S)
        assert await standby.take() is None
        assert await standby.gone() is False
        await standby.end()

    run(check())


def test_one_is_enough() -> None:
    async def check() -> None:
        bench = Bench()
        making = await bench.made_until_it_imports()
        assert await bench.make() is False
        bench.procs.imported.set()
        assert await making
        assert await bench.make() is True
        assert bench.told == [bench.procs]

    run(check())


def test_what_was_taken_is_not_looked_after_any_more() -> None:
    async def check() -> None:
        bench = Bench()
        await bench.made()
        procs = await bench.take()
        bench.procs.alive = False
        await bench.standby.end()
        asked = bench.procs.asked
        bench.procs = FakeProcs()
        await bench.made()
        while not bench.procs.asked:
            await asyncio.sleep(0.001)
        assert isinstance(procs, FakeProcs)
        assert (procs.asked, procs.ended) == (asked, 0)

    run(check())


def test_one_that_warms_is_waited_for() -> None:
    async def check() -> None:
        bench = Bench()
        making = await bench.made_until_it_imports()
        taking = asyncio.ensure_future(bench.take())
        await asyncio.sleep(0)
        assert await bench.standby.gone() is True
        assert not taking.done()
        bench.procs.imported.set()
        assert await taking is bench.procs
        assert await making is False
        assert bench.procs.ended == 0

    run(check())


@pytest.mark.parametrize("trouble", ["dies", "stops"])
def test_one_that_is_lost_while_it_warms_is_not_waited_for(trouble: str) -> None:
    async def check() -> None:
        bench = Bench(silence_s=0.001)
        making = await bench.made_until_it_imports()
        taking = asyncio.ensure_future(bench.take())
        await asyncio.sleep(0)
        bench.procs.alive, bench.procs.stopped = trouble != "dies", True
        assert await taking is None
        assert await making is False
        assert bench.procs.ended
        assert bench.standby.state is StandbyState.NONE

    run(check())


@pytest.mark.parametrize("trouble", ["dies", "stops"])
def test_one_that_is_lost_while_it_waits_is_ended_and_makes_room(trouble: str) -> None:
    async def check() -> None:
        bench = Bench()
        await bench.made()
        gone = asyncio.ensure_future(bench.standby.gone())
        bench.procs.alive, bench.procs.stopped = trouble != "dies", True
        assert await gone is False
        assert await bench.take() is None
        while not bench.procs.ended:
            await asyncio.sleep(0)
        bench.procs = FakeProcs()
        await bench.made()
        assert await bench.take() is bench.procs

    run(check())


@pytest.mark.parametrize("trouble", ["dies", "stops"])
def test_what_nobody_has_seen_fail_is_found_when_it_is_taken(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", LONG_S)

    async def check() -> None:
        bench = Bench()
        await bench.made()
        bench.procs.alive, bench.procs.stopped = trouble != "dies", True
        assert await bench.take() is None
        assert bench.procs.ended == 1

    run(check())


def test_processes_that_cannot_be_started_are_no_standby() -> None:
    def start() -> Procs:
        raise RuntimeError("no host")

    async def check() -> None:
        bench = Bench()
        assert await bench.standby.make(start, bench.told.append) is False
        assert await bench.standby.gone() is False
        bench.procs.error = RuntimeError("no process")
        bench.procs.running.set()
        assert await bench.make() is False
        assert await bench.standby.gone() is False
        assert (bench.procs.ended, bench.told) == (1, [])
        assert bench.standby.state is StandbyState.NONE

    run(check())


@pytest.mark.parametrize("runs", [False, True], ids=["does not start", "does not get ready"])
def test_one_that_takes_too_long_is_ended(runs: bool) -> None:
    async def check() -> None:
        bench = Bench(silence_s=LONG_S if runs else 0.001, start_s=0.001)
        if runs:
            bench.procs.running.set()
        assert await bench.make() is False
        assert bench.procs.ended == 1
        assert await bench.standby.gone() is False

    run(check())


@pytest.mark.parametrize("at", ["starting", "warming", "ready"])
def test_the_end_ends_its_processes_and_holds_nobody_up(at: str) -> None:
    async def check() -> None:
        bench = Bench()
        if at == "ready":
            await bench.made()
        elif at == "warming":
            await bench.made_until_it_imports()
        else:
            bench.make()
            await asyncio.sleep(0)
        gone = asyncio.ensure_future(bench.standby.gone())
        await bench.standby.end()
        assert bench.procs.ended == 1
        assert await gone is False
        assert bench.making is not None
        assert await bench.making is (at == "ready")
        assert await bench.take() is None

    run(check())


@pytest.mark.parametrize("at", ["importing", "asked"])
def test_who_stops_taking_it_leaves_no_processes(at: str) -> None:
    async def check() -> None:
        bench = Bench()
        if at == "importing":
            await bench.made_until_it_imports()
        else:
            await bench.made()
            answers = asyncio.Event()

            async def answer(timeout_s: float) -> bool:
                answers.set()
                await asyncio.sleep(LONG_S)
                return True

            bench.procs.answer = answer  # type: ignore[method-assign]
        taking = asyncio.ensure_future(bench.take())
        if at == "asked":
            await answers.wait()
        else:
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
        assert taking.cancelled()
        assert bench.procs.ended
        assert await bench.making is (at == "asked")  # type: ignore[misc]
        assert bench.standby.state is StandbyState.NONE

    run(check())


def test_a_process_that_survives_does_not_keep_the_replica_from_new_ones() -> None:
    async def check() -> None:
        bench = Bench(stopped=True)
        await bench.made()

        async def end() -> None:
            raise RuntimeError("processes survive SIGKILL")

        bench.procs.end = end  # type: ignore[method-assign]
        assert await bench.take() is None

    run(check())
