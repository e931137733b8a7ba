"""`status` tells a living run, a finished one and a killed one apart, from the folder alone."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from elastic_train.clock import ManualClock
from elastic_train.config import EnvironmentProblem
from elastic_train.observe import status
from tests.unit import walkthrough


def shown(run_dir: Path, as_json: bool = False) -> str:
    console = Console(file=io.StringIO(), width=80)
    status.show(run_dir, as_json, console=console, clock=ManualClock(walkthrough.START + 12.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def name_controller(run_dir: Path, pid: int) -> None:
    (run_dir / "controller.json").write_text(json.dumps({"pid": pid, "socket": "control.sock"}))


def test_a_living_run(run_dir: Path) -> None:
    walkthrough.write(run_dir, upto=12.0)
    name_controller(run_dir, os.getpid())
    text = shown(run_dir)
    assert text.startswith("tiny running  12.0 s  quorum 2 of replicas 1 2  1 failed")
    assert f"driven by process {os.getpid()}" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "RUNNING", "0", "40", "6.0000", "1,234", "2", "2", "1.50", "s", "2.00", "s", "ago"] in rows
    assert "killed by SIGKILL" in text


def test_a_finished_run_is_summed_up(run_dir: Path) -> None:
    walkthrough.write(run_dir)
    name_controller(run_dir, dead_pid())
    text = shown(run_dir)
    assert text.startswith("run tiny succeeded: 60 of 60 steps")
    assert "is gone" not in text
    assert text.count("SUCCEEDED") == 3


def test_a_run_whose_controller_was_killed_says_so(run_dir: Path) -> None:
    walkthrough.write(run_dir, upto=12.0)
    pid = dead_pid()
    name_controller(run_dir, pid)
    text = shown(run_dir)
    assert f"the controller (process {pid}) is gone" in text
    assert text.startswith("tiny running  11.8 s")


def test_a_number_that_a_later_process_got_is_not_the_controller(run_dir: Path) -> None:
    walkthrough.write(run_dir, upto=12.0)
    name_controller(run_dir, os.getpid())
    os.utime(run_dir / "controller.json", (1e9, 1e9))
    assert "is gone" in shown(run_dir)


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"pid": null}'])
def test_a_folder_that_does_not_name_its_controller(run_dir: Path, content: str | None) -> None:
    walkthrough.write(run_dir, upto=12.0)
    if content is not None:
        (run_dir / "controller.json").write_text(content)
    assert "does not say which process drives it" in shown(run_dir)


def test_json_holds_the_same(run_dir: Path) -> None:
    walkthrough.write(run_dir, upto=12.0)
    told = json.loads(shown(run_dir, as_json=True))
    assert (told["status"], told["inner_step"], told["outer_step"]) == ("running", 41, 2)
    assert told["controller"] is None
    assert told["quorum"]["participants"] == [1, 2]
    assert [replica["state"] for replica in told["replicas"]] == ["JOINING", "RUNNING", "RUNNING"]
    assert told["recoveries"][0]["phases"]["first step"] == pytest.approx(3.8)
    assert sum(told["replicas"][0]["seconds"].values()) == pytest.approx(told["wall_s"])


def test_links_and_folders_of_runs_are_followed(tmp_path: Path) -> None:
    walkthrough.write(tmp_path / "outputs" / "run-1")
    (tmp_path / "outputs" / "latest").symlink_to("run-1")
    expected = shown(tmp_path / "outputs" / "run-1")
    assert shown(tmp_path / "outputs" / "latest") == expected
    assert shown(tmp_path / "outputs") == expected


def test_a_missing_folder_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"none: no such folder; give the folder of a run") as raised:
        shown(tmp_path / "none")
    assert "\n" not in str(raised.value)


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    with pytest.raises(EnvironmentProblem, match="its link is broken"):
        shown(tmp_path / "latest")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"no events\.jsonl"):
        shown(tmp_path)


def test_a_log_that_is_still_empty_is_refused(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "events.jsonl").write_bytes(b'{"t":1,"event":"run_st')
    with pytest.raises(EnvironmentProblem, match="still empty"):
        shown(run_dir)
