"""A warm standby: processes with everything imported, which wait to become the next incarnation of a replica.

Importing torch, torchft and torchtitan takes longer than all else in a restart. The standby has done it when a failure
comes, and holds no memory of an accelerator until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

from elastic_train.replica.procs import Procs

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ASK_EVERY_S = 5.0
_FURTHER_S = 60.0
"""A standby that needs longer to get ready is not further than a new start would be."""
_WARMING_PATIENCE = 4
"""As with a rank that builds (`watch/beacon.py`): loading a large library holds the interpreter's lock for long."""


class StandbyState(StrEnum):
    """Where a standby stands."""

    NONE = "none"
    WARMING = "warming"
    READY = "ready"


class StandbyLost(Exception):
    """The processes of a standby are of no use any more; the text says why."""


class Standby:
    """The standby of one replica: at most one, made on request, ended when it is of no use any more."""

    def __init__(self, *, silence_s: float, start_s: float) -> None:
        """
        Args:
            silence_s: a standby that does not answer for so long is given up; while it warms, four times as long.
            start_s: how long it may take to get ready.
        """
        self._silence_s = silence_s
        self._start_s = start_s
        self._procs: Procs | None = None
        self._warming: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._fate: asyncio.Future[bool] | None = None

    @property
    def state(self) -> StandbyState:
        if self._procs is None:
            return StandbyState.NONE
        return StandbyState.WARMING if self._watching is None else StandbyState.READY

    async def make(self, start: Callable[[], Procs], on_started: Callable[[Procs], None]) -> bool:
        """Start processes and let them import everything; False if they did not get there, or were taken meanwhile.

        Args:
            start: makes the processes.
            on_started: called once they run, before they import anything.
        """
        if self._procs is not None:
            return self.state is StandbyState.READY
        self._fate = None
        try:
            procs = start()
        except Exception as failure:  # Monarch's errors, whatever they are
            logger.warning("the standby could not be started: %s", failure)
            return False
        self._procs = procs
        self._fate = asyncio.get_running_loop().create_future()
        warming = self._warming = asyncio.ensure_future(self._warm(procs, on_started))
        await asyncio.wait({warming})
        if warming.cancelled():
            return False
        if error := warming.exception():
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
        if procs is None or warming is None:
            return None
        # From here on nobody else ends it.
        self._let_go(taken=True)
        fit = False
        try:
            await asyncio.wait_for(warming, _FURTHER_S)
            fit = await procs.answer(self._silence_s)
        except Exception as error:
            logger.warning("the standby is of no use: %s", str(error) or type(error).__name__)
        finally:
            if not fit:
                await _end(procs)
        return procs if fit else None

    async def gone(self) -> bool:
        """Wait until there is none; whether the last one was taken, and not lost."""
        return self._fate is not None and await asyncio.shield(self._fate)

    async def end(self) -> None:
        """End its processes, if there are any."""
        procs, warming = self._procs, self._warming
        if procs is None or warming is None:
            return
        self._let_go(taken=False)
        warming.cancel()
        await _end(procs)

    async def _warm(self, procs: Procs, on_started: Callable[[Procs], None]) -> None:
        patience_s = self._silence_s * _WARMING_PATIENCE
        await _within(patience_s, procs.started(), "its processes do not start")
        on_started(procs)
        importing = asyncio.ensure_future(_within(self._start_s, procs.warm(), "it does not get ready"))
        losing = asyncio.ensure_future(self._lost(procs, patience_s))
        try:
            await asyncio.wait({importing, losing}, return_when=asyncio.FIRST_COMPLETED)
            if not importing.done():
                raise StandbyLost(losing.result())
            importing.result()
        finally:
            importing.cancel()
            losing.cancel()

    async def _watch(self, procs: Procs) -> None:
        """End it once it is lost."""
        logger.warning("the standby was lost: %s", await self._lost(procs, self._silence_s))
        await self._give_up(procs)

    async def _lost(self, procs: Procs, silence_s: float) -> str:
        """Returns once one of its processes has ended or does not answer any more; which of the two."""
        looks = 0
        while procs.all_alive:
            await asyncio.sleep(_LOOK_S)
            looks += 1
            if looks % round(_ASK_EVERY_S / _LOOK_S) == 0 and not await procs.answer(silence_s):
                break
        return "it does not answer" if procs.all_alive else "one of its processes has ended"

    async def _give_up(self, procs: Procs) -> None:
        if self._procs is procs:
            self._let_go(taken=False)
        await _end(procs)

    def _let_go(self, *, taken: bool) -> None:
        """There is none any more, whatever becomes of its processes."""
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
        self._procs = self._warming = self._watching = None
        if self._fate is not None and not self._fate.done():
            self._fate.set_result(taken)


async def _within(seconds: float, work: Coroutine[Any, Any, None], complaint: str) -> None:
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise StandbyLost(f"{complaint} within {seconds:.0f} s") from error


async def _end(procs: Procs) -> None:
    """What survives cannot be taken for an incarnation, so nobody has to be kept waiting for it."""
    try:
        await procs.end()
    except RuntimeError as error:
        logger.error("the standby: %s", error)
