"""The Lighthouse is lost and comes back, and no replica fails because of it."""

import os
import signal

import pytest

from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch
from tests.process.logs import check_the_states, named

END_S = 280


def run_of(launch: Launch, *flags: str) -> LaunchedRun:
    return launch("llama3_tiny.toml", "--orchestrator.replicas", "2", "--training.steps", "100000", *flags)


def wait_for_commit(run: LaunchedRun, outer_step: int) -> None:
    for replica in (0, 1):
        run.wait_for_event(
            "sync_committed",
            END_S,
            lambda e, replica=replica: (e["replica"], e["outer_step"]) == (replica, outer_step),  # type: ignore[misc]
        )


def check_that_nothing_was_lost(run: LaunchedRun, *, losses: int, replicas: tuple[int, ...] = (0, 1)) -> None:
    """Every sync until now was committed once by each of the ``replicas``; quorums' numbers only rose."""
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(END_S) == 130, run.tail()
    check_the_states(run)
    assert len(named(run, "lighthouse_lost")) == losses
    started = named(run, "lighthouse_started")
    assert len(started) == losses + 1
    assert len({event["address"] for event in started}) == 1
    assert len({event["pid"] for event in started}) == losses + 1
    for replica in replicas:
        steps = [e["outer_step"] for e in named(run, "sync_committed") if e["replica"] == replica]
        (left,) = [e for e in named(run, "replica_left") if e["replica"] == replica]
        assert steps == list(range(1, left["outer_step"] + 1))


@pytest.mark.timeout(END_S + 60)
def test_one_that_is_killed_or_hangs_comes_back_and_replicas_train_on(launch: Launch) -> None:
    run = run_of(launch, "--lighthouse.silence_timeout_s", "3")
    wait_for_commit(run, 2)
    os.kill(named(run, "lighthouse_started")[0]["pid"], signal.SIGKILL)
    lost = run.wait_for_event("lighthouse_lost", END_S)
    assert (lost["cause"], lost["error"]) == ("signal", "killed by SIGKILL")
    wait_for_commit(run, 7)
    os.kill(named(run, "lighthouse_started")[1]["pid"], signal.SIGSTOP)
    lost = run.wait_for_event("lighthouse_lost", END_S, lambda event: event["seq"] > lost["seq"])
    assert lost["cause"] == "hang"
    assert "did not answer for" in lost["error"]

    wait_for_commit(run, 14)

    check_that_nothing_was_lost(run, losses=2)
    assert named(run, "failure_detected", "caught_up", "fenced") == []
    assert all(event["participants"] == [0, 1] for event in named(run, "sync_committed"))


@pytest.mark.timeout(END_S + 60)
def test_one_that_is_lost_while_a_replica_comes_back(launch: Launch) -> None:
    faults = '["1.0@30:kill", "0.0@32:lighthouse", "0.0@110:lighthouse"]'
    run = run_of(launch, "--faults.at", faults)
    joined = run.wait_for_event("joined", END_S)
    run.wait_until(lambda: len(named(run, "lighthouse_started")) == 3, END_S)
    last = run.events()[-1]["seq"]
    run.wait_for_event("sync_committed", END_S, lambda e: e["replica"] == joined["replica"] and e["seq"] > last)

    check_that_nothing_was_lost(run, losses=2, replicas=(0,))
    # Replicas do not step together within an interval, so that either of the first two may come first.
    assert sorted(event["kind"] for event in named(run, "fault_injected")) == ["kill", "lighthouse", "lighthouse"]
    failures = named(run, "failure_detected")
    assert [(event["replica"], event["signal"]) for event in failures] == [(1, "SIGKILL")]
    assert [event["replica"] for event in named(run, "joined")] == [1]
