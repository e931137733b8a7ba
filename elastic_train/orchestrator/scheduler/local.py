"""All replicas on this machine."""

from __future__ import annotations

from monarch.actor import this_host

from elastic_train.orchestrator.scheduler.interface import Allocation, Scheduler


def this_machine(name: str, address: str) -> Allocation:
    """This machine, which needs no scheduler."""
    return Allocation(name=name, hosts=("localhost",), mesh=this_host(), address=address)


class LocalScheduler(Scheduler):
    """This machine, for everything."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        """
        Args:
            address: at which replicas reach each other.
        """
        self._address = address

    @property
    def is_local(self) -> bool:
        return True

    async def allocate(self, name: str) -> Allocation:
        return this_machine(name, self._address)

    async def release(self, allocation: Allocation, *, failed: bool = False, within_s: float = 0.0) -> None:
        return None
