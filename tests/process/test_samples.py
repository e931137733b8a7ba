"""Every sample enters the model exactly once, also in a run whose replicas are killed."""

import json
import subprocess
import sys
from typing import Any

import pytest

from scripts.launched_run import ROOT, LaunchedRun
from tests.process.conftest import Launch

END_S = 200
FLAGS = [
    *("--training.steps", "300", "--diloco.sync_every", "5", "--debug.min_step_s", "0.05"),
    *("--training.dataloader.log_samples", "true", "--checkpoint.last_save_model_only", "false"),
]


def checked(run: LaunchedRun) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "scripts.check_samples", str(run.run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(2 * END_S)
def test_every_sample_counts_once_whoever_is_killed(launch: Launch) -> None:
    run = launch("llama3_tiny.toml", *FLAGS, "--faults.at", '["0.0@8:kill", "1.0@12:kill"]')
    # So that somebody has the state when the last one is killed.
    run.wait_for_event("joined", END_S, lambda event: event["replica"] == 0)
    reply = run.command("inject", "--replica", "2", "--rank", "0", "--kind", "kill")
    assert reply.returncode == 0, reply.stdout + reply.stderr
    assert run.wait(END_S) == 0, run.tail()
    assert sum(event["event"] == "fault_injected" for event in run.events()) == 3

    code, found = checked(run)
    assert (code, found["failed"]) == (0, [])
    (figures,) = found["runs"]
    assert figures["outer_step"] == 60
    assert figures["samples"] > 300
    # What died with the replicas was read again.
    assert figures["drawn_again"] > 0

    # The check sees it if one line is missing.
    log = run.run_dir / "samples" / "reader_0.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    code, found = checked(run)
    assert code == 1
    assert "shard 0: sample 0 is committed and was never drawn" in found["failed"][0]
