"""What a slot does about ranks whose ReplicaActor is gone."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.clock import SystemClock
from elastic_train.config import RunConfig
from elastic_train.events import EventLog, LineFile
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.generation import Generation
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler.local import LocalScheduler
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.replica.actor import SegmentPart

TOKEN = "0123456789abcdef"


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    server = RegistryServer("127.0.0.1", 0, TOKEN)
    yield server
    server.close()


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not end by itself."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def slot_of_a_lost_actor(folder: Path, registry: str, number: int, *events: dict[str, Any]) -> ReplicaSlot:
    """Slot 1 in its incarnation ``number``; no ReplicaActor, which had told of ``events``."""
    context = RunContext(
        config=RunConfig(),
        folder=RunFolder(folder),
        log=EventLog(folder / "events.jsonl", SystemClock()),
        metrics=LineFile(folder / "metrics.jsonl"),
        clock=SystemClock(),
        scheduler=LocalScheduler(),
        generation=Generation(barrier=ColdStart(2)),
        on_metrics=[],
        registry=registry,
        token=TOKEN,
    )
    slot = ReplicaSlot(1, context, lambda slot: 1)
    slot._number = number
    slot._take(SegmentPart(events=list(events), metrics=[], offsets=(1, 0)))
    return slot


def procs_started(process: subprocess.Popen[bytes], incarnation: int) -> dict[str, Any]:
    created = psutil.Process(process.pid).create_time()
    return {
        "t": 0.0,
        "event": "procs_started",
        "replica": 1,
        "incarnation": incarnation,
        "pids": [process.pid],
        "created": [created],
        "standby": False,
    }


def test_ranks_without_an_actor_are_ended_and_then_known_to_be_dead(
    tmp_path: Path, registry: RegistryServer, rank: subprocess.Popen[bytes]
) -> None:
    slot = slot_of_a_lost_actor(tmp_path, registry.url, 2, procs_started(rank, 2))
    asyncio.run(slot.shut_down())
    assert rank.poll() is not None
    assert Directory(registry.url, TOKEN).roll().ended == {1: 2}


def test_nobody_is_called_dead_whose_processes_are_not_known(tmp_path: Path, registry: RegistryServer) -> None:
    slot = slot_of_a_lost_actor(tmp_path, registry.url, 0)
    asyncio.run(slot.shut_down())
    assert Directory(registry.url, TOKEN).roll().ended == {}


def test_a_newer_incarnation_that_has_not_been_heard_of_is_not_called_dead(
    tmp_path: Path, registry: RegistryServer, rank: subprocess.Popen[bytes]
) -> None:
    slot = slot_of_a_lost_actor(tmp_path, registry.url, 2, procs_started(rank, 2))
    slot._number = 3
    asyncio.run(slot.shut_down())
    assert rank.poll() is not None
    assert Directory(registry.url, TOKEN).roll().ended == {}
