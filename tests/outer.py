"""Replicas of one rank with a real membership, for tests of the outer sync."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft.coordination import LighthouseServer

from elastic_train.config import DilocoConfig
from elastic_train.device import Device
from elastic_train.diloco.engine import COLD_START_STEP
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.diloco.torchft_engine import SyncHooks, TorchftEngine
from elastic_train.peer_ckpt.http import MeteredHTTPTransport
from elastic_train.replica.membership import Healing, Quorum, ReplicaManager, Seat, make_group, make_stock_manager

HOST = "127.0.0.1"
OUTER = DilocoConfig(sync_every=2, outer_lr=0.7, outer_momentum=0.9, timeout_s=5.0, quorum_timeout_s=60.0)
STEPS = 1000
"""Of the whole run: more than any test trains."""
NOTHING_READ = SyncHooks(
    at_point=lambda point: None, progress=lambda: torch.zeros(1, 4, dtype=torch.int64), on_state=lambda: None
)


@contextlib.contextmanager
def lighthouse(*, min_replicas: int = 1, heartbeat_timeout_ms: int = 1000) -> Iterator[str]:
    """A Lighthouse in this process; gives its address."""
    server = LighthouseServer(
        bind=f"{HOST}:0",
        min_replicas=min_replicas,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    try:
        yield f"http://{HOST}:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One replica, as its only rank holds it."""

    manager: ReplicaManager
    engine: TorchftEngine
    transport: MeteredHTTPTransport


@contextlib.contextmanager
def member(
    address: str,
    fragments: Sequence[nn.Module],
    inner: torch.optim.Optimizer,
    *,
    slot: int = 0,
    config: DilocoConfig = OUTER,
    first_step: int = COLD_START_STEP,
    export_state: Callable[[], dict[str, object]] = dict,
    load_state: Callable[[dict[str, object]], None] = lambda state: None,
    hooks: SyncHooks = NOTHING_READ,
    on_quorum: Callable[[Quorum], None] = lambda quorum: None,
) -> Iterator[Member]:
    """A member of the quorum at ``address``, until the end of the context."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    transport = MeteredHTTPTransport(timeout_s=20.0, chunks=0, advertise_host=HOST, on_receive=lambda: None)
    manager = make_stock_manager(
        Seat(slot=slot, rank=0, ranks=1, lighthouse=address, host=HOST),
        config=config,
        min_replicas=1,
        store=store,
        group=make_group("gloo", Device("cpu"), config.timeout_s),
        healing=Healing(
            transport=transport,
            transfer_timeout_s=20.0,
            export_state=export_state,
            load_state=load_state,
            first_step=first_step,
        ),
        hook=hooks.at_point,
        on_quorum=on_quorum,
    )
    schedule = OuterSchedule(steps=STEPS, sync_every=config.sync_every, fragments=config.fragments)
    try:
        engine = TorchftEngine(manager, fragments, inner, config, schedule, pin_memory=False, hooks=hooks)
        yield Member(manager=manager, engine=engine, transport=transport)
    finally:
        manager.shutdown(wait=False)
