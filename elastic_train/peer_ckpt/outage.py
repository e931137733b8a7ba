"""One outage in the log: its beginning, a line now and then while it lasts, and its end.

Several threads of a process ask again every second or sooner, and each failure would be a line.
"""

from __future__ import annotations

import logging
import threading

from elastic_train.clock import Clock, SystemClock

_REMINDER_S = 60.0


class Outage:
    """What is logged of somebody who does not answer; may be used from several threads."""

    def __init__(self, who: str, logger: logging.Logger, clock: Clock | None = None) -> None:
        self._who = who
        self._logger = logger
        self._clock = clock or SystemClock()
        self._since: float | None = None
        self._said_at = 0.0
        self._guard = threading.Lock()

    def goes_on(self, error: object) -> None:
        """A request failed; ``error`` tells how."""
        with self._guard:
            now = self._clock.monotonic()
            if self._since is None:
                self._since = self._said_at = now
                self._logger.warning("%s does not answer and is asked again: %s", self._who, error)
            elif now - self._said_at >= _REMINDER_S:
                self._said_at = now
                self._logger.warning("%s has not answered for %.0f s: %s", self._who, now - self._since, error)

    def is_over(self) -> None:
        """A request was answered."""
        with self._guard:
            if self._since is not None:
                since, self._since = self._since, None
                self._logger.info("%s answers again, after %.1f s", self._who, self._clock.monotonic() - since)
