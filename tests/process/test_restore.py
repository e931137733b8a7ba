"""All replicas die at once: the run goes back to its last durable snapshot by itself, or ends and says why."""

import pytest

from elastic_train.events import Record
from elastic_train.observe.invariants import violations
from scripts.check_samples import faults, read_run
from scripts.launched_run import LaunchedRun
from tests.process.conftest import Launch

END_S = 250
STEPS = 24
SYNC_EVERY = 4
KILLED_AT = 14
FLAGS = [
    *("--training.steps", str(STEPS), "--diloco.sync_every", str(SYNC_EVERY), "--debug.seed", "7"),
    *("--checkpoint.interval", str(SYNC_EVERY), "--checkpoint.last_save_model_only", "false"),
    *("--training.dataloader.log_samples", "true", "--debug.min_step_s", "0.2"),
]


def named(run: LaunchedRun, event: str) -> list[Record]:
    return [record for record in run.events() if record["event"] == event]


@pytest.mark.timeout(2 * END_S)
def test_all_replicas_go_back_to_the_last_snapshot_together(launch: Launch) -> None:
    kills = [f"{slot}.0@{KILLED_AT}:kill" for slot in (0, 1)]
    run = launch(
        "llama3_tiny.toml", *FLAGS, "--orchestrator.replicas", "2", "--checkpoint.enable", "true",
        "--faults.at", str(kills).replace("'", '"'),
    )  # fmt: skip
    assert run.wait(END_S) == 0, run.tail()

    (restored,) = named(run, "run_restored")
    began_at = restored["outer_step"] * SYNC_EVERY
    assert 0 < began_at < KILLED_AT
    assert restored["path"] == str(run.run_dir / "checkpoint" / f"step-{began_at}")
    assert restored["replicas"] == [0, 1]
    assert len(named(run, "failure_detected")) == 2
    # Nobody took a state from a peer, as there was none.
    assert named(run, "heal_finished") == []

    first_steps = {(e["replica"], e["incarnation"]): e["inner_step"] for e in named(run, "first_step")}
    assert sorted(first_steps.values()) == [1, 1, began_at + 1, began_at + 1]
    lr_at: dict[int, set[float]] = {}
    for record in run.metrics():
        lr_at.setdefault(record["step"], set()).add(record["lr"])
    assert sorted(lr_at) == list(range(1, STEPS + 1))
    assert all(len(rates) == 1 for rates in lr_at.values())

    assert all(found == [] for found in violations(run.events()).values())
    # What was drawn after the snapshot was drawn again, and counts once.
    assert faults(read_run(run.run_dir)) == []


def test_without_a_snapshot_the_run_ends_and_says_what_to_do(launch: Launch) -> None:
    run = launch("llama3_tiny.toml", *FLAGS, "--orchestrator.replicas", "1", "--faults.at", f'["0.0@{KILLED_AT}:kill"]')
    assert run.wait(END_S) == 1, run.tail()
    last = run.tail(1)
    assert "no replica holds the state any more" in last
    assert "SIGKILL" in last
    assert "set checkpoint.enable = true" in last
    assert run.events()[-1]["cause"] == "signal"
    # Nobody began anew.
    assert len(named(run, "first_step")) == 1
    assert named(run, "run_restored") == []
