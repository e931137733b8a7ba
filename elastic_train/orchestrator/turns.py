"""When a warm standby may be made: one at a time, and while no replica starts.

Importing everything costs seconds of several cores, which a replica on its way back must not have to share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StandbyTurns:
    """Shared by all replicas whose processes run on the same machine."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._starting: set[int] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    def starts(self, slot: int) -> None:
        """A replica has begun to start."""
        self._starting.add(slot)
        self._quiet.clear()

    def started(self, slot: int) -> None:
        """A replica has done its first step, or will not come to it."""
        self._starting.discard(slot)
        if not self._starting:
            self._quiet.set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn, which ends with the block."""
        async with self._one:
            await self._quiet.wait()
            yield
