"""The cold start: replicas that are ready wait here and are released together.

Whoever starts after the release is a joiner: it gets its state from a peer, never from scratch.
"""

from __future__ import annotations

import asyncio


class ColdStart:
    """The one release of a run."""

    def __init__(self, slots: int) -> None:
        self._expected = set(range(slots))
        self._ready: set[int] = set()
        self._release = asyncio.Event()
        self._change = asyncio.Event()
        self.released_slots: frozenset[int] = frozenset()

    @property
    def released(self) -> bool:
        return self._release.is_set()

    async def arrive(self, slot: int) -> None:
        """Say that ``slot`` is ready; returns at the release."""
        self._ready.add(slot)
        self._change.set()
        await self.wait()

    async def wait(self) -> None:
        """Wait for the release."""
        await self._release.wait()

    def give_up(self, slot: int) -> None:
        """Nobody waits for ``slot`` any more: it was retired."""
        self._ready.discard(slot)
        self._expected.discard(slot)
        self._change.set()

    async def release_when_ready(self, timeout_s: float, least: int) -> frozenset[int]:
        """Wait until all slots are ready, then release them; after the timeout, release those that are.

        Returns:
            The slots that start together.

        Raises:
            TimeoutError: fewer than ``least`` are ready when the time is up.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._expected and self._ready >= self._expected):
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            if len(self._ready) < least:
                raise
        self.released_slots = frozenset(self._ready)
        self._release.set()
        return self.released_slots
