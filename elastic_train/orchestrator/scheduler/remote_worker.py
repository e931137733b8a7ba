"""The controller's end of a host's worker: one remote shell, whose input keeps the worker alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_train.orchestrator.scheduler.host_worker import ENDED, LISTENING, STRIKE

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
"""From one line of input to the next, which say that the controller is there."""
_END_S = 10.0
"""How long a host may take to end what runs there."""
_LAST_WORDS = 400
"""Bytes of what a remote shell has printed that may explain its end."""


class HostFailed(Exception):
    """A host does not start its worker; the text says why."""


class RemoteWorker:
    """One worker, from the start of its remote shell on."""

    def __init__(self, host: str, shell: str, command: Sequence[str], log: Path) -> None:
        """
        Args:
            shell: words of the remote shell, as a shell here splits them.
            command: what is to run on the host.
            log: gets what the host prints.
        """
        self._host = host
        self._words = [*shlex.split(shell), host, shlex.join(command)]
        self._log = log
        self._shell: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self.has_ended = False
        """Whether the host has said that nothing is left on it."""

    async def start(self, timeout_s: float) -> int:
        """Start it; the port at which it listens.

        Raises:
            HostFailed: it does not start.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log.open("ab") as log:
                began = log.tell()
                self._shell = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    # Ctrl-C is meant for the controller.
                    start_new_session=True,
                )
        except OSError as error:
            raise HostFailed(f"the remote shell {self._words[0]} cannot be started ({error.strerror})") from error
        self._tasks = [asyncio.ensure_future(task) for task in (self._read(self._shell), self._beat(self._shell))]
        over = asyncio.ensure_future(self._over.wait())
        ends: set[asyncio.Future[Any]] = {self._port, over}
        try:
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if self._port.done():
            return self._port.result()
        if self._over.is_set():
            raise HostFailed(f"{await self.lost()}{self._last_words(began)}")
        raise HostFailed(f"it did not start a worker within scheduler.start_timeout_s = {timeout_s:g} s")

    async def lost(self) -> str:
        """Returns when the remote shell has ended, and how."""
        assert self._shell is not None
        await self._over.wait()
        code = await self._shell.wait()
        return f"its remote shell ended by signal {-code}" if code < 0 else f"its remote shell ended with code {code}"

    async def end(self) -> bool:
        """End everything on the host; whether the host has said that it is done."""
        shell = self._shell
        if shell is None:
            return True
        assert shell.stdin is not None
        for task in self._tasks[1:]:
            task.cancel()
        shell.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), _END_S)
        # With whatever it has started here: a remote shell may be a script.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        await shell.wait()
        for task in self._tasks:
            task.cancel()
        return self.has_ended

    def strike(self) -> None:
        """Let the host end everything at once, and say nothing."""
        assert self._shell is not None
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{STRIKE}\n".encode())

    async def _beat(self, shell: asyncio.subprocess.Process) -> None:
        assert shell.stdin is not None
        while not shell.stdin.is_closing():
            shell.stdin.write(b"\n")
            await asyncio.sleep(_BEAT_S)

    async def _read(self, shell: asyncio.subprocess.Process) -> None:
        assert shell.stdout is not None
        try:
            async for line in shell.stdout:
                match line.decode(errors="replace").split():
                    case [word, port] if word == LISTENING and port.isdecimal() and not self._port.done():
                        self._port.set_result(int(port))
                    case [word] if word == ENDED:
                        self.has_ended = True
                    case _:
                        logger.info("%s says: %r", self._host, line)
        except ValueError:
            logger.exception("%s says what is no line", self._host)
        finally:
            self._over.set()

    def _last_words(self, began: int) -> str:
        with self._log.open("rb") as log:
            log.seek(max(began, os.fstat(log.fileno()).st_size - _LAST_WORDS))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
