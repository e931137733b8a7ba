"""A replica on another host that nobody hears any more must end by itself: its slot will be started elsewhere.

The controller asks the ReplicaActor all the time. What counts is not the question, which may have been under way for
long, but that an answer got through: each question names the last answer that was heard. So the replica never takes
itself for heard at a time later than that at which the controller has heard it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

import psutil

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class Lease:
    """Until when a replica may go on without another answer of its being heard. Times are seconds of its own clock."""

    def __init__(self, term_s: float, now: float) -> None:
        self._term_s = term_s
        self._heard_at = now
        self._answers: dict[int, float] = {}
        self._last = 0

    def renew(self, heard: int, now: float) -> int:
        """Take note that the answer ``heard`` got through (0: none yet); the number of the answer to this question."""
        if heard in self._answers:
            self._heard_at = max(self._heard_at, self._answers[heard])
            self._answers = {number: at for number, at in self._answers.items() if number > heard}
        self._last += 1
        self._answers[self._last] = now
        return self._last

    def is_over(self, now: float) -> bool:
        return now - self._heard_at >= self._term_s


class Fence:
    """Holds the lease of this process, and ends what it stands for when it is over."""

    def __init__(self, term_s: float, act: Callable[[], None]) -> None:
        """
        Args:
            act: called in a thread, once.
        """
        self._lease = Lease(term_s, _now())
        self._guard = threading.Lock()
        self._act = act
        # A thread, so that nothing that the actor is busy with can hold it up.
        threading.Thread(target=self._watch, args=(term_s,), name="isolation", daemon=True).start()

    def renew(self, heard: int) -> int:
        """As ``Lease.renew``."""
        with self._guard:
            return self._lease.renew(heard, _now())

    def _watch(self, term_s: float) -> None:
        never = threading.Event()
        while not never.wait(_LOOK_S):
            with self._guard:
                is_over = self._lease.is_over(_now())
            if is_over:
                logger.error("the controller has not been heard for %g s: this replica ends itself", term_s)
                self._act()
                return


def end_host() -> None:
    """Kill everything that the worker of this host has started, and the worker, and this process with it."""
    worker = psutil.Process().parent()
    if worker is not None:
        mine = [process for process in worker.children(recursive=True) if process.pid != os.getpid()]
        for process in (*mine, worker):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
    os.kill(os.getpid(), signal.SIGKILL)


def _now() -> float:
    # Unlike the monotonic clock, it goes on while the host is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
