"""Transfers of a state under fire, one trial after the other, and what came of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.events import LineFile, Record, read_all
from scripts.transfer_plan import draw
from scripts.transfer_scene import Scene

RESULTS = "transfers.jsonl"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one trial gave."""

    trouble: str
    seed: int
    fault: str
    """The plan, in words."""
    wall_s: float
    joiners: int
    failed: int
    """Joiners that failed because no donor was left, as they should."""
    refetched: int
    """Bytes that the joiners had to fetch again."""
    reasons: tuple[str, ...]
    """Why the trial failed; empty if it passed."""

    @property
    def name(self) -> str:
        return f"{self.trouble} {self.seed}"


class Trials:
    """Those that were made, one a line, in a file that a later call goes on with."""

    def __init__(self, path: Path) -> None:
        self._trials = {(trial.trouble, trial.seed): trial for trial in map(_from_record, read_all(path))}
        self._file = LineFile(path)

    def get(self, trouble: str, seed: int) -> Trial | None:
        return self._trials.get((trouble, seed))

    def add(self, trial: Trial) -> None:
        """Write it down."""
        self._trials[trial.trouble, trial.seed] = trial
        self._file.append(dataclasses.asdict(trial))

    def close(self) -> None:
        self._file.close()


def make(trouble: str, seed: int) -> Trial:
    """Make the trial of that seed."""
    plan = draw(trouble, seed)
    account = Scene(plan).run()
    endings = account.endings.values()
    return Trial(
        trouble=trouble,
        seed=seed,
        fault=str(plan),
        wall_s=round(account.wall_s, 1),
        joiners=len(plan.orders),
        failed=sum(bool(ending.error) for ending in endings),
        refetched=sum(ending.refetched for ending in endings),
        reasons=account.reasons,
    )


def repeat(
    troubles: Sequence[str], seeds: Sequence[int], folder: Path, *, tell: Callable[[Trial], None]
) -> tuple[list[Trial], bool]:
    """All trials, those of earlier calls with the same folder among them, and whether Ctrl-C ended it early."""
    trials, made = Trials(folder / RESULTS), []
    try:
        for seed in seeds:
            for trouble in troubles:
                trial = trials.get(trouble, seed)
                if trial is None:
                    trial = make(trouble, seed)
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
        "troubles": {
            trouble: {
                "runs": len(those),
                "passed": sum(not trial.reasons for trial in those),
                "joiners": sum(trial.joiners for trial in those),
                "without_donor": sum(trial.failed for trial in those),
                "refetched_bytes": sum(trial.refetched for trial in those),
            }
            for trouble in dict.fromkeys(trial.trouble for trial in trials)
            if (those := [trial for trial in trials if trial.trouble == trouble])
        },
    }


def _from_record(record: Record) -> Trial:
    return Trial(**{**record, "reasons": tuple(record["reasons"])})
