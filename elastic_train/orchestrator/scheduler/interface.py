"""What the orchestrator asks of a scheduler."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """Hosts that were given for one purpose."""

    name: str
    hosts: tuple[str, ...]
    """Names of the hosts, for people."""
    mesh: Any
    """Monarch's HostMesh."""
    address: str
    """At which other hosts reach what listens there."""
    place: str = ""
    """Name that no other allocation has, for files on the host; empty: this machine, whoever it is for."""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, whose processes can be watched and ended by their pids."""
        return not self.place


class Scheduler(ABC):
    """Gives hosts and takes them back."""

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """Whether every replica runs on this machine."""

    @abstractmethod
    async def allocate(self, name: str) -> Allocation:
        """A host for ``name``; waits until there is one. A host that has failed is given only if no other is free."""

    @abstractmethod
    async def release(self, allocation: Allocation, *, failed: bool = False, within_s: float = 0.0) -> None:
        """End everything that runs there, and give the hosts back.

        Args:
            failed: others are better, for a while.
            within_s: when what runs there will have ended by itself; a lost host, which cannot say that it has, is
                waited for as long.
        """

    async def lost(self, allocation: Allocation) -> str:
        """Returns once the hosts show to be lost, and how. Where nothing shows it, never."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def strike(self, allocation: Allocation) -> None:
        """Let the hosts fail, on purpose: everything on them ends at once."""
        raise NotImplementedError("this scheduler gives no host that may fail on purpose")
