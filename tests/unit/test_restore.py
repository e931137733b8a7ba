"""From one generation to the next, without processes: who holds the state is said by hand."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from elastic_train.clock import SystemClock
from elastic_train.config import RunConfig
from elastic_train.events import EventLog, LineFile, read_all
from elastic_train.lifecycle import ReplicaState
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.end import RunEnd
from elastic_train.orchestrator.generation import Generation, Plea
from elastic_train.orchestrator.policy import Failure
from elastic_train.orchestrator.restore import Restorer, last_snapshot
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler.local import LocalScheduler
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext
from elastic_train.replica.durable.folder import DurableSnapshot, Facts, finish
from elastic_train.replica.durable.origin import origin_of

SLOTS = 2
END_S = 20
BASE = RunConfig()
CONFIG = dataclasses.replace(
    BASE,
    orchestrator=dataclasses.replace(BASE.orchestrator, replicas=SLOTS),
    checkpoint=dataclasses.replace(BASE.checkpoint, enable=True),
    recovery=dataclasses.replace(BASE.recovery, restores=2, backoff_initial_s=0.0),
)


@dataclass
class Replica:
    """A slot as far as the Restorer looks at it."""

    slot: int
    state: ReplicaState = ReplicaState.RUNNING
    has_finished: bool = False
    last_failure: Failure | None = None
    looks: int = 0

    @property
    def finished(self) -> bool:
        self.looks += 1
        return self.has_finished


class Scene:
    """A run of two replicas without processes."""

    def __init__(self, folder: Path, config: RunConfig = CONFIG) -> None:
        self.config = config
        self.folder = RunFolder(folder)
        self.run = RunContext(
            config=config,
            folder=self.folder,
            log=EventLog(folder / "events.jsonl", SystemClock()),
            metrics=LineFile(folder / "metrics.jsonl"),
            clock=SystemClock(),
            scheduler=LocalScheduler(),
            generation=Generation(barrier=ColdStart(SLOTS)),
            on_metrics=[],
        )
        self.replicas = [Replica(slot) for slot in range(SLOTS)]
        self.heard: Callable[[], None] = lambda: None

    async def hear(self) -> None:
        self.heard()

    def keep(self) -> Awaitable[RunEnd]:
        slots = cast("list[ReplicaSlot]", self.replicas)
        return asyncio.ensure_future(Restorer(self.run, slots, self.hear).keep())

    def snapshot(self, outer_step: int) -> Path:
        return write_snapshot(self.folder.path / self.config.checkpoint.folder, outer_step, self.config).path

    async def begin(self) -> Generation:
        """All replicas are ready, and released."""
        generation = self.run.generation
        generation.holders.update(replica.slot for replica in self.replicas if not replica.state.is_end)
        arrivals = [generation.barrier.arrive(slot) for slot in sorted(generation.holders)]
        await asyncio.wait_for(asyncio.gather(*arrivals), END_S)
        return generation

    def fail_all(self) -> None:
        for replica in self.replicas:
            replica.last_failure = failure(replica.slot)
        self.run.generation.holders.clear()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_all(self.folder.events) if event["event"] == name]


def failure(slot: int) -> Failure:
    return Failure(
        slot=slot, incarnation=0, cause="signal", step=9, error="killed by SIGKILL", t=float(slot), healthy_s=0.0
    )


def write_snapshot(folder: Path, outer_step: int, config: RunConfig) -> DurableSnapshot:
    staging = folder / f".staging-{outer_step}"
    staging.mkdir(parents=True)
    (staging / "data").write_bytes(b"numbers")
    step = outer_step * config.diloco.sync_every
    facts = Facts(step=step, outer_step=outer_step, state_hash="", whole=True, origin=origin_of(config))
    return finish(staging, facts, keep=0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(END_S):
        while not condition():
            await asyncio.sleep(0.01)


async def over(generation: Generation) -> None:
    await asyncio.wait_for(generation.over(), END_S)


def test_all_begin_again_from_the_newest_snapshot(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        scene.snapshot(1)
        path = scene.snapshot(2)
        keeping = scene.keep()
        first = await scene.begin()
        scene.fail_all()
        await over(first)
        second = await scene.begin()
        assert (second.number, second.snapshot is not None and second.snapshot.path) == (1, path)
        await until(lambda: bool(scene.events("run_restored")))
        (restored,) = scene.events("run_restored")
        assert (restored["outer_step"], restored["path"], restored["replicas"]) == (2, str(path), [0, 1])
        # The same again, and once more than the budget has.
        scene.fail_all()
        await over(second)
        await scene.begin()
        scene.fail_all()
        end = await asyncio.wait_for(keeping, END_S)
        assert (end.status, end.cause, end.exit_code) == ("failed", "signal", 1)
        assert end.reason is not None
        assert "since replica 1 failed (killed by SIGKILL)" in end.reason
        assert "recovery.restores = 2" in end.reason

    asyncio.run(play())


def test_who_was_given_up_is_not_waited_for(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        scene.snapshot(1)
        keeping = asyncio.ensure_future(scene.keep())
        first = await scene.begin()
        scene.replicas[0].state = ReplicaState.FAILED
        scene.fail_all()
        await over(first)
        second = await scene.begin()
        assert second.barrier.released_slots == {1}
        keeping.cancel()

    asyncio.run(play())


def test_without_a_snapshot_the_run_ends(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        keeping = scene.keep()
        await scene.begin()
        scene.fail_all()
        end = await asyncio.wait_for(keeping, END_S)
        assert end.exit_code == 1
        assert "there is no durable snapshot to go back to: lower checkpoint.interval" in str(end.reason)

    asyncio.run(play())


def test_one_that_turns_out_to_hold_the_state_is_enough(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        scene.snapshot(1)
        keeping = asyncio.ensure_future(scene.keep())
        first = await scene.begin()
        asked = asyncio.Event()

        def late_word() -> None:
            first.holders.add(1)
            asked.set()

        scene.heard = late_word
        scene.fail_all()
        await asyncio.wait_for(asked.wait(), END_S)
        # Now really.
        scene.heard = lambda: None
        assert scene.run.generation is first
        scene.fail_all()
        await over(first)
        keeping.cancel()

    asyncio.run(play())


def test_nobody_goes_back_once_a_replica_has_finished(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        scene.snapshot(1)
        keeping = asyncio.ensure_future(scene.keep())
        first = await scene.begin()
        scene.replicas[0].has_finished = True
        scene.fail_all()
        seen = scene.replicas[0].looks
        await until(lambda: scene.replicas[0].looks >= seen + 3)
        assert not keeping.done()
        assert scene.run.generation is first
        keeping.cancel()

    asyncio.run(play())


def test_a_plea_before_the_release_ends_the_run(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        scene.snapshot(1)
        keeping = scene.keep()
        scene.run.generation.ask_to_restore(Plea(cause="exception", reason="replica 0 cannot start"))
        end = await asyncio.wait_for(keeping, END_S)
        assert (end.cause, end.reason) == ("exception", "replica 0 cannot start")

    asyncio.run(play())


def test_a_plea_afterwards_takes_all_back(tmp_path: Path) -> None:
    async def play() -> None:
        scene = Scene(tmp_path)
        scene.snapshot(1)
        keeping = asyncio.ensure_future(scene.keep())
        first = await scene.begin()
        first.ask_to_restore(Plea(cause="exception", reason="replica 0 gave up"))
        await over(first)
        assert "replica 0 gave up" in scene.events("note")[0]["text"]
        keeping.cancel()

    asyncio.run(play())


def test_a_run_that_was_resumed_can_go_back_to_where_it_began(tmp_path: Path) -> None:
    began = write_snapshot(tmp_path / "other", 3, CONFIG)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert last_snapshot(CONFIG, run_dir, began) == (began, "")
    own = write_snapshot(run_dir / CONFIG.checkpoint.folder, 4, CONFIG)
    assert last_snapshot(CONFIG, run_dir, began) == (own, "")
    (began.path / "MANIFEST.json").write_text(json.dumps({}))
    (own.path / "data").write_bytes(b"others!")
    found, why = last_snapshot(CONFIG, run_dir, began)
    assert found is None
    assert "no durable snapshot" in why


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("checkpoint", {"enable": False}, "set checkpoint.enable = true"),
        ("diloco", {"engine": "torchft"}, 'diloco.engine = "torchft" writes none'),
    ],
)
def test_the_advice_fits_the_config(section: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    changed = {section: dataclasses.replace(getattr(CONFIG, section), **changes)}
    assert words in last_snapshot(dataclasses.replace(CONFIG, **changed), tmp_path, None)[1]
