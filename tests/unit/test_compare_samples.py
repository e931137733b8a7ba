"""A run with kills and one without: what they have in common, and what the command makes of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from scripts import compare_samples as comparing
from scripts.check_samples import SampledRun
from scripts.command_line import FAILED, PASSED
from scripts.compare_samples import Overlap, compare_samples, overlap
from scripts.fault_plan import FaultPlan
from scripts.struck_run import Outcome, Target

RUN = SampledRun(seq_len=10, outer_step=0, first=[0, 0], committed=[6, 4], draws=[], events=[])


def test_what_two_runs_have_both_committed() -> None:
    assert overlap(RUN, RUN) == Overlap(in_both=10, in_first_alone=0, in_second_alone=0)
    other = replace(RUN, committed=[4, 9])
    assert overlap(RUN, other) == Overlap(in_both=8, in_first_alone=2, in_second_alone=5)
    later = replace(RUN, first=[5, 4], committed=[8, 6])
    assert overlap(RUN, later) == Overlap(in_both=1, in_first_alone=9, in_second_alone=4)


class Runs:
    """Stands for the runs: how they ended, and what they left."""

    def __init__(self, *reasons: str, left: SampledRun = RUN) -> None:
        self.reasons = reasons
        self.left = left
        self.started: list[tuple[FaultPlan, Target]] = []

    def run_under(self, plan: FaultPlan, target: Target, run_dir: Path, *, seed: int) -> Outcome:
        self.started.append((plan, target))
        return Outcome(exit_code=0, wall_s=1.0, strikes=(), unfinished=(), reasons=self.reasons)

    def read_run(self, run_dir: Path) -> SampledRun:
        draws = [
            {
                "replica": shard,
                "incarnation": 0,
                "reader": 0,
                "shard": shard,
                "index": index,
                "hash": f"{shard}.{index}",
            }
            for shard, count in enumerate(self.left.committed)
            for index in range(count)
        ]
        tokens = self.left.seq_len * self.left.samples
        commit = {"event": "sync_committed", "outer_step": 0, "replica": 0, "tokens": tokens, "participants": [0]}
        return replace(self.left, draws=draws, events=[commit])


def called(runs: Runs, out: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(comparing, "run_under", runs.run_under)
    monkeypatch.setattr(comparing, "read_run", runs.read_run)
    return CliRunner().invoke(compare_samples, ["--kills", "3", "--out", str(out), "--json"], standalone_mode=False)


def told(done: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_two_runs_of_which_one_is_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()

    done = called(runs, tmp_path, monkeypatch)

    assert done.return_value == PASSED, done.stderr
    (struck, target), (calm, hasty) = runs.started
    assert (len(struck.faults), len(calm.faults), calm.steps) == (3, 0, struck.steps)
    assert target.resolved.training.dataloader.log_samples
    assert not target.resolved.checkpoint.last_save_model_only
    assert (target.resolved.debug.min_step_s, hasty.resolved.debug.min_step_s) == (0.1, 0.0)
    assert told(done)["samples"] == {"in_both": 10, "in_struck_alone": 0, "in_calm_alone": 0}
    assert (told(done)["kills"], told(done)["failed"]) == (3, [])

    again = Runs()
    assert called(again, tmp_path, monkeypatch).return_value == PASSED
    assert again.started == []


def test_a_run_that_fails_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs("exit code 1")

    done = called(runs, tmp_path, monkeypatch)

    assert done.return_value == FAILED
    assert len(runs.started) == 1
    assert told(done)["failed"] == ["struck: exit code 1"]


def test_what_is_wrong_with_the_samples_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = called(Runs(left=replace(RUN, first=[-2, 0])), tmp_path, monkeypatch)

    assert done.return_value == FAILED
    assert "struck: shard 0: 2 samples from -2 to -1 are committed and were never drawn" in told(done)["failed"]
