"""How the Lighthouse is kept, on lives of its process that the test ends; the registry in them is a real one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.clock import ManualClock
from elastic_train.config import EnvironmentProblem, LighthouseConfig, RecoveryConfig, RunConfig
from elastic_train.events import EventLog, LineFile, Record, read_all
from elastic_train.lighthouse.actor import Listening, Ports
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.orchestrator import lighthouse_keeper
from elastic_train.orchestrator.end import RunEnd
from elastic_train.orchestrator.lighthouse_keeper import LighthouseKeeper
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler.local import LocalScheduler
from elastic_train.orchestrator.slot import RunContext
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.roll import Roll
from elastic_train.replica.watch.process_end import ProcessEnd

HOST = "127.0.0.1"
KILLED = ProcessEnd(cause="signal", signal="SIGKILL", error="killed by SIGKILL")
WAIT_S = 30.0


class Life:
    """One life of the process."""

    def __init__(self, world: "World", number: int) -> None:
        self._world = world
        self.number = number
        self.registry: RegistryServer | None = None
        self.over: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self.killed = self.stopped = False

    async def start(self, ports: Ports, roll: Roll) -> Listening:
        self._world.started.append((ports, roll))
        if self.number in self._world.fails:
            raise EnvironmentProblem("it cannot listen")
        self.registry = RegistryServer(HOST, ports.registry, self._world.run.token, roll=roll)
        self._world.answers = True
        lighthouse = f"http://{HOST}:{ports.lighthouse}"
        return Listening(lighthouse=lighthouse, registry=self.registry.url, process=(100 + self.number, 0.0))

    async def ended(self) -> ProcessEnd:
        return await asyncio.shield(self.over)

    def kill(self) -> None:
        self.killed = True
        self.end(KILLED)

    def end(self, how: ProcessEnd) -> None:
        if self.registry is not None:
            self.registry.close()
        if not self.over.done():
            self.over.set_result(how)

    async def stop(self) -> None:
        self.stopped = True
        self.end(ProcessEnd(cause="proc_exit", error="stopped"))


class World:
    """A run without replicas."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        recovery = RecoveryConfig(backoff_initial_s=0.0, backoff_max_s=0.0, forgive_after_s=60.0)
        self.clock = ManualClock()
        self.events = folder / "events.jsonl"
        self.run = RunContext(
            config=RunConfig(lighthouse=LighthouseConfig(host=HOST, **settings), recovery=recovery),
            folder=RunFolder(folder),
            log=EventLog(self.events, self.clock),
            metrics=LineFile(folder / "metrics.jsonl"),
            clock=self.clock,
            scheduler=LocalScheduler(),
            generation=None,  # type: ignore[arg-type]
            on_metrics=[],
        )
        self.started: list[tuple[Ports, Roll]] = []
        self.lives: list[Life] = []
        self.fails: set[int] = set()
        self.answers = True
        self.keeper = LighthouseKeeper(self.run, make=self._make)

    def _make(self, number: int) -> Life:
        self.lives.append(Life(self, number))
        return self.lives[-1]

    def told(self, *names: str) -> list[Record]:
        return [event for event in read_all(self.events) if event["event"] in names]

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[asyncio.Task[RunEnd]]:
        """While it lasts the keeper is at work."""
        await self.keeper.start()
        keeping = asyncio.ensure_future(self.keeper.keep())
        try:
            async with asyncio.timeout(WAIT_S):
                yield keeping
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
            await self.keeper.close()
            assert all(life.stopped for life in self.lives)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def make(**settings: Any) -> World:
        made = World(tmp_path, **settings)
        monkeypatch.setattr(lighthouse_keeper, "_PROBE_S", 0.01)
        monkeypatch.setattr(lighthouse_keeper, "answers", lambda address, timeout_s: made.answers)
        return made

    return make


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def lives_begun(world: World, count: int) -> Callable[[], bool]:
    return lambda: len(world.told("lighthouse_started")) == count


