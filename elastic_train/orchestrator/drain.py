"""An interrupted run: the replicas leave at their next sync, and one of them writes what the run can go on from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from elastic_train.lifecycle import ReplicaState
from elastic_train.metrics import RunFold
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class Drain:
    """Empties a run."""

    def __init__(
        self, run: RunContext, slots: Sequence[ReplicaSlot], fold: RunFold, hear_all: Callable[[], Awaitable[None]]
    ) -> None:
        """
        Args:
            fold: what the run's log amounts to.
            hear_all: merges what all replicas have written into the log.
        """
        self._run = run
        self._slots = slots
        self._fold = fold
        self._hear_all = hear_all

    async def run(self, training: asyncio.Future[Any]) -> None:
        """Let the replicas that hold the state leave, and one of them write it. Their processes stay.

        Args:
            training: done once no replica is looked after any more.
        """
        run = self._run
        run.draining = True
        holders = [slot for slot in self._slots if slot.slot in run.generation.holders]
        if not run.generation.barrier.released or not holders:
            return
        within_s = run.config.orchestrator.drain_timeout_s
        run.log.emit(
            "note",
            text=f"interrupted: the replicas leave at their next sync, at the latest in {within_s:g} s; "
            "interrupt once more to end at once",
        )
        await asyncio.gather(*(slot.drain(within_s) for slot in holders))
        # A rank that hangs is found and ended by its supervisor, and no other may take longer than one that hangs.
        bound_s = within_s + run.config.recovery.hang_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                while not training.done() and any(slot.state is ReplicaState.DRAINING for slot in holders):
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            logger.warning("not all replicas have left within %.0f s", bound_s)
        if any(slot.finished for slot in self._slots):
            # The next sync was the run's last: its end is under way.
            end_s = run.config.orchestrator.finish_timeout_s + run.config.recovery.save_hang_timeout_s
            _, ending = await asyncio.wait({training}, timeout=end_s)
            if ending:
                logger.warning("the run has not come to its end within %.0f s", end_s)
            return
        await self._hear_all()
        await self._save([slot for slot in holders if slot.has_left])

    async def _save(self, left: Sequence[ReplicaSlot]) -> None:
        """One of those with the newest state writes it; the next one if it cannot."""
        newest = sorted(left, key=lambda slot: -slot.outer_step)
        if newest and newest[0].outer_step <= self._run.generation.began_at:
            self._note("nothing was committed since the run began, so there is nothing to write")
            return
        if self._run.config.diloco.engine != "elastic":
            self._note(f'with diloco.engine = "{self._run.config.diloco.engine}" there is no state to go on from')
            return
        for slot in newest:
            written = self._fold.checkpoint
            if written is not None and written.outer_step >= slot.outer_step:
                return
            await slot.save(whole=True)
        written = self._fold.checkpoint
        if not newest or written is None or written.outer_step < newest[0].outer_step:
            self._note("the last committed state could not be written; logs/ says why")

    def _note(self, text: str) -> None:
        self._run.log.emit("note", text=text)
