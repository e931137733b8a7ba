"""The Lighthouse of a world, in a process of its own, so that it can be killed and started again."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseServer

from elastic_train.orchestrator.held_port import HeldPort
from elastic_train.process_log import print_to
from scripts.sync_world.spec import HOST

_JOIN_TIMEOUT_MS = 60_000
_TICK_MS = 20
_PAUSE_S = 0.02
_START_S = 20.0


class Lighthouse:
    """Listens from when it is made; always at the same address."""

    def __init__(self, context: Any, log: Path, heartbeat_timeout_ms: int) -> None:
        self._context = context
        self._log = log
        self._heartbeat_timeout_ms = heartbeat_timeout_ms
        self._held = HeldPort(HOST, 0)
        self._port = self._held.number
        self._start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def kill_and_start(self) -> None:
        """What it knew is gone."""
        self._kill()
        self._start()

    def end(self) -> None:
        self._kill()
        self._held.close()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        self._process = self._context.Process(
            target=_serve, args=(self._port, self._log, self._heartbeat_timeout_ms), daemon=True
        )
        self._process.start()
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((HOST, self._port), timeout=1.0).close()
                return
            except OSError:
                if time.monotonic() > deadline or not self._process.is_alive():
                    raise
                time.sleep(_PAUSE_S)


def _serve(port: int, log: Path, heartbeat_timeout_ms: int) -> None:
    print_to(log)
    server = LighthouseServer(
        bind=f"{HOST}:{port}",
        min_replicas=1,
        join_timeout_ms=_JOIN_TIMEOUT_MS,
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    while server is not None:
        time.sleep(_JOIN_TIMEOUT_MS)
