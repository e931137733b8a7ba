"""The first wire: torchft's HTTP transport, metered.

torchft pickles what it sends and neither authenticates nor encrypts: use it on a network that you trust.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft.checkpointing import HTTPTransport

from elastic_train.peer_ckpt.shards import tensor_bytes


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One state received from a donor."""

    bytes: int
    """Bytes of tensors."""
    duration_s: float


class MeteredHTTPTransport(HTTPTransport):
    """torchft's HTTPTransport that says when it receives, how much, and under which name it can be reached."""

    def __init__(self, *, timeout_s: float, chunks: int, advertise_host: str, on_receive: Callable[[], None]) -> None:
        """
        Args:
            chunks: parts that are fetched in parallel; 0 sends the state in one piece.
            advertise_host: name or address under which peers connect.
            on_receive: called when a transfer to this rank begins.
        """
        self._advertise_host = advertise_host
        self._on_receive = on_receive
        self.received: Transfer | None = None
        super().__init__(timedelta(seconds=timeout_s), chunks)

    def address(self) -> str:
        port = self._server.socket.getsockname()[1]
        return f"http://{self._advertise_host}:{port}/checkpoint/"

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        self._on_receive()
        began = time.monotonic()
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        self.received = Transfer(bytes=tensor_bytes(state), duration_s=time.monotonic() - began)
        return state
