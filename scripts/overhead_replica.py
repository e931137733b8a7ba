"""A replica that trains the same way under no coordination, under our own outer sync and under stock DiLoCo.

One process on one core holds the trainer and both engines, so that whatever differs between two stretches of inner
steps is what happens at their end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.config import RunConfig
from elastic_train.process_log import print_to

if TYPE_CHECKING:
    import torch

    from elastic_train.diloco.engine import OuterSync
    from elastic_train.diloco.schedule import OuterSchedule
    from elastic_train.replica.trainer import ElasticTrainer

PLAIN, ELASTIC, STOCK = "plain", "elastic", "stock"
_HOST = "127.0.0.1"
_ANSWER_S = 600.0


class Places:
    """The services that the replicas meet at: a Lighthouse for each engine, and a registry."""

    def __init__(self) -> None:
        import secrets

        from torchft.coordination import LighthouseServer

        from elastic_train.lighthouse.registry import RegistryServer

        self.token = secrets.token_hex(16)
        self._registry = RegistryServer(_HOST, 0, self.token)
        self._lighthouses = [
            LighthouseServer(
                bind=f"{_HOST}:0",
                min_replicas=1,
                join_timeout_ms=120_000,
                quorum_tick_ms=50,
                heartbeat_timeout_ms=5000,
            )
            for _ in range(2)
        ]
        self.registry = self._registry.url
        self.lighthouses = tuple(f"http://{_HOST}:{s.address().rsplit(':', 1)[1]}" for s in self._lighthouses)

    def close(self) -> None:
        self._registry.close()
        for server in self._lighthouses:
            server.shutdown()


class Replica:
    """The benchmark's end of a replica."""

    def __init__(self, slot: int, core: int, config: RunConfig, folder: Path, places: Places) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        where = (places.registry, places.token, places.lighthouses)
        self._process = context.Process(target=_serve, args=(theirs, slot, core, config, folder, where), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, *order: Any) -> None:
        self._connection.send(order)

    def answer(self) -> Any:
        """What it says to the last order.

        Raises:
            RuntimeError: it is gone, or says nothing for long; its output tells why.
        """
        try:
            if self._connection.poll(_ANSWER_S):
                return self._connection.recv()
        except EOFError:
            pass
        raise RuntimeError(f"replica process {self._process.pid} gives no answer")

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


@contextlib.contextmanager
def replicas(count: int, config: RunConfig, folder: Path, places: Places) -> Iterator[list[Replica]]:
    """Replicas that are built and members of both quorums, each on a core of its own; ended whatever comes."""
    cores = sorted(os.sched_getaffinity(0))
    started = [Replica(slot, cores[slot % len(cores)], config, folder, places) for slot in range(count)]
    try:
        for replica in started:
            replica.answer()
        for replica in started:
            replica.send("enter")
        for replica in started:
            replica.answer()
        yield started
    finally:
        for replica in started:
            replica.end()


def _serve(
    connection: Connection, slot: int, core: int, config: RunConfig, folder: Path, where: tuple[Any, ...]
) -> None:
    os.sched_setaffinity(0, {core})
    os.environ.update(
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR=_HOST
    )
    print_to(folder / f"replica_{slot}.log")
    from elastic_train.replica.meeting import expect_store, open_store

    meeting = open_store(_HOST)
    expect_store()
    os.environ["MASTER_PORT"] = str(meeting.port)
    stage = _Stage(slot, config, folder, *where)
    connection.send("built")
    while True:
        order, *arguments = connection.recv()
        if order == "enter":
            stage.enter()
            connection.send("entered")
        else:
            connection.send(stage.stretch(*arguments))


