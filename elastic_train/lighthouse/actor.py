"""Owns what replicas find each other by: torchft's Lighthouse, and the registry beside it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from monarch.actor import Actor, concurrent_endpoint

from elastic_train.config import LighthouseConfig
from elastic_train.lighthouse.native import load_native
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.peer_ckpt.roll import Roll
from elastic_train.peer_ckpt.tls import Tls
from elastic_train.process_log import print_to


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where to listen; 0: at any that is free."""

    lighthouse: int
    registry: int


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where replicas find what they find each other by."""

    lighthouse: str
    """``http://host:port``."""
    registry: str
    """``http://host:port``."""
    process: tuple[int, float]
    """Pid of the process that serves, and when it was made (unix seconds): together they name it for good."""


class LighthouseActor(Actor):
    """Both in a process of their own, so that nothing else can slow the Lighthouse's clock.

    Where ``lighthouse.address`` names a Lighthouse that somebody else runs, only the registry is started.
    """

    def __init__(self, config: LighthouseConfig, token: str, tls: Tls | None, log: Path) -> None:
        """
        Args:
            token: what a request to the registry must show.
            tls: how the registry is reached; None: in plain text.
        """
        print_to(log)
        self._config = config
        self._token = token
        self._tls = tls
        self._server: Any = None
        self._registry: RegistryServer | None = None

    @concurrent_endpoint
    async def start(self, ports: Ports, roll: Roll) -> Listening:
        """Listen.

        Args:
            roll: what the registry is to know from the beginning.

        Raises:
            OSError: the host is not one of this machine's.
            RuntimeError: the port is taken.
        """
        config = self._config
        self._registry = RegistryServer(config.host, ports.registry, self._token, tls=self._tls, roll=roll)
        lighthouse = config.address or self._start_lighthouse(ports.lighthouse)
        process = (os.getpid(), psutil.Process().create_time())
        return Listening(lighthouse=lighthouse, registry=self._registry.url, process=process)

    @concurrent_endpoint
    async def serve(self) -> None:
        """Never returns; a caller that waits for it learns when this process is gone."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def shut_down(self) -> None:
        """Stop listening."""
        if self._registry is not None:
            self._registry.close()
        if self._server is not None:
            self._server.shutdown()

    def _start_lighthouse(self, port: int) -> str:
        config = self._config
        self._server = load_native().LighthouseServer(
            bind=f"{config.host}:{port}",
            min_replicas=config.min_replicas,
            join_timeout_ms=config.join_timeout_ms,
            quorum_tick_ms=config.quorum_tick_ms,
            heartbeat_timeout_ms=config.heartbeat_timeout_ms,
        )
        return f"http://{config.host}:{self._server.address().rpartition(':')[2]}"
