"""Owns torchft's Lighthouse, the service in which replicas find each other."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from elastic_train.config import LighthouseConfig
from elastic_train.process_log import print_to


class LighthouseActor(Actor):
    """One Lighthouse in a process of its own, so that nothing else can slow its clock."""

    def __init__(self, config: LighthouseConfig, log: Path) -> None:
        print_to(log)
        self._config = config
        self._server: Any = None

    @concurrent_endpoint
    async def start(self) -> tuple[str, int]:
        """Listen, and return the address, ``http://host:port``, and the pid of this process.

        Raises:
            RuntimeError: the port is taken.
        """
        from torchft.coordination import LighthouseServer

        config = self._config
        self._server = LighthouseServer(
            bind=f"{config.host}:{config.port}",
            min_replicas=config.min_replicas,
            join_timeout_ms=config.join_timeout_ms,
            quorum_tick_ms=config.quorum_tick_ms,
            heartbeat_timeout_ms=config.heartbeat_timeout_ms,
        )
        port = self._server.address().rsplit(":", 1)[1]
        return f"http://{config.host}:{port}", os.getpid()

    @concurrent_endpoint
    async def serve(self) -> None:
        """Never returns; a caller that waits for it learns when this process is gone."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def shut_down(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
