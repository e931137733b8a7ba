"""How a run stands, read from its folder alone: works on a living run, a finished one and one that was
killed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.text import Text

from elastic_train.clock import Clock, SystemClock
from elastic_train.config import EnvironmentProblem
from elastic_train.events import Record, plain, read_records
from elastic_train.metrics import RunFold
from elastic_train.observe import table
from elastic_train.observe.summary import recovery_lines, summary_lines

_HINT = "give the folder of a run, for example outputs/latest"

# A process may have been started a moment before it wrote its file; a later one only got the same number.
_SAME_PROCESS_S = 1.0


@dataclass(frozen=True)
class Controller:
    """The process that drives the run, as its folder tells."""

    pid: int
    alive: bool


def show(run_dir: Path, as_json: bool = False, *, console: Console | None = None, clock: Clock | None = None) -> None:
    """Prints how the run in `run_dir` stands: a table for people, or one JSON object.

    `run_dir` may also be a folder of runs, whose `latest` is taken then. Raises EnvironmentProblem where
    there is no run.
    """
    console = console or Console()
    folder = find_run(run_dir)
    fold = read_fold(folder)
    controller = read_controller(folder)
    if as_json:
        console.print(Text(json.dumps(as_dict(fold, controller))), soft_wrap=True)
        return
    if fold.ended_t is not None:
        for line in summary_lines(fold):
            console.print(Text(line), soft_wrap=True)
        console.print(table.replicas(fold, None))
        return
    now = (clock or SystemClock()).now() if controller is not None and controller.alive else None
    console.print(table.heading(fold, now))
    console.print(Text(_whether_alive(controller)), soft_wrap=True)
    console.print(table.progress(fold))
    console.print(table.replicas(fold, now))
    for recovery in fold.recoveries:
        for line in recovery_lines(recovery, fold):
            console.print(Text(line), soft_wrap=True)


def find_run(path: Path) -> Path:
    """The folder of the run that `path` names. Raises EnvironmentProblem."""
    if not path.exists():
        gone = "its link is broken" if path.is_symlink() else "no such folder"
        raise EnvironmentProblem(f"{path}: {gone}; {_HINT}")
    for folder in (path, path / "latest"):
        if (folder / "events.jsonl").is_file():
            return folder.resolve()
    raise EnvironmentProblem(f"{path}: no events.jsonl, so no run; {_HINT}")


def read_fold(run_dir: Path) -> RunFold:
    """The whole log of a run folder, folded. Raises EnvironmentProblem if it holds no event."""
    fold = RunFold()
    _each(run_dir / "events.jsonl", fold.apply)
    if fold.started_t is None:
        raise EnvironmentProblem(f"{run_dir}: the log is still empty; try again in a moment, or {_HINT}")
    _each(run_dir / "metrics.jsonl", fold.apply_metrics)
    return fold


def read_controller(run_dir: Path) -> Controller | None:
    """Who drives the run, and whether that process is alive; None where the folder does not tell."""
    path = run_dir / "controller.json"
    try:
        pid = int(json.loads(path.read_text())["pid"])
        written = path.stat().st_mtime
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return Controller(pid, _is_alive(pid, written))


def as_dict(fold: RunFold, controller: Controller | None) -> dict[str, Any]:
    """The status as plain values."""
    status: dict[str, Any] = plain(
        {
            "status": fold.status,
            "name": fold.name,
            "run_dir": fold.run_dir,
            "controller": None if controller is None else dataclasses.asdict(controller),
            "steps": fold.steps,
            "inner_step": fold.inner_step,
            "outer_step": fold.outer_step,
            "first_loss": fold.first_loss,
            "loss": fold.last_loss,
            "tokens_committed": fold.tokens_committed,
            "wall_s": fold.wall_s(),
            "efficiency": fold.efficiency(),
            "quorum": None if fold.quorum is None else dataclasses.asdict(fold.quorum),
            "replicas": [
                dataclasses.asdict(view) | {"seconds": fold.buckets(slot)} for slot, view in fold.replicas.items()
            ],
            "recoveries": [
                dataclasses.asdict(recovery) | {"phases": recovery.phases()} for recovery in fold.recoveries
            ],
            "faults": [dataclasses.asdict(fault) for fault in fold.faults],
            "retired": fold.retired,
            "checkpoint": None if fold.checkpoint is None else dataclasses.asdict(fold.checkpoint),
        }
    )
    return status


def _each(path: Path, take: Callable[[Record], None]) -> None:
    offset = 0
    while True:
        records, after = read_records(path, offset)
        for record in records:
            take(record)
        if after == offset:
            return
        offset = after


def _is_alive(pid: int, since: float) -> bool:
    """Whether `pid` is a process that was already there when the file that names it was written."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + _SAME_PROCESS_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _whether_alive(controller: Controller | None) -> str:
    if controller is None:
        return "the run has not ended, and its folder does not say which process drives it"
    if controller.alive:
        return f"driven by process {controller.pid}"
    return f"the controller (process {controller.pid}) is gone: the run ended without saying how"
