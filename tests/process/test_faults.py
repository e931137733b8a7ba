"""One case of every kind of fault, each in a run of three replicas that must not notice more than it has to.

With warm standbys, as a person's runs have them; a fault early in a run comes before there are any.
"""

import pytest

from elastic_train.events import Record, read_all
from elastic_train.observe.invariants import violations
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch

END_S = 280
SOON = ("--recovery.silence_timeout_s", "5")


def survived(run: LaunchedRun, faults: int) -> dict[str, Record]:
    """The failures by the fault that caused them, of a run in which each was followed by a recovery."""
    assert run.wait(END_S) == 0, run.tail()
    events = read_all(run.run_dir / "events.jsonl")
    assert {name: found for name, found in violations(events).items() if found} == {}
    injected = [e for e in events if e["event"] == "fault_injected"]
    failures = [e for e in events if e["event"] == "failure_detected"]
    assert len(injected) == len(failures) == faults
    for failure in failures:
        life = (failure["replica"], failure["incarnation"] + 1)
        back = [e for e in events if e["event"] == "first_step" and (e["replica"], e["incarnation"]) == life]
        assert back, f"replica {life[0]} did not come back after {failure}"
    kinds = {(e["replica"], e["incarnation"]): e["kind"] for e in injected}
    return {kinds[f["replica"], f["incarnation"]]: f for f in failures}


def run_with(
    launch: Launch, steps: int, *faults: str, flags: tuple[str, ...] = SOON, standby: bool = True
) -> LaunchedRun:
    listed = ", ".join(f'"{fault}"' for fault in faults)
    faulty = ("--training.steps", str(steps), *flags, "--faults.at", f"[{listed}]")
    return launch("llama3_tiny.toml", *faulty, standby=standby)


def stacks_of(run: LaunchedRun, failure: Record) -> str:
    """Where the threads of the replica's only rank stood."""
    folder: str = failure["stacks"]
    return (run.run_dir / folder / "rank_0.txt").read_text()


@pytest.mark.timeout(END_S + 60)
def test_a_process_that_ends(launch: Launch) -> None:
    failures = survived(run_with(launch, 560, "0.0@25:exit", "1.0@205:segfault", "2.0@385:exception"), 3)
    assert failures["exit"]["cause"] == "proc_exit"
    assert "code 3" in failures["exit"]["error"]
    assert (failures["segfault"]["cause"], failures["segfault"]["signal"]) == ("signal", "SIGSEGV")
    assert failures["exception"]["cause"] == "exception"
    assert "InjectedError: injected by 2.0@385:exception" in failures["exception"]["error"]
    assert "Traceback (most recent call last)" in failures["exception"]["traceback"]
    assert "in passing" in failures["exception"]["traceback"]


@pytest.mark.timeout(END_S + 60)
def test_a_process_that_lives_on_uselessly(launch: Launch) -> None:
    run = run_with(launch, 620, "0.0@25:comms", "1.0@225:hang", "2.0@425:stop")
    failures = survived(run, 3)
    assert failures["comms"]["cause"] == "comm_error"
    assert "stacks" not in failures["comms"]
    assert failures["hang"]["cause"] == failures["stop"]["cause"] == "hang"
    assert "ran no Python code" in failures["hang"]["error"]
    hung, stopped = (stacks_of(run, failures[kind]) for kind in ("hang", "stop"))
    assert " in _hold_the_gil\n" in hung
    assert " in inner_step\n" in hung
    assert "state: T (stopped)" in stopped
    assert "Python's threads\n\nNone: the process is in state T (stopped)" in stopped
    assert f"where its threads stood: {run.run_dir / failures['hang']['stacks']}" in run.command("status").stdout


@pytest.mark.timeout(END_S + 60)
def test_peers_of_a_rank_that_stops_in_the_reduction_wait_for_one_operation_and_go_on(launch: Launch) -> None:
    # The reduction must have more than one bucket, or it is over when the first is.
    buckets = ("--model.flavor", "debugmodel", "--diloco.bucket_mb", "1")
    patient = ("--recovery.silence_timeout_s", "20", "--diloco.timeout_s", "5")
    run = run_with(launch, 260, "2.0@25/reduce:stop", flags=(*buckets, *patient), standby=False)
    failure = survived(run, 1)["stop"]
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


@pytest.mark.timeout(END_S + 60)
def test_a_replica_actor_and_what_a_person_injects(launch: Launch) -> None:
    run = run_with(launch, 460, "0.0@25:replica_actor")
    run.wait_for_event("joined", END_S, lambda e: e["replica"] == 0)
    reply = run.command("inject", "--replica", "1", "--rank", "0", "--kind", "kill")
    assert reply.returncode == 0, reply.stdout + reply.stderr
    assert "RUNNING" in run.command("status").stdout
    assert run.command("inject", "--replica", "7", "--rank", "0", "--kind", "kill").returncode != 0

    failures = survived(run, 2)
    assert failures["replica_actor"]["error"] == "its ReplicaActor killed by SIGKILL"
    assert failures["kill"]["signal"] == "SIGKILL"
    started = {tuple(e["pids"]) for e in run.events() if e["event"] == "procs_started"}
    assert len(started) == 5
    assert run.command("status").returncode == 0
    assert run.command("inject", "--replica", "0", "--rank", "0", "--kind", "kill").returncode == 2
