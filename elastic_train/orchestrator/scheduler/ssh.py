"""Replicas on a list of hosts, which a remote shell reaches.

On each host that is given runs a worker of Monarch's as long as it is needed. It listens at a port of its own and
connects to the controller, so all hosts must reach each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import attach_to_workers

from elastic_train.config import RunConfig
from elastic_train.orchestrator.addresses import address_of, bracketed
from elastic_train.orchestrator.monarch_env import SETTINGS
from elastic_train.orchestrator.scheduler.hosts import Hosts, Place
from elastic_train.orchestrator.scheduler.interface import Allocation, Scheduler
from elastic_train.orchestrator.scheduler.remote_worker import HostFailed, RemoteWorker

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_PAUSE_MAX_S = 30.0
"""Before the next host is tried after one that could not be started; it doubles with each in a row."""
_MARK_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class RemoteAllocation(Allocation):
    """A part of one host, and what runs there."""

    part: Place
    worker: RemoteWorker


class SshScheduler(Scheduler):
    """Shares the hosts of ``scheduler.hosts`` out."""

    def __init__(self, config: RunConfig, logs: Path, note: Callable[[str], object]) -> None:
        """
        Args:
            logs: folder for what hosts print.
            note: told when a host cannot be used.
        """
        settings = config.scheduler
        self._settings = settings
        self._isolation_s = config.recovery.isolation_timeout_s
        self._procs = config.orchestrator.procs_per_replica
        self._replicas_per_host = config.replicas_per_host
        self._logs = logs
        self._note = note
        self._hosts = Hosts(
            settings.hosts, replicas_per_host=config.replicas_per_host, cool_down_s=settings.cool_down_s
        )
        self._returned = asyncio.Condition()
        self._given = 0
        self._mark = secrets.token_hex(_MARK_BYTES)
        """Sets what this run leaves on a host apart from what others have."""

    @property
    def is_local(self) -> bool:
        return False

    async def allocate(self, name: str) -> Allocation:
        pause_s = _PAUSE_S
        while True:
            part = await self._take()
            try:
                return await self._start(name, part)
            except HostFailed as failure:
                self._note(f"{name}: the host {part.host} cannot be used: {failure}")
                await self._give_back(part, failed=True)
            except BaseException:
                await self._give_back(part, failed=False)
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def release(self, allocation: Allocation, *, failed: bool = False, within_s: float = 0.0) -> None:
        assert isinstance(allocation, RemoteAllocation)
        gone_by = _now() + within_s
        try:
            if not await allocation.worker.end():
                await asyncio.sleep(gone_by - _now())
        finally:
            await self._give_back(allocation.part, failed=failed)

    async def lost(self, allocation: Allocation) -> str:
        assert isinstance(allocation, RemoteAllocation)
        return await allocation.worker.lost()

    def strike(self, allocation: Allocation) -> None:
        assert isinstance(allocation, RemoteAllocation)
        allocation.worker.strike()

    async def _start(self, name: str, part: Place) -> RemoteAllocation:
        try:
            address = await asyncio.to_thread(address_of, part.host)
        except OSError as error:
            raise HostFailed(f"its address is not known ({error.strerror}): name it by its address") from error
        self._given += 1
        place = f"{address}.{self._given}-{self._mark}"
        command = self._command(address, part)
        worker = RemoteWorker(part.host, self._settings.ssh_command, command, self._logs / f"{place}.log")
        try:
            port = await worker.start(self._settings.start_timeout_s)
            mesh = attach_to_workers(
                name=f"host_{self._given}", ca="trust_all_connections", workers=[f"tcp://{bracketed(address)}:{port}"]
            )
        except BaseException:
            await worker.end()
            raise
        return RemoteAllocation(
            name=name, hosts=(part.host,), mesh=mesh, address=address, place=place, part=part, worker=worker
        )

    def _command(self, address: str, part: Place) -> list[str]:
        """What the host is to run, under Monarch's settings that hold here."""
        return [
            "exec",
            "env",
            *(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ),
            self._settings.python or sys.executable,
            "-m",
            "elastic_train.orchestrator.scheduler.host_worker",
            address,
            "--folder",
            os.getcwd(),
            *("--position", str(part.position)),
            *("--replicas", str(self._replicas_per_host)),
            *("--procs", str(self._procs)),
            *("--isolation", str(self._isolation_s)),
        ]

    async def _take(self) -> Place:
        async with self._returned:
            while (part := self._hosts.take(_now())) is None:
                await self._returned.wait()
            return part

    async def _give_back(self, part: Place, *, failed: bool) -> None:
        async with self._returned:
            self._hosts.give_back(part, failed=failed, now=_now())
            self._returned.notify_all()


def _now() -> float:
    return asyncio.get_running_loop().time()
