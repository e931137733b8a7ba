"""An interrupted run ends with a state on disk that another run goes on from."""

import json
import os
import signal
from pathlib import Path

import pytest

from elastic_train.events import Record
from elastic_train.observe.invariants import violations
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch
from tests.process.test_resume import samples_and_steps

END_S = 200
SYNC_EVERY = 10
BATCH = 2
FLAGS = [
    *("--orchestrator.replicas", "2", "--diloco.sync_every", str(SYNC_EVERY), "--debug.seed", "7"),
    *("--training.steps", "10000"),
]


def named(run: LaunchedRun, event: str) -> list[Record]:
    return [record for record in run.events() if record["event"] == event]


def facts_of(snapshot: Path) -> dict[str, object]:
    facts: dict[str, object] = json.loads((snapshot / "MANIFEST.json").read_text())["facts"]
    return facts


@pytest.mark.timeout(3 * END_S)
def test_the_replicas_leave_at_their_next_sync_and_a_run_goes_on_from_there(launch: Launch) -> None:
    run = launch("llama3_tiny.toml", *FLAGS, name="first")
    for slot in (0, 1):
        run.wait_for_event("first_step", END_S, lambda event, slot=slot: event["replica"] == slot)  # type: ignore[misc]
    # To all of them at once, as schedulers do; the controller first, which else starts others for those who leave.
    for pid in (run.process.pid, *(process.pid for process in run.processes() if process.pid != run.process.pid)):
        os.kill(pid, signal.SIGTERM)
    assert run.wait(END_S) == 130, run.tail()

    assert run.events()[-1]["status"] == "interrupted"
    assert {event["replica"] for event in named(run, "drain_started")} == {0, 1}
    left = named(run, "replica_left")
    assert sorted(event["replica"] for event in left) == [0, 1]
    newest = max(event["outer_step"] for event in left)
    assert newest == max(event["outer_step"] for event in named(run, "sync_committed")) >= 1
    (saved,) = named(run, "checkpoint_saved")
    assert saved["outer_step"] == newest
    assert named(run, "failure_detected") == []
    states = [(event["replica"], event["to"]) for event in named(run, "replica_state")]
    assert all(states.count((slot, state)) == 1 for slot in (0, 1) for state in ("DRAINING", "STOPPED"))
    assert all(found == [] for found in violations(run.events()).values())
    resume = f"--resume {run.run_dir}"
    assert f"run {run.run_dir / 'config.toml'} {resume}" in run.tail()

    steps = (newest + 1) * SYNC_EVERY
    second = launch(str(run.run_dir / "config.toml"), *resume.split(), "--training.steps", str(steps), name="second")
    assert second.wait(END_S) == 0, second.tail()
    assert {event["inner_step"] for event in named(second, "first_step")} == {newest * SYNC_EVERY + 1}


@pytest.mark.timeout(2 * END_S)
def test_without_time_for_a_sync_what_was_trained_since_the_last_one_is_given_up(launch: Launch) -> None:
    run = launch("llama3_tiny.toml", *FLAGS, "--orchestrator.drain_timeout_s", "0.5", "--debug.min_step_s", "0.4")
    committed = run.wait_for_event("sync_committed", END_S)
    step = committed["inner_step"]
    run.wait_until(lambda: any(record["step"] > step for record in run.metrics()), END_S)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(END_S) == 130, run.tail()

    (saved,) = named(run, "checkpoint_saved")
    assert Path(saved["path"]).name == f"step-{step}"
    assert facts_of(Path(saved["path"]))["state_hash"] == committed["anchor_hash"]
    # The moments and the data positions, too, are those of the commit.
    positions, optimizer_steps = samples_and_steps(Path(saved["path"]))
    assert int(positions.sum()) == step * 2 * BATCH
    assert optimizer_steps == step


def test_a_second_signal_ends_the_run_at_once(launch: Launch) -> None:
    run = launch("llama3_tiny.toml", *FLAGS, "--debug.min_step_s", "20")
    run.wait_for_event("replica_ready", END_S)
    run.wait_until(lambda: sum(e["to"] == "RUNNING" for e in named(run, "replica_state")) == 2, END_S)
    run.process.send_signal(signal.SIGTERM)
    run.wait_for_event("drain_started", END_S)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(END_S) == 130, run.tail()
    assert named(run, "replica_left") == []
    assert run.events()[-1]["status"] == "interrupted"
