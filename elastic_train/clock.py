"""Time as an argument.

Everything that decides by time (backoff, deadlines, the event log) is handed a clock, so that a test moves
time by hand and a decision can be replayed. Nothing below the command line reads the system's clock by
itself.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def now(self) -> float:
        """Unix time in seconds: comparable between hosts, may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment: never runs backwards, for durations and deadlines."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._start = now
        self._elapsed = 0.0

    def now(self) -> float:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        return self._elapsed

    def advance(self, seconds: float) -> None:
        """Moves both readings forward. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot be advanced by {seconds} s")
        self._elapsed += seconds
