"""The controller: how it is interrupted, how it dies, and what it refuses to start with."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts.launched_run import ROOT
from tests.process.conftest import Launch

START_S = 120
GONE_S = 15


def test_a_killed_controller_takes_everything_with_it(launch: Launch) -> None:
    run = launch("llama3_tiny.toml", "--orchestrator.replicas", "2", "--training.steps", "10000")
    run.wait_for_event("first_step", START_S)
    living = run.processes()
    assert len(living) >= 6
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    _, left = psutil.wait_procs([p for p in living if p.pid != run.process.pid], timeout=GONE_S)
    assert left == []


def test_without_a_lighthouse_that_can_be_kept_a_run_ends_and_says_so(launch: Launch) -> None:
    flags = ("--orchestrator.replicas", "2", "--training.steps", "10000", "--lighthouse.restarts", "0")
    run = launch("llama3_tiny.toml", *flags)
    run.wait_for_event("first_step", START_S)
    started = run.wait_for_event("lighthouse_started", START_S)
    os.kill(started["pid"], signal.SIGKILL)
    assert run.wait(START_S) == 1, run.tail()
    assert "the Lighthouse is gone: killed by SIGKILL" in run.tail(1)
    assert [e["cause"] for e in run.events() if e["event"] in ("lighthouse_lost", "run_finished")] == ["signal"] * 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--diloco.sync_evry", "5"], ["--diloco.sync_every"]),
        (["--training.steps", "many"], ["training.steps"]),
        (["--training.dataset", "no/such/folder/x.jsonl"], ["training.dataset", "no/such/folder/x.jsonl"]),
        (["--model.hf_assets_path", "./no_assets"], ["hf_assets_path"]),
        (["--job.dump_folder", "/dev/null/outputs"], ["job.dump_folder", "/dev/null/outputs"]),
    ],
)
def test_what_cannot_start_says_why_in_one_line(flags: list[str], words: list[str], tmp_path: Path) -> None:
    check_refusal([*flags], words, tmp_path)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_refusal(["--lighthouse.port", str(port)], ["lighthouse.port", str(port)], tmp_path)


def check_refusal(flags: list[str], words: list[str], cwd: Path) -> None:
    config = ROOT / "configs" / "llama3_tiny.toml"
    answer = subprocess.run(
        [sys.executable, "-m", "elastic_train", "run", str(config), *flags],
        capture_output=True, text=True, timeout=60, cwd=cwd, check=False,
    )  # fmt: skip
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert all(word in answer.stderr for word in words), answer.stderr
