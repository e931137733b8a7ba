"""What a stress test has found: one line a seed, in a file that a later call goes on with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.events import LineFile, Record, read_all
from scripts.figures import by_kind
from scripts.struck_run import Outcome
from scripts.verdict import Strike


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the run of one seed gave."""

    seed: int
    faults: tuple[str, ...]
    """The plan, in the order of its steps."""
    outcome: Outcome

    @property
    def passed(self) -> bool:
        return not self.outcome.reasons


class OtherSettings(ValueError):
    """A results file belongs to a stress test with other settings; their results cannot be put together."""


class Results:
    """The results so far. A result is on disk before the next run begins."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """
        Args:
            path: the file; one that exists is gone on with.
            settings: what all its results have in common, as JSON can hold it.

        Raises:
            OtherSettings: the file has results of other settings.
        """
        self._settings = dict(settings)
        self._by_seed: dict[int, Result] = {}
        for record in read_all(path):
            differing = sorted(name for name, value in settings.items() if record["settings"].get(name) != value)
            if differing:
                raise OtherSettings(f"{path} has results with other {', '.join(differing)}: choose another folder")
            self._by_seed[record["seed"]] = _from_record(record)
        self._file = LineFile(path)

    def __contains__(self, seed: int) -> bool:
        return seed in self._by_seed

    def add(self, result: Result) -> None:
        """Write a result down."""
        self._by_seed[result.seed] = result
        self._file.append({"settings": self._settings, **_to_record(result)})

    def of(self, seeds: Sequence[int]) -> list[Result]:
        """The results of those of the seeds that have been run."""
        return [self._by_seed[seed] for seed in seeds if seed in self._by_seed]

    def close(self) -> None:
        self._file.close()


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    """All results together, as JSON can hold it."""
    return {
        "runs": len(results),
        "passed": sum(result.passed for result in results),
        "failed": {str(result.seed): list(result.outcome.reasons) for result in results if not result.passed},
        "unfinished": {
            str(result.seed): list(result.outcome.unfinished) for result in results if result.outcome.unfinished
        },
        "kinds": by_kind([strike for result in results for strike in result.outcome.strikes]),
    }


def _to_record(result: Result) -> Record:
    return {"seed": result.seed, "faults": result.faults, **dataclasses.asdict(result.outcome)}


def _from_record(record: Record) -> Result:
    return Result(
        seed=record["seed"],
        faults=tuple(record["faults"]),
        outcome=Outcome(
            exit_code=record["exit_code"],
            wall_s=record["wall_s"],
            strikes=tuple(Strike(**strike) for strike in record["strikes"]),
            unfinished=tuple(record["unfinished"]),
            reasons=tuple(record["reasons"]),
        ),
    )