def test_what_was_killed_is_started_again_at_its_address(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        async with world.kept() as keeping:
            lighthouse, registry = world.run.lighthouse, world.run.registry
            world.lives[0].end(KILLED)
            await until(lives_begun(world, 2))
            assert not keeping.done()
            assert (world.run.lighthouse, world.run.registry) == (lighthouse, registry)
            first, second = (ports for ports, _ in world.started)
            assert first == second
            assert 0 not in (first.lighthouse, first.registry)
            assert Directory(registry, world.run.token).refresh()
        told = world.told("lighthouse_started", "lighthouse_lost")
        assert [event["event"] for event in told] == ["lighthouse_started", "lighthouse_lost", "lighthouse_started"]
        assert (told[1]["cause"], told[1]["signal"], told[1]["error"]) == ("signal", "SIGKILL", "killed by SIGKILL")
        assert [told[0]["restarts"], told[2]["restarts"]] == [0, 1]
        assert [told[0]["address"], told[0]["pid"]] == [lighthouse, 100]
        assert [told[2]["address"], told[2]["pid"]] == [lighthouse, 101]

    asyncio.run(scene(world()))


def test_what_the_registry_knew_is_what_its_successor_knows(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        async with world.kept():
            replica = Directory(world.run.registry, world.run.token)
            replica.register(0, 4, ["http://a:1"])
            replica.ended(1, 2)
            for slot in (3, 1):
                assert world.run.directory.retired(slot)
            await until(lambda: world.run.directory.known.peers and world.run.directory.known.ended)
            known = replica.roll()
            world.lives[0].end(KILLED)
            await until(lives_begun(world, 2))
            assert world.started[1][1] == known
            assert known.retired == (3, 1)
            newcomer = Directory(world.run.registry, world.run.token)
            assert newcomer.roll() == known
            assert newcomer.is_dead(1, 2)
            assert not newcomer.is_dead(0, 4)

    asyncio.run(scene(world()))


@pytest.mark.parametrize("external", [False, True])
def test_losses_in_a_row_end_the_run(world: Callable[..., World], external: bool) -> None:
    async def scene(world: World) -> None:
        async with world.kept() as keeping:
            for number in range(3):
                await until(lives_begun(world, number + 1))
                world.lives[number].end(KILLED)
            end = await keeping
        what = "the registry of the replicas" if external else "the Lighthouse"
        assert end == RunEnd(
            status="failed", cause="signal", reason=f"{what} is lost 3 times in a row: killed by SIGKILL"
        )
        assert len(world.told("lighthouse_lost")) == 3

    asyncio.run(scene(world(restarts=2, address="http://head:29510" if external else "")))


def test_time_without_a_loss_forgives(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        async with world.kept() as keeping:
            for number in range(4):
                await until(lives_begun(world, number + 1))
                world.clock.advance(60.0)
                world.lives[number].end(KILLED)
            await until(lives_begun(world, 5))
            assert not keeping.done()

    asyncio.run(scene(world(restarts=1)))


def test_what_does_not_start_is_tried_again_and_counts(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        world.fails = {1, 2}
        async with world.kept() as keeping:
            world.lives[0].end(KILLED)
            await until(lives_begun(world, 2))
            assert [event["error"] for event in world.told("lighthouse_lost")] == [
                "killed by SIGKILL",
                "it cannot listen",
                "it cannot listen",
            ]
            # Whatever it may have listened at is free before the next one starts.
            assert world.lives[1].stopped
            assert world.lives[2].stopped
            world.fails = {4}
            world.lives[3].end(KILLED)
            assert (await keeping).cause == "exception"

    asyncio.run(scene(world(restarts=4)))


def test_what_cannot_start_at_first_says_so(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        world.fails = {0}
        with pytest.raises(EnvironmentProblem, match="it cannot listen"):
            await world.keeper.start()
        await world.keeper.close()
        assert world.lives[0].stopped

    asyncio.run(scene(world()))


def test_what_does_not_answer_is_ended_and_replaced(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        async with world.kept():
            world.answers = False
            while not world.told("lighthouse_lost"):
                world.clock.advance(1.0)
                await asyncio.sleep(0.02)
            await until(lives_begun(world, 2))
            lost = world.told("lighthouse_lost")
        assert world.lives[0].killed
        assert len(lost) == 1
        assert lost[0]["cause"] == "hang"
        assert lost[0]["error"].startswith("it did not answer for ")

    asyncio.run(scene(world(silence_timeout_s=10.0)))


def test_a_controller_that_was_stopped_itself_asks_again_first(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        async with world.kept():
            asked: list[str] = []

            def ask(address: str, timeout_s: float) -> bool:
                asked.append(address)
                # The time in which this process was stopped passed within one question.
                world.clock.advance(3600.0 if len(asked) == 2 else 0.0)
                return len(asked) != 2

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(lighthouse_keeper, "answers", ask)
                await until(lambda: len(asked) > 8)
            assert world.told("lighthouse_lost") == []

    asyncio.run(scene(world()))


def test_an_external_lighthouse_is_not_asked(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        async with world.kept():
            world.answers = False
            for _ in range(20):
                world.clock.advance(10.0)
                await asyncio.sleep(0.02)
            assert world.told("lighthouse_lost") == []

    asyncio.run(scene(world(address="http://head:29510")))


def test_a_fault_of_its_kind_kills_it(world: Callable[..., World]) -> None:
    async def scene(world: World) -> None:
        async with world.kept():
            for kind in ("kill", "lighthouse"):
                world.run.log.emit("fault_injected", kind=kind, point="step", spec=f"0.0@20:{kind}")
            await until(lives_begun(world, 2))
            assert world.lives[0].killed
            assert not world.lives[1].killed
        assert len(world.told("lighthouse_lost")) == 1

    asyncio.run(scene(world()))


def test_pauses_double_up_to_the_bound() -> None:
    assert [lighthouse_keeper._pause(spent, 0.5, 3.0) for spent in (1, 2, 3, 4, 5, 5000)] == [0, 0.5, 1, 2, 3, 3]
