"""Worlds that take a fault, one after the other, and what came of them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.events import LineFile, Record, read_all
from scripts.sync_world.checks import faults_of
from scripts.sync_world.families import draw
from scripts.sync_world.world import World


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one world gave."""

    family: str
    seed: int
    fault: str
    wall_s: float
    retries: int
    doubts: int
    reasons: tuple[str, ...]
    """Why it failed; empty if it passed."""

    @property
    def name(self) -> str:
        return f"{self.family} {self.seed}"


class Trials:
    """Those that were made, one a line, in a file that a later call goes on with."""

    def __init__(self, path: Path) -> None:
        self._trials = {(trial.family, trial.seed): trial for trial in map(_from_record, read_all(path))}
        self._file = LineFile(path)

    def get(self, family: str, seed: int) -> Trial | None:
        return self._trials.get((family, seed))

    def add(self, trial: Trial) -> None:
        """Write it down."""
        self._trials[trial.family, trial.seed] = trial
        self._file.append(dataclasses.asdict(trial))

    def close(self) -> None:
        self._file.close()


def make(family: str, seed: int, folder: Path, *, keep: bool) -> Trial:
    """Make the world of that seed, in a folder of its own, which stays if it fails."""
    here = folder / f"{family}_{seed}"
    # A trial that was interrupted has left its folder.
    shutil.rmtree(here, ignore_errors=True)
    spec = draw(family, seed)
    account = World(spec, here).run()
    events = [record["event"] for records in account.events.values() for record in records]
    reasons = faults_of(spec, account)
    if "fault_injected" not in events:
        reasons.append("the fault did not strike")
    if not reasons and not keep:
        shutil.rmtree(here, ignore_errors=True)
    return Trial(
        family=family,
        seed=seed,
        fault=str(spec.faults[0]),
        wall_s=round(account.wall_s, 1),
        retries=events.count("sync_retried"),
        doubts=events.count("doubt_settled"),
        reasons=tuple(reasons),
    )


def repeat(
    families: Sequence[str], seeds: Sequence[int], folder: Path, *, keep: bool, tell: Callable[[Trial], None]
) -> tuple[list[Trial], bool]:
    """All trials, those of earlier calls with the same folder among them, and whether Ctrl-C ended it early."""
    trials, made = Trials(folder / "worlds.jsonl"), []
    try:
        for seed in seeds:
            for family in families:
                trial = trials.get(family, seed)
                if trial is None:
                    trial = make(family, seed, folder, keep=keep)
                    trials.add(trial)
                made.append(trial)
                tell(trial)
    except KeyboardInterrupt:
        return made, True
    finally:
        trials.close()
    return made, False


def sum_up(trials: Sequence[Trial]) -> dict[str, Any]:
    """All trials together, as JSON can hold it."""
    return {
        "runs": len(trials),
        "passed": sum(not trial.reasons for trial in trials),
        "failed": {trial.name: [trial.fault, *trial.reasons] for trial in trials if trial.reasons},
        "families": {
            family: {
                "runs": len(those),
                "passed": sum(not trial.reasons for trial in those),
                "retries": sum(trial.retries for trial in those),
                "doubts": sum(trial.doubts for trial in those),
            }
            for family in dict.fromkeys(trial.family for trial in trials)
            if (those := [trial for trial in trials if trial.family == family])
        },
    }


def _from_record(record: Record) -> Trial:
    return Trial(**{**record, "reasons": tuple(record["reasons"])})
