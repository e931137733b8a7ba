"""Sees how processes of this host end, also those of other parents.

Trainer processes are children of Monarch's host agent, so nobody here may wait for them. A pidfd tells at once that a
process has ended, and Linux 6.15 and later also how; on older kernels Monarch's supervision has to tell.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import time
from collections.abc import Collection

import psutil

# linux/pidfd.h: struct pidfd_info (first published size), PIDFD_GET_INFO and PIDFD_INFO_EXIT.
_INFO_BYTES = 64
_GET_INFO = 0xC000FF0B | _INFO_BYTES << 16
_WANTS_EXIT = 1 << 3
_EXIT_OFFSET = 60

_GONE_S = 10.0
"""How long the kernel may take to remove a process that was killed."""
_LOOK_S = 0.02

ProcessId = tuple[int, float]
"""Pid and creation time (unix seconds): together they name a process for good."""


def is_alive(process: ProcessId) -> bool:
    """Whether that very process runs; a zombie does not, and neither does another one with its pid."""
    pid, created = process
    try:
        found = psutil.Process(pid)
        return abs(found.create_time() - created) < 1.0 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_process(process: ProcessId) -> None:
    """SIGKILL for that very process, if it still runs."""
    if is_alive(process):
        try:
            os.kill(process[0], signal.SIGKILL)
        except ProcessLookupError:
            return


async def end_all(processes: Collection[ProcessId]) -> None:
    """Kill processes of this host and see them gone.

    Raises:
        RuntimeError: one survives SIGKILL.
    """
    for process in processes:
        kill_process(process)
    deadline = time.monotonic() + _GONE_S
    while any(is_alive(process) for process in processes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes survive SIGKILL: {processes}")
        await asyncio.sleep(_LOOK_S)


class ProcessWatch:
    """Watches one process from when it is known until ``close``."""

    def __init__(self, process: ProcessId) -> None:
        self.process = process
        try:
            self._descriptor = os.pidfd_open(process[0])
        except ProcessLookupError:
            self._descriptor = -1

    @property
    def ended(self) -> bool:
        return not is_alive(self.process)

    def status(self) -> int | None:
        """How the process ended, as ``os.waitpid`` gives it; None if it runs or the kernel does not tell."""
        if self._descriptor < 0:
            return None
        info = bytearray(_INFO_BYTES)
        struct.pack_into("=Q", info, 0, _WANTS_EXIT)
        try:
            fcntl.ioctl(self._descriptor, _GET_INFO, info)
        except OSError:
            return None
        told = struct.unpack_from("=Q", info, 0)[0] & _WANTS_EXIT
        return int(struct.unpack_from("=i", info, _EXIT_OFFSET)[0]) if told else None

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
