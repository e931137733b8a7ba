"""Waiting for a quorum with the eyes open: a peer that got ahead meanwhile will not come to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.engine import SyncFailed
from elastic_train.diloco.peers import NOBODY, PeerState
from elastic_train.diloco.quorum import QuorumSeat

logger = logging.getLogger(__name__)

CALM_S = 1.0
ANXIOUS_S = 0.2
"""After a failed attempt, in which a peer may have got ahead."""
_LOOK_S = 0.1
_WAIT, _GO, _CATCH_UP, _GIVE_UP = range(4)


class Lookout:
    """Rank 0 of a replica looks, and the others hear its word."""

    def __init__(
        self,
        control: ControlGroup,
        look: Callable[[], PeerState | None],
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            look: finds a peer that is ahead; it may take a while, and is called in a thread.
            waiting: called several times a second while this rank waits.
        """
        self._control = control
        self._look = look
        self._waiting = waiting
        self._watch: Watch | None = None

    def start(self, period_s: float) -> None:
        """Look every ``period_s`` from now on; what was found before is forgotten."""
        self.stop()
        if self._control.rank == 0:
            self._watch = Watch(self._look, period_s)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def glance(self, seat: QuorumSeat, outer_step: int) -> tuple[bool, PeerState | None]:
        """Rank 0's word, without waiting: whether the quorum is there, and a peer that is ahead."""
        found = self._found(outer_step)
        fired, *source = self._control.word([int(seat.fired), *(found or NOBODY).to_ints()]).heard()
        ahead = PeerState.from_ints(source)
        return bool(fired), ahead if ahead.outer_step > outer_step else None

    def wait(self, seat: QuorumSeat, outer_step: int, end: float) -> PeerState | None:
        """Wait for rank 0's word: None if the quorum is there, else a peer that is ahead.

        Raises:
            SyncFailed: neither came before ``end`` (seconds of the monotonic clock).
        """
        while True:
            row = [_WAIT, *NOBODY.to_ints()]
            if self._control.rank == 0:
                found = self._found(outer_step)
                if seat.wait(_LOOK_S):
                    row[0] = _GO
                elif found is not None:
                    row = [_CATCH_UP, *found.to_ints()]
                elif time.monotonic() > end:
                    row[0] = _GIVE_UP
            word, *source = self._control.word(row).heard()
            if word == _GIVE_UP:
                raise SyncFailed("no quorum within diloco.quorum_timeout_s")
            if word != _WAIT:
                return None if word == _GO else PeerState.from_ints(source)
            self._waiting()

    def _found(self, outer_step: int) -> PeerState | None:
        found = self._watch.found if self._watch is not None else None
        return found if found is not None and found.outer_step > outer_step else None


class Watch:
    """Looks again and again, beside whatever the main thread does."""

    def __init__(self, look: Callable[[], PeerState | None], period_s: float) -> None:
        self._look = look
        self._period_s = period_s
        self._stop = threading.Event()
        self.found: PeerState | None = None
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; it does not wait for a look that is under way."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self.found = self._look() or self.found
            except Exception:
                logger.exception("looking for a peer that is ahead failed")
