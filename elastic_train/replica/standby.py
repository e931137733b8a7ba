"""A warm standby: processes with everything imported, which wait to become the next incarnation of a replica.

Importing torch, torchft and torchtitan takes longer than all else in a restart. The standby has done it when a failure
comes, and holds no memory of an accelerator until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum

from elastic_train.futures import result
from elastic_train.replica.procs import Procs

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ASK_EVERY_S = 5.0


class StandbyState(StrEnum):
    """Where a standby stands."""

    NONE = "none"
    WARMING = "warming"
    READY = "ready"


class Standby:
    """The standby of one replica: at most one, made on request, ended when it is of no use any more."""

    def __init__(self, silence_s: float) -> None:
        """
        Args:
            silence_s: a standby that does not answer for so long is given up.
        """
        self._silence_s = silence_s
        self._procs: Procs | None = None
        self._warming: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def state(self) -> StandbyState:
        if self._procs is None:
            return StandbyState.NONE
        warm = self._warming is not None and self._warming.done()
        return StandbyState.READY if warm else StandbyState.WARMING

    async def make(self, start: Callable[[], Procs], on_started: Callable[[Procs], None]) -> bool:
        """Start processes and let them import everything; False if they did not get there, or were taken meanwhile.

        Args:
            start: makes the processes.
            on_started: called once they run, before they import anything.
        """
        if self._procs is not None:
            return self.state is StandbyState.READY
        procs = self._procs = start()
        self._gone.clear()
        self._warming = asyncio.ensure_future(self._warm(procs, on_started))
        try:
            await asyncio.shield(self._warming)
        except Exception as error:
            logger.warning("the standby could not be made: %s", error)
            await self._give_up(procs)
            return False
        if self._procs is not procs:
            return False
        self._watching = asyncio.ensure_future(self._watch(procs))
        return True

    async def take(self) -> Procs | None:
        """Its processes, for the next incarnation. One that is still importing is further than a new start would be,
        and is waited for. None: there is none, or it does not answer.
        """
        procs, warming = self._procs, self._warming
        if procs is None:
            return None
        # From here on nobody else ends it.
        self._let_go()
        fit = False
        try:
            if warming is not None:
                await warming
            fit = procs.all_alive and await procs.answer(self._silence_s)
        except Exception as error:
            logger.warning("the standby is of no use: %s", error)
        finally:
            if not fit:
                await procs.end()
        return procs if fit else None

    async def gone(self) -> None:
        """Wait until there is none, because it was taken or lost."""
        await self._gone.wait()

    async def end(self) -> None:
        """End its processes, if there are any."""
        if self._procs is not None:
            await self._give_up(self._procs)

    async def _warm(self, procs: Procs, on_started: Callable[[Procs], None]) -> None:
        await procs.started()
        on_started(procs)
        await result(procs.actor.warm.call())

    async def _watch(self, procs: Procs) -> None:
        """End it if it has lost a process or does not answer any more."""
        looks = 0
        while procs.all_alive:
            await asyncio.sleep(_LOOK_S)
            looks += 1
            if looks % round(_ASK_EVERY_S / _LOOK_S) == 0 and not await procs.answer(self._silence_s):
                break
        logger.warning("the standby was lost")
        self._watching = None
        await self._give_up(procs)

    async def _give_up(self, procs: Procs) -> None:
        if self._procs is procs:
            self._let_go()
        await procs.end()

    def _let_go(self) -> None:
        """There is none any more, whatever becomes of its processes."""
        if self._watching is not None:
            self._watching.cancel()
        self._procs = self._warming = self._watching = None
        self._gone.set()
