"""Word from outside that a replica is to leave: the run is interrupted, or its host is about to be taken away.

It comes in any thread of a rank's process. The trainer looks for it where it can leave: after a commit, and between two
inner steps or while it waits for its peers, if there is no time for the next one.
"""

from __future__ import annotations

import threading
import time


class Leaves(Exception):
    """The replica leaves in the middle of an interval, as there is no time for the next sync."""


class Notice:
    """What the process of one rank was told."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._leave_by = 0.0
        self._heeded = threading.Event()
        self._warned = threading.Event()

    def give(self, within_s: float) -> None:
        """Leave at the next commit, at the latest in so many seconds. A later word counts only if it is shorter."""
        leave_by = time.monotonic() + within_s
        if not self._given.is_set() or leave_by < self._leave_by:
            self._leave_by = leave_by
        self._given.set()

    @property
    def given(self) -> bool:
        return self._given.is_set()

    def forbids(self, seconds: float) -> bool:
        """Whether it was given, and there is no time for what takes so many more seconds."""
        return self._given.is_set() and time.monotonic() + seconds >= self._leave_by

    def heed(self, heeded: bool) -> None:
        """Whether a warning is of use from now on: there is a replica that can leave."""
        if heeded:
            self._heeded.set()
        else:
            self._heeded.clear()

    def warn(self) -> bool:
        """This process is about to be killed from outside; False if nobody heeds it. A signal handler may call it."""
        if not self._heeded.is_set():
            return False
        self._warned.set()
        return True

    @property
    def warned(self) -> bool:
        return self._warned.is_set()


_here = Notice()


def here() -> Notice:
    """That of this process, which has one rank."""
    return _here
