"""Those replicas of a run that begin together: at the cold start, or later from a durable snapshot.

A generation is over when the run cannot go on from what its replicas hold. Whoever belonged to it then starts anew in
the next one, whatever it was doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.replica.durable.folder import DurableSnapshot

_Result = TypeVar("_Result")

_LOOK_S = 0.2


class GenerationOver(Exception):
    """What was waited for has lost its meaning: all replicas start anew."""


@dataclass(frozen=True, kw_only=True)
class Plea:
    """A replica cannot go on, and without it the others are too few."""

    cause: str
    """One of elastic_train.events.CAUSES."""
    reason: str
    """One line for people."""


@dataclass(eq=False, kw_only=True)
class Generation:
    """One common beginning, and what became of it."""

    barrier: ColdStart
    number: int = 0
    """How often all replicas went back to a durable snapshot before."""
    snapshot: DurableSnapshot | None = None
    """What it begins from; None: new parameters."""
    holders: set[int] = field(default_factory=set)
    """Slots whose replicas hold the run's state, so that others can get it from them."""
    plea: Plea | None = None
    """The first one that was made."""
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def began_at(self) -> int:
        """The outer step that it begins from."""
        return 0 if self.snapshot is None else self.snapshot.facts.outer_step

    def ask_to_restore(self, plea: Plea) -> None:
        """Ask for the next generation; what comes of it shows in ``over``."""
        self.plea = self.plea or plea
        self._asked.set()

    async def asked(self) -> Plea:
        """Wait for a plea."""
        await self._asked.wait()
        assert self.plea is not None
        return self.plea

    def end(self) -> None:
        """There is a next one."""
        self._over.set()

    async def over(self) -> None:
        """Wait until there is a next one."""
        await self._over.wait()

    async def unless_over(self, work: Awaitable[_Result]) -> _Result:
        """What comes of ``work``.

        Raises:
            GenerationOver: there is a next generation; ``work`` is cancelled.
        """
        working, over = asyncio.ensure_future(work), asyncio.ensure_future(self.over())
        try:
            await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise GenerationOver
        finally:
            over.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})

    async def worth_joining(self) -> None:
        """Wait until there may be somebody who gives a joiner the state: after the release, until there is a holder."""
        while self.barrier.released and not self.holders:
            await asyncio.sleep(_LOOK_S)
