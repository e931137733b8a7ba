"""The replicas of a run as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_train.lifecycle import ReplicaState
from elastic_train.metrics import ReplicaView, RunFold
from elastic_train.observe import words

_STYLES = {
    ReplicaState.PENDING: "dim",
    ReplicaState.STARTING: "yellow",
    ReplicaState.JOINING: "cyan",
    ReplicaState.HEALING: "magenta",
    ReplicaState.RUNNING: "green",
    ReplicaState.DRAINING: "yellow",
    ReplicaState.BACKOFF: "red",
    ReplicaState.SUCCEEDED: "bold green",
    ReplicaState.STOPPED: "dim",
    ReplicaState.FAILED: "bold red",
}

# Name and least width: together they fit the 80 columns that a terminal has at the least.
_COLUMNS = {
    "replica": 7,
    "state": 9,
    "life": 4,
    "step": 6,
    "loss": 7,
    "tokens/s": 8,
    "quorum": 6,
    "outer": 5,
    "waited": 6,
    "last sync": 10,
}


def heading(fold: RunFold, now: float | None) -> Text:
    """The run in one line."""
    parts = [f"{fold.name or 'run'} {fold.status}", words.seconds(fold.wall_s(now))]
    if fold.quorum is not None:
        parts.append(f"quorum {fold.quorum.quorum_id} of {words.slots(fold.quorum.participants)}")
    if fold.recoveries:
        parts.append(f"{len(fold.recoveries)} failed")
    efficiency = fold.efficiency(now)
    if efficiency is not None:
        parts.append(f"efficiency {efficiency:.0%}")
    return Text("  ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")


def progress(fold: RunFold) -> RenderableType:
    """A bar over the nominal steps of the run."""
    count = Text(f"step {fold.inner_step}/{fold.steps or '?'}  outer step {fold.outer_step}")
    if not fold.steps:
        return count
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=fold.steps, completed=min(fold.inner_step, fold.steps), width=40), count)
    return row


def replicas(fold: RunFold, now: float | None, limit: int | None = None) -> RenderableType:
    """A row for each replica; where only `limit` rows have room, those that do not run come first."""
    views = list(fold.replicas.values())
    shown = views
    if limit is not None and len(views) > limit:
        troubled_first = sorted(views, key=lambda view: (view.state is ReplicaState.RUNNING, view.slot))
        shown = sorted(troubled_first[: max(1, limit)], key=lambda view: view.slot)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name, width in _COLUMNS.items():
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True, min_width=width)
    for view in shown:
        table.add_row(*_cells(view, fold, now))
    if len(shown) == len(views):
        return table
    return Group(table, Text(f"and {len(views) - len(shown)} more", style="dim"))


def _cells(view: ReplicaView, fold: RunFold, now: float | None) -> Sequence[str | Text]:
    quorum = fold.quorum if fold.quorum is not None and view.slot in fold.quorum.participants else None
    sync = view.last_sync
    return (
        str(view.slot),
        Text(view.state, style=_STYLES[view.state]),
        str(view.incarnation),
        str(view.step or "-"),
        "-" if view.loss is None else f"{view.loss:.4f}",
        "-" if view.tps is None else f"{view.tps:,.0f}",
        "-" if quorum is None else str(quorum.quorum_id),
        str(view.outer_step or "-"),
        "-" if sync is None else words.seconds(sync.wait_s),
        "-" if sync is None or now is None else f"{words.seconds(max(0.0, now - sync.t))} ago",
    )
