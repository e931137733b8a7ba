"""One case of every kind of fault, in runs of three replicas that must not notice more than they have to."""

import signal

import pytest

from elastic_train.events import Record
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch
from tests.process.logs import check_the_states, named

END_S = 280

IN_TURN = (
    (0, "exit"), (1, "segfault"), (2, "exception"), (0, "comms"), (1, "replica_actor"), (2, "hang"), (1, "kill"),
    (2, "stop"),
)  # fmt: skip
"""Replicas, and what happens to them, each when all are back from the last."""


def recovered(run: LaunchedRun, replica: int, kind: str) -> Record:
    """The failure that a fault has caused, after which the replica is a member again."""
    before = run.events()[-1]["seq"]
    reply = run.command("inject", "--replica", str(replica), "--rank", "0", "--kind", kind)
    assert reply.returncode == 0, reply.stdout + reply.stderr

    def is_new(event: Record) -> bool:
        return bool(event["replica"] == replica and event["seq"] > before)

    failure = run.wait_for_event("failure_detected", END_S, is_new)
    joined = run.wait_for_event("joined", END_S, is_new)
    assert joined["incarnation"] == failure["incarnation"] + 1
    return failure


def stacks_of(run: LaunchedRun, failure: Record) -> str:
    """Where the threads of the replica's only rank stood."""
    folder: str = failure["stacks"]
    return (run.run_dir / folder / "rank_0.txt").read_text()


@pytest.mark.timeout(3 * END_S)
def test_whatever_happens_to_a_replica_it_comes_back_and_the_others_notice_nothing(launch: Launch) -> None:
    run = launch(
        "llama3_tiny.toml", "--training.steps", "100000", "--diloco.sync_every", "10",
        "--recovery.silence_timeout_s", "5", "--recovery.forgive_after_s", "1",
    )  # fmt: skip
    for slot in range(3):
        run.wait_for_event("sync_committed", END_S, lambda event, slot=slot: event["replica"] == slot)  # type: ignore[misc]
    assert run.command("inject", "--replica", "7", "--rank", "0", "--kind", "kill").returncode != 0
    failures = {kind: recovered(run, replica, kind) for replica, kind in IN_TURN}
    status = run.command("status").stdout
    assert "RUNNING" in status
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(END_S) == 130, run.tail()

    check_the_states(run)
    assert [event["kind"] for event in named(run, "fault_injected")] == [kind for _, kind in IN_TURN]
    assert [event["replica"] for event in named(run, "failure_detected")] == [replica for replica, _ in IN_TURN]
    pids = {tuple(event["pids"]) for event in named(run, "procs_started")}
    assert len(pids) == 3 + len(IN_TURN)

    assert failures["exit"]["cause"] == "proc_exit"
    assert "code 3" in failures["exit"]["error"]
    for kind, name in (("kill", "SIGKILL"), ("segfault", "SIGSEGV")):
        assert (failures[kind]["cause"], failures[kind]["signal"]) == ("signal", name)
    assert failures["replica_actor"]["error"] == "its ReplicaActor killed by SIGKILL"
    assert failures["exception"]["cause"] == "exception"
    assert "InjectedError: injected by 2.0@0:exception" in failures["exception"]["error"]
    assert "Traceback (most recent call last)" in failures["exception"]["traceback"]
    assert "in passing" in failures["exception"]["traceback"]
    assert failures["comms"]["cause"] == "comm_error"
    assert "stacks" not in failures["comms"]

    assert failures["hang"]["cause"] == failures["stop"]["cause"] == "hang"
    assert "ran no Python code" in failures["hang"]["error"]
    hung, stopped = (stacks_of(run, failures[kind]) for kind in ("hang", "stop"))
    assert " in _hold_the_gil\n" in hung
    assert " in inner_step\n" in hung
    assert "state: T (stopped)" in stopped
    assert "Python's threads\n\nNone: the process is in state T (stopped)" in stopped
    assert f"where its threads stood: {run.run_dir / failures['stop']['stacks']}" in status
    assert run.command("inject", "--replica", "0", "--rank", "0", "--kind", "kill").returncode == 2


@pytest.mark.timeout(2 * END_S)
def test_peers_of_a_rank_that_stops_in_the_reduction_wait_for_one_operation_and_go_on(launch: Launch) -> None:
    # The reduction must have more than one bucket, or it is over when the first is.
    buckets = ("--model.flavor", "debugmodel", "--diloco.bucket_mb", "1")
    patient = ("--recovery.silence_timeout_s", "20", "--diloco.timeout_s", "5")
    fault = ("--training.steps", "100000", "--faults.at", '["2.0@25/reduce:stop"]')
    run = launch("llama3_tiny.toml", *buckets, *patient, *fault)
    run.wait_for_event("joined", END_S)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(END_S) == 130, run.tail()
    check_the_states(run)
    (failure,) = named(run, "failure_detected")
    assert (failure["replica"], failure["cause"]) == (2, "hang")
    assert "state: T (stopped)" in stacks_of(run, failure)

    # They did not need its end for that: they had committed without it before anybody knew of the hang.
    before = [e for e in run.events() if e["t"] < failure["t"]]
    for slot in (0, 1):
        retried, committed = (
            [e for e in before if (e["event"], e.get("replica"), e.get("outer_step")) == (name, slot, outer_step)]
            for name, outer_step in (("sync_retried", 2), ("sync_committed", 2))
        )
        assert retried
        assert [e["participants"] for e in committed] == [[0, 1]]
        assert retried[0]["t"] < committed[0]["t"]
