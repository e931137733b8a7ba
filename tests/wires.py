"""The members of a quorum as threads of one process, for tests of what they exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupGloo

from elastic_train.diloco.wire import Wire

HOST = "127.0.0.1"
TIMEOUT_S = 20.0
CPU = torch.device("cpu")

T = TypeVar("T")


class Members:
    """The wires of all members, in rank order."""

    def __init__(self, wires: list[Wire], pool: ThreadPoolExecutor) -> None:
        self.wires = wires
        self._pool = pool

    @property
    def world(self) -> int:
        return len(self.wires)

    def each(self, act: Callable[[int], T]) -> list[T]:
        """Have all members act at the same time, each with its rank; their results, or the first failure."""
        return [done.result() for done in [self._pool.submit(act, rank) for rank in range(self.world)]]


@contextlib.contextmanager
def members(world: int, *, timeout_s: float = TIMEOUT_S) -> Iterator[Members]:
    """``world`` connected members, until the end of the context."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world) as pool:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
        groups = [ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)) for _ in range(world)]
        wires = [Wire(group, CPU, timeout_s) for group in groups]
        joined = Members(wires, pool)

        def connect(rank: int) -> None:
            groups[rank].configure(f"{HOST}:{store.port}/members", str(rank), rank, world)
            wires[rank].set_members(rank, world)

        try:
            joined.each(connect)
            yield joined
        finally:
            for wire in wires:
                wire.abort()
