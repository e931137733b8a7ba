"""Faults that come by chance at a steady rate, whatever the run is doing: what they are, and how they are dealt."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.config import EnvironmentProblem
from elastic_train.events import Record
from elastic_train.orchestrator.control import ask

OUTSIDE = "sigkill"
"""SIGKILL from outside, which strikes a replica also on its way back. All other kinds are dealt by the run itself."""

DEATHS = (OUTSIDE, "kill", "exit", "segfault", "exception")
HANGS = ("hang", "stop")
SUPERVISION = ("replica_actor", "lighthouse")

SHARES: Sequence[tuple[Sequence[str], float]] = ((DEATHS, 0.8), (HANGS, 0.1), (SUPERVISION, 0.1))
"""Of all faults, by what they strike."""


@dataclass(frozen=True, kw_only=True)
class Gust:
    """One fault to come."""

    after_s: float
    """Since the one before."""
    kind: str
    replica: int
    rank: int


def gusts(seed: int, *, mtbf_s: float, replicas: int, ranks: int) -> Iterator[Gust]:
    """Faults without an end, the same for the same seed: the time between two is exponentially distributed.

    Args:
        mtbf_s: mean seconds from one fault to the next.
        ranks: processes of each replica.
    """
    chance = random.Random(seed)
    groups, weights = zip(*SHARES, strict=True)
    while True:
        (kinds,) = chance.choices(groups, weights)
        yield Gust(
            after_s=chance.expovariate(1 / mtbf_s),
            kind=chance.choice(kinds),
            replica=chance.randrange(replicas),
            rank=chance.randrange(ranks),
        )


def deal(gust: Gust, run_dir: Path, events: Sequence[Record]) -> str | None:
    """Let a fault strike the run; None if it did, else why it did not."""
    if gust.kind == OUTSIDE:
        return _kill(gust, events)
    request = {"op": "inject", "replica": gust.replica, "rank": gust.rank, "kind": gust.kind, "point": "step"}
    try:
        reply: Mapping[str, Any] = ask(run_dir, request)
    except EnvironmentProblem as error:
        return str(error)
    return None if reply["ok"] else str(reply["text"])


def _kill(gust: Gust, events: Sequence[Record]) -> str | None:
    mine = [event for event in events if event["event"] == "procs_started" and event["replica"] == gust.replica]
    if not mine:
        return f"replica {gust.replica} has no processes yet"
    with contextlib.suppress(ProcessLookupError):
        os.kill(mine[-1]["pids"][gust.rank], signal.SIGKILL)
        return None
    return f"replica {gust.replica} is between two lives"
