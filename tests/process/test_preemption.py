"""A process that is told by SIGTERM to end lets its replica leave, which costs the others nothing."""

import os
import signal

import pytest

from elastic_train.events import Record
from elastic_train.observe.invariants import violations
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch

END_S = 300
SYNC_EVERY = 10


def named(run: LaunchedRun, event: str, replica: int | None) -> list[Record]:
    return [record for record in run.events() if record["event"] == event and record.get("replica") == replica]


@pytest.mark.timeout(2 * END_S)
def test_a_replica_that_is_preempted_gives_what_it_has_trained_and_comes_back(launch: Launch) -> None:
    run = launch(
        "llama3_tiny.toml", "--orchestrator.replicas", "2", "--orchestrator.procs_per_replica", "2",
        "--training.steps", "10000", "--diloco.sync_every", str(SYNC_EVERY), "--recovery.preemption_grace_s", "120",
    )  # fmt: skip
    run.wait_for_event("first_step", END_S, lambda event: event["replica"] == 0)
    ranks = [pid for slot in (0, 1) for pid in named(run, "procs_started", slot)[0]["pids"]]
    # Not the one that speaks for its replica; and the ReplicaActors and the Lighthouse, which leave it alone.
    told = [ranks[1], *(each.pid for each in run.processes() if each.pid not in (*ranks, run.process.pid))]
    assert len(told) >= 4
    for pid in told:
        os.kill(pid, signal.SIGTERM)
    run.wait_for_event("joined", END_S, lambda event: event["replica"] == 0)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(END_S) == 130, run.tail()

    (warned,) = [event for event in named(run, "drain_started", 0) if event.get("cause") == "preempted"]
    assert warned["rank"] == 1
    (failure,) = named(run, "failure_detected", 0)
    assert failure["cause"] == "preempted"
    assert failure["error"].endswith("by SIGTERM")
    assert named(run, "lighthouse_lost", None) == []
    # It left with a commit in which it took part.
    left = named(run, "replica_left", 0)[0]
    last = [event for event in named(run, "sync_committed", 0) if event["incarnation"] == 0][-1]
    assert left["outer_step"] == last["outer_step"] >= 1
    assert 0 in last["participants"]
    (restart,) = named(run, "restart_scheduled", 0)
    assert (restart["level"], restart["delay_s"]) == ("reallocate", 0.0)
    assert named(run, "failure_detected", 1) == []
    assert all(found == [] for found in violations(run.events()).values())
