"""What process tests ask of the log of a run."""

from elastic_train.events import Record
from elastic_train.observe.invariants import violations
from scripts.launched_run import LaunchedRun


def named(run: LaunchedRun, *names: str) -> list[Record]:
    """Its events of these names so far."""
    return [event for event in run.events() if event["event"] in names]


def check_the_states(run: LaunchedRun) -> None:
    """Every invariant of the log holds."""
    assert {name: found for name, found in violations(run.events()).items() if found} == {}
