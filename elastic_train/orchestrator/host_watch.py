"""Sees that another host is lost: what connects to it breaks, or it answers nothing any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from elastic_train.clock import Clock

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 0.5
_SLICES = 10
"""In which silence is counted: a controller that was stopped itself has missed one of them, however long it was."""


class HostWatch:
    """Asks a ReplicaActor all the time, which thereby knows that it is heard."""

    def __init__(
        self,
        hold: Callable[[int], Awaitable[int]],
        broken: Callable[[], Awaitable[str]],
        *,
        timeout_s: float,
        start_s: float,
        clock: Clock,
    ) -> None:
        """
        Args:
            hold: asks, given the number of the last answer (0: none yet), for the next one.
            broken: returns when the connection to the host is gone, and how.
            timeout_s: silence after which the host is lost.
            start_s: how long the first answer may take.
        """
        self._hold = hold
        self._broken = broken
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._clock = clock
        self._began_at = clock.monotonic()
        self._heard_at: float | None = None

    @property
    def heard_at(self) -> float:
        """When the last answer came; now, as long as there was none: what is asked may just have been started."""
        return self._clock.monotonic() if self._heard_at is None else self._heard_at

    async def lost(self) -> str:
        """Returns when the host is lost, and what shows it."""
        ways = [asyncio.ensure_future(self._broken()), asyncio.ensure_future(self._silent())]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _silent(self) -> str:
        heard, patience_s = 0, self._start_s
        while True:
            question = asyncio.ensure_future(self._hold(heard))
            try:
                for _ in range(_SLICES):
                    if question.done():
                        break
                    await asyncio.wait({question}, timeout=patience_s / _SLICES)
                if not question.done():
                    since = self._began_at if self._heard_at is None else self._heard_at
                    return f"it has not answered for {self._clock.monotonic() - since:.1f} s"
                heard, patience_s = question.result(), self._timeout_s
            except Exception as error:
                # The actor has failed, not its host: whoever waits for the actor hears of it.
                logger.info("no more answers: %s", str(error) or type(error).__name__)
                await asyncio.Event().wait()
            finally:
                question.cancel()
            self._heard_at = self._clock.monotonic()
            await asyncio.sleep(min(_ASK_EVERY_S, self._timeout_s / _SLICES))
