"""Where hosts come from. The rest of the orchestrator knows only this interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from monarch.actor import this_host

from elastic_train.config import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Hosts that were given for one purpose."""

    name: str
    hosts: tuple[str, ...]
    """Names of the hosts, for people."""
    mesh: Any
    """Monarch's HostMesh."""


class Scheduler(ABC):
    """Gives hosts and takes them back."""

    loopback: bool
    """Whether everything runs on this machine."""

    @abstractmethod
    async def allocate(self, name: str) -> Allocation:
        """A host for ``name``; waits until there is one."""

    @abstractmethod
    async def release(self, allocation: Allocation) -> None:
        """Give hosts back."""


class LocalScheduler(Scheduler):
    """This machine, for everything."""

    loopback = True

    async def allocate(self, name: str) -> Allocation:
        return Allocation(name=name, hosts=("localhost",), mesh=this_host())

    async def release(self, allocation: Allocation) -> None:
        return None


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler that the config names."""
    match config.kind:
        case "local":
            return LocalScheduler()
