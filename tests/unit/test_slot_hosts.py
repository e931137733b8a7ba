"""What a slot does about a host that is lost: its successor waits until nothing there can count any more."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from elastic_train.clock import ManualClock
from elastic_train.config import RunConfig
from elastic_train.events import EventLog, LineFile, read_all
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.generation import Generation
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler import Allocation, Scheduler
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext
from elastic_train.orchestrator.supervisor import SupervisorLost
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.replica.watch.process_end import ProcessEnd

TOKEN = "0123456789abcdef"
SILENCE_S = 10.0


class Elsewhere(Scheduler):
    """Hosts that are gone when they are given back."""

    def __init__(self, ended: Directory) -> None:
        self.released: list[tuple[bool, float]] = []
        self.known_then: list[dict[int, int]] = []
        self._directory = ended

    @property
    def is_local(self) -> bool:
        return False

    async def allocate(self, name: str) -> Allocation:
        return Allocation(name=name, hosts=("a",), mesh=None, address="192.0.2.1", place="192.0.2.1.1")

    async def release(self, allocation: Allocation, *, failed: bool = False, within_s: float = 0.0) -> None:
        self.released.append((failed, within_s))
        self.known_then.append(dict((await asyncio.to_thread(self._directory.roll)).ended))


class Silent:
    """A supervisor whose host has not been heard since the clock began."""

    heard_at = 0.0

    async def close(self, grace_s: float) -> None: ...

    async def stop(self) -> None: ...

    async def ask_soon(self, endpoint: str, *arguments: Any) -> Any:
        raise SupervisorLost(None, "lost")


@pytest.mark.parametrize(("surely", "within_s", "ended"), [(True, 17.0, {1: 3}), (False, 0.0, {})])
def test_a_lost_host_is_waited_for_before_its_replica_is_called_dead(
    tmp_path: Path, surely: bool, within_s: float, ended: dict[int, int]
) -> None:
    server = RegistryServer("127.0.0.1", 0, TOKEN)
    try:
        asyncio.run(_play(tmp_path, server.url, surely, within_s, ended))
    finally:
        server.close()


async def _play(folder: Path, registry: str, surely: bool, within_s: float, ended: dict[int, int]) -> None:
    clock = ManualClock()
    scheduler = Elsewhere(Directory(registry, TOKEN))
    run = RunContext(
        config=RunConfig(),
        folder=RunFolder(folder),
        log=EventLog(folder / "events.jsonl", clock),
        metrics=LineFile(folder / "metrics.jsonl"),
        clock=clock,
        scheduler=scheduler,
        generation=Generation(barrier=ColdStart(2)),
        on_metrics=[],
        registry=registry,
        token=TOKEN,
    )
    slot = ReplicaSlot(1, run, lambda slot: 1)
    await slot._allocate()
    slot._number = 3
    supervisor: Any = Silent()
    slot._supervisor = supervisor
    clock.advance(SILENCE_S)
    failure = slot._supervisor_lost(SupervisorLost(ProcessEnd(cause="host_lost", error="is lost with its host a"), ""))
    assert (failure.cause, failure.detect_s) == ("host_lost", SILENCE_S)

    await slot.shut_down(failed=True, surely=surely)

    # 25 s until it ends itself and 2 s more, of which 10 have passed.
    assert scheduler.released == [(True, within_s)]
    assert scheduler.known_then == [{}]
    assert Directory(registry, TOKEN).roll().ended == ended
    assert [event["event"] for event in read_all(folder / "events.jsonl")][-1] == "failure_detected"
