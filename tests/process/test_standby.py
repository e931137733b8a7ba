"""A warm standby in a real run."""

import os
import signal

import pytest

from elastic_train.events import Record
from elastic_train.observe.invariants import violations
from elastic_train.replica.watch.process_watch import ProcessId, is_alive
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch

READY_S = 240
TWO = ("llama3_tiny.toml", "--orchestrator.replicas", "2")


def named(events: list[Record], name: str, **fields: object) -> list[Record]:
    return [e for e in events if e["event"] == name and all(e.get(key) == value for key, value in fields.items())]


def processes(event: Record) -> list[ProcessId]:
    return list(zip(event["pids"], event["created"], strict=True))


def next_started(run: LaunchedRun, replica: int, after: int) -> Record:
    """A standby of the replica of which the log tells after the event number ``after``."""
    return run.wait_for_event("standby_started", READY_S, lambda e: e["replica"] == replica and e["seq"] > after)


def next_ready(run: LaunchedRun, replica: int, after: int) -> Record:
    """Such a one, once it is ready."""
    ready = run.wait_for_event("standby_ready", READY_S, lambda e: e["replica"] == replica and e["seq"] > after)
    return [e for e in named(run.events(), "standby_started", replica=replica) if e["seq"] < ready["seq"]][-1]


@pytest.mark.timeout(5 * READY_S)
def test_a_standby_is_replaced_when_it_is_lost_taken_when_its_replica_fails_and_ended_with_its_actor(
    launch: Launch,
) -> None:
    run = launch(*TWO, "--training.steps", "100000", standby=True)
    replica = run.wait_for_event("standby_ready", READY_S)["replica"]

    lost = next_ready(run, replica, 0)
    os.kill(lost["pids"][0], signal.SIGKILL)
    standby = next_ready(run, replica, next_started(run, replica, lost["seq"])["seq"] - 1)
    assert processes(standby) != processes(lost)
    # The replica noticed nothing of it.
    assert named(run.events(), "failure_detected") == []

    (first,) = named(run.events(), "procs_started", replica=replica)
    assert first["standby"] is False
    os.kill(first["pids"][0], signal.SIGKILL)
    again = run.wait_for_event("procs_started", READY_S, lambda e: (e["replica"], e["incarnation"]) == (replica, 1))
    assert again["standby"] is True
    assert processes(again) == processes(standby)
    run.wait_for_event("joined", READY_S, lambda e: e["replica"] == replica)

    # Another one for the next time; but a new ReplicaActor ends what it finds before it starts anything.
    another = next_ready(run, replica, again["seq"])
    assert another["incarnation"] == 1
    reply = run.command("inject", "--replica", str(replica), "--rank", "0", "--kind", "replica_actor")
    assert reply.returncode == 0, reply.stdout + reply.stderr
    last = run.wait_for_event("procs_started", READY_S, lambda e: (e["replica"], e["incarnation"]) == (replica, 2))
    assert last["standby"] is False
    assert not any(is_alive(process) for process in processes(another))

    run.process.send_signal(signal.SIGINT)
    assert run.wait(READY_S) == 130, run.tail()
    assert {name: found for name, found in violations(run.events()).items() if found} == {}
    assert [(e["cause"], e["signal"]) for e in named(run.events(), "failure_detected")] == [("signal", "SIGKILL")] * 2