class _Stage:
    """The replica's end: one trainer, whose engine is exchanged."""

    def __init__(
        self, slot: int, config: RunConfig, folder: Path, registry: str, token: str, lighthouses: tuple[str, str]
    ) -> None:
        import torch
        import torch.distributed as dist

        from elastic_train.clock import SystemClock
        from elastic_train.events import EventWriter, LineFile
        from elastic_train.replica.faults import FaultPlan
        from elastic_train.replica.membership import make_group
        from elastic_train.replica.notice import Notice
        from elastic_train.replica.outer.stock import make_stock_engine
        from elastic_train.replica.rank import Incarnation, SegmentPaths, beacon_path
        from elastic_train.replica.titan import fixes
        from elastic_train.replica.trainer import ElasticTrainer
        from elastic_train.replica.watch.beacon import Beacon

        torch.set_num_threads(1)
        incarnation = Incarnation(
            config=config,
            run_dir=folder,
            slot=slot,
            number=0,
            joining=False,
            lighthouse=lighthouses[0],
            host=_HOST,
            fired=frozenset(),
            registry=registry,
            token=token,
        )
        paths = SegmentPaths.of(folder, slot)
        self._trainer: ElasticTrainer = ElasticTrainer(
            incarnation,
            events=EventWriter(paths.events, SystemClock(), replica=slot),
            metrics=LineFile(paths.metrics),
            beacon=Beacon(beacon_path(folder, slot, 0, 0)),
            faults=FaultPlan((), replica=slot, rank=0, announce=lambda spec: None, supervisor_pid=0),
            notice=Notice(),
        )
        ours = self._trainer.engine
        self._trainer.incarnation = replace(incarnation, lighthouse=lighthouses[1])
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        group = make_group("gloo", fixes.DEVICE, config.diloco.timeout_s)
        stock = make_stock_engine(self._trainer, group, self._store)
        self._engines: dict[str, OuterSync] = {ELASTIC: ours, STOCK: stock, PLAIN: _alone(self._trainer.schedule)}
        self._batches = self._trainer.batch_generator(self._trainer.dataloader)

    def enter(self) -> None:
        for arm in (ELASTIC, STOCK):
            self._engines[arm].enter()

    def stretch(self, arm: str) -> tuple[float, float]:
        """Train one interval and what ends it; seconds of it all, and of what came after the last inner step, without
        the wait for the slower replica."""
        trainer, engine = self._trainer, self._engines[arm]
        trainer.engine = engine
        began = time.monotonic()
        while not engine.due:
            trainer.inner_step(self._batches)
        trained = time.monotonic()
        sync = engine.sync()
        if arm != PLAIN:
            if not sync.committed:
                raise RuntimeError(f"a sync of {arm} ended otherwise: {sync}")
            trainer.settle(sync)
            # The copy of the moments would go on beside the first step of the next stretch.
            engine.before_optimizer()
        return time.monotonic() - began, time.monotonic() - trained - sync.wait_s


def _alone(schedule: OuterSchedule) -> OuterSync:
    """An engine that ends its intervals as the others do, and syncs with nobody."""
    from elastic_train.diloco.engine import OuterSync, Sync, SyncKind, Trained
    from elastic_train.diloco.interval import Interval

    class Alone(OuterSync):
        interval = Interval(schedule)

        @property
        def outer_step(self) -> int:
            return self.interval.outer_step

        @property
        def next_step(self) -> int:
            return self.interval.next_step

        @property
        def due(self) -> bool:
            return self.interval.full

        def open_membership(self) -> None:
            return

        def enter(self) -> None:
            return

        def join(self) -> Sync:
            raise AssertionError("there is nobody to join")

        def step_ended(self, trained: Trained) -> None:
            self.interval.add(trained)

        def sync(self) -> Sync:
            self.interval.begin(self.outer_step + 1)
            return Sync(kind=SyncKind.COMMITTED, outer_step=self.outer_step)

        def settled(self) -> None:
            return

        def anchor_hash(self, gather: Callable[[int], list[int]]) -> str:
            return ""

        def anchor(self) -> dict[str, torch.Tensor]:
            return {}

        def momentum(self) -> dict[str, torch.Tensor]:
            return {}

        def close(self) -> None:
            return

    return Alone()
