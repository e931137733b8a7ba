"""Trials under fire, one after the other, and what came of them: written down, gone on with, summed up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.events import LineFile, Record, read_all


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one trial gave."""

    kind: str
    seed: int
    fault: str
    """What befell it, in words."""
    wall_s: float
    counts: Mapping[str, int]
    """What is of interest in a trial of that kind; summed up over all of them."""
    reasons: tuple[str, ...]
    """Why it failed; empty if it passed."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.seed}"


class Trials:
    """Those that were made, one a line, in a file that a later call goes on with."""

    def __init__(self, path: Path) -> None:
        self._trials = {(trial.kind, trial.seed): trial for trial in map(_from_record, read_all(path))}
        self._file = LineFile(path)

    def get(self, kind: str, seed: int) -> Trial | None:
        return self._trials.get((kind, seed))

    def add(self, trial: Trial) -> None:
        """Write it down."""
        self._trials[trial.kind, trial.seed] = trial
        self._file.append(dataclasses.asdict(trial))

    def close(self) -> None:
        self._file.close()


def repeat(
    kinds: Sequence[str],
    seeds: Sequence[int],
    path: Path,
    *,
    make: Callable[[str, int], Trial],
    tell: Callable[[Trial], None],
) -> tuple[list[Trial], bool]:
    """All trials, those that ``path`` holds from earlier calls among them, and whether Ctrl-C ended it early.

    Args:
        make: makes the trial of a kind and a seed.
        tell: told of each.
    """
    trials, made = Trials(path), []
    try:
        for seed in seeds:
            for kind in kinds:
                trial = trials.get(kind, seed)
                if trial is None:
                    trial = make(kind, seed)
                    trials.add(trial)
                made.append(trial)
                tell(trial)
    except KeyboardInterrupt:
        return made, True
    finally:
        trials.close()
    return made, False


def sum_up(trials: Sequence[Trial], kinds: str) -> dict[str, Any]:
    """All trials together, as JSON can hold it; under ``kinds`` those of each kind."""
    by_kind: dict[str, list[Trial]] = {}
    for trial in trials:
        by_kind.setdefault(trial.kind, []).append(trial)
    return {
        "runs": len(trials),
        "passed": sum(not trial.reasons for trial in trials),
        "failed": {trial.name: [trial.fault, *trial.reasons] for trial in trials if trial.reasons},
        kinds: {
            kind: {
                "runs": len(those),
                "passed": sum(not trial.reasons for trial in those),
                **{name: sum(trial.counts[name] for trial in those) for name in those[0].counts},
            }
            for kind, those in by_kind.items()
        },
    }


def _from_record(record: Record) -> Trial:
    return Trial(**{**record, "reasons": tuple(record["reasons"])})
