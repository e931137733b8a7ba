"""A warm standby in real runs: replaced when it is lost, taken when its replica fails, and ended with the run."""

import os
import signal

import pytest

from elastic_train.events import Record, read_all
from elastic_train.observe.invariants import violations
from elastic_train.replica.watch.process_watch import ProcessId, is_alive
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch

READY_S = 240
END_S = 240
TWO = ("llama3_tiny.toml", "--orchestrator.replicas", "2", "--recovery.silence_timeout_s", "5")


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


@pytest.mark.timeout(3 * READY_S + 60)
def test_a_standby_that_is_lost_is_replaced_and_one_that_warms_holds_up_no_end(launch: Launch) -> None:
    run = launch(*TWO, "--training.steps", "100000", standby=True)
    replica = run.wait_for_event("standby_ready", READY_S)["replica"]
    seen = 0
    for number in (signal.SIGKILL, signal.SIGSTOP):
        standby = next_ready(run, replica, seen)
        assert all(is_alive(process) for process in processes(standby))
        os.kill(standby["pids"][0], number)
        seen = next_started(run, replica, standby["seq"])["seq"]
        assert not any(is_alive(process) for process in processes(standby))

    run.process.send_signal(signal.SIGINT)
    assert run.wait(READY_S) == 130, run.tail()
    assert run.processes() == []
    events = run.events()
    assert len({tuple(e["pids"]) for e in named(events, "standby_started", replica=replica)}) == 3
    # The one in the making was not waited for, and no replica noticed any of it.
    assert len(named(events, "standby_ready", replica=replica)) == 2
    assert named(events, "failure_detected") == []


@pytest.mark.timeout(END_S + READY_S + 60)
def test_a_replica_that_fails_goes_on_in_its_standby(launch: Launch) -> None:
    run = launch(*TWO, "--training.steps", "600", standby=True)
    replica = run.wait_for_event("standby_ready", READY_S)["replica"]
    standby = next_ready(run, replica, 0)
    (first,) = named(run.events(), "procs_started", replica=replica)
    assert first["standby"] is False
    os.kill(first["pids"][0], signal.SIGKILL)

    again = run.wait_for_event("procs_started", READY_S, lambda e: (e["replica"], e["incarnation"]) == (replica, 1))
    assert again["standby"] is True
    assert processes(again) == processes(standby)
    run.wait_for_event("joined", READY_S, lambda e: e["replica"] == replica)
    # Another one for the next time.
    another = next_ready(run, replica, again["seq"])
    assert another["incarnation"] == 1
    assert processes(another) != processes(standby)

    assert run.wait(END_S) == 0, run.tail()
    events = read_all(run.run_dir / "events.jsonl")
    assert {name: found for name, found in violations(events).items() if found} == {}
    (failure,) = named(events, "failure_detected")
    assert (failure["replica"], failure["cause"], failure["signal"]) == (replica, "signal", "SIGKILL")
    assert named(events, "run_finished")[0]["status"] == "succeeded"
    assert run.processes() == []


@pytest.mark.timeout(3 * READY_S + 60)
def test_a_standby_ends_with_its_replica_actor(launch: Launch) -> None:
    run = launch(*TWO, "--training.steps", "100000", standby=True)
    replica = run.wait_for_event("standby_ready", READY_S)["replica"]
    standby = next_ready(run, replica, 0)
    reply = run.command("inject", "--replica", str(replica), "--rank", "0", "--kind", "replica_actor")
    assert reply.returncode == 0, reply.stdout + reply.stderr

    # The new one ends what it finds before it starts anything.
    again = run.wait_for_event("procs_started", READY_S, lambda e: (e["replica"], e["incarnation"]) == (replica, 1))
    assert again["standby"] is False
    assert not any(is_alive(process) for process in processes(standby))
    run.process.send_signal(signal.SIGINT)
    assert run.wait(READY_S) == 130, run.tail()
    assert run.processes() == []
