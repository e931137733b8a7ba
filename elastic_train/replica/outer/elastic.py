"""The trainer's side of the elastic engine: what it takes from the trainer, and what it puts in place there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastic_train.config import digest
from elastic_train.diloco.elastic import ElasticEngine
from elastic_train.diloco.flat import FlatFragment, flatten
from elastic_train.diloco.fragments import split
from elastic_train.diloco.peers import Transfers
from elastic_train.diloco.presence import Identity
from elastic_train.diloco.quorum import QuorumSeat
from elastic_train.peer_ckpt.outage import Outage
from elastic_train.peer_ckpt.remains import Remains
from elastic_train.peer_ckpt.shared_memory import open_memory
from elastic_train.peer_ckpt.snapshot import Snapshot
from elastic_train.peer_ckpt.tls import tls_of
from elastic_train.replica.data.position import PositionTable
from elastic_train.replica.durable.content import OuterContent
from elastic_train.replica.durable.outer import into_flat
from elastic_train.replica.membership import Seat, introduce, make_manager, wire_device
from elastic_train.replica.state import counters, load_counters, load_moments, moments
from elastic_train.replica.titan import fixes
from elastic_train.replica.watch.beacon import Phase

if TYPE_CHECKING:
    from torchft.process_group import ProcessGroup

    from elastic_train.replica.trainer import ElasticTrainer

logger = logging.getLogger(__name__)


class ElasticTrainee:
    """A rank's trainer as the engine sees it (``diloco.trainee.Trainee``)."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer
        self._thread = threading.current_thread()

    def at_point(self, point: str) -> None:
        self._trainer.at_point(point)

    def alive(self) -> None:
        if threading.current_thread() is self._thread:
            trainer = self._trainer
            trainer.beacon.moved(Phase.SYNC if trainer.has_state else Phase.BUILD)

    def waiting(self) -> None:
        self._trainer.beacon.moved(Phase.QUORUM)
        self._trainer.leave_if_told()

    def progress(self) -> torch.Tensor:
        return self._trainer.progress()

    def moments(self) -> Mapping[str, torch.Tensor]:
        return moments(self._trainer)

    def counters(self) -> dict[str, Any]:
        return counters(self._trainer)

    def take(self, snapshot: Snapshot) -> None:
        load_moments(self._trainer, snapshot.sections["inner"])
        load_counters(self._trainer, snapshot.header["extra"])
        self._trainer.dataloader.retire(snapshot.header["retired"])

    def follow(self, snapshot: Snapshot, *, included: bool) -> None:
        # Of its own shards the peers have committed nothing but what this replica gave them, so its own reading goes
        # on where it is.
        self._trainer.dataloader.commit(PositionTable.from_list(snapshot.header["extra"]["positions"]))
        self._trainer.dataloader.retire(snapshot.header["retired"])


def make_elastic_engine(trainer: ElasticTrainer, group: ProcessGroup, store: dist.TCPStore) -> ElasticEngine:
    """The engine of ``diloco.engine = "elastic"``; it becomes a member by ``open_membership``."""
    incarnation, config = trainer.incarnation, trainer.run_config
    anchor_device = trainer.device if config.diloco.anchor_device == "device" else torch.device("cpu")
    # First, because what is of no use in it makes room for what comes.
    remains = Remains(incarnation.remains[trainer.rank]) if incarnation.remains else None
    memory = open_memory(incarnation.memory[trainer.rank], pin=fixes.DEVICE.pins_memory) if incarnation.memory else None
    fragments = flatten(
        split(trainer.model_parts, config.diloco.fragments),
        device=anchor_device,
        pin_memory=fixes.DEVICE.pins_memory,
        allocate=memory.allocate if memory is not None else None,
    )
    if trainer.restored is not None:
        _fill(fragments, trainer, trainer.restored)
    wires_at = wire_device(config.diloco.backend, fixes.DEVICE, trainer.device)

    trainee = ElasticTrainee(trainer)

    def make_seat() -> QuorumSeat:
        seat = Seat.of(incarnation, rank=trainer.rank, ranks=trainer.control.ranks)
        _await_lighthouse(trainer, trainee, seat)
        return QuorumSeat(
            make_manager(
                seat,
                config=config.diloco,
                min_replicas=config.lighthouse.min_replicas,
                store=store,
                group=group,
            )
        )

    return ElasticEngine(
        Identity(
            slot=incarnation.slot,
            incarnation=incarnation.number,
            host=incarnation.host,
            registry=incarnation.registry,
            token=incarnation.token,
            config_digest=int(digest(config)[:15], 16),
            transfers=Transfers(
                timeout_s=config.peer_ckpt.timeout_s,
                idle_s=config.peer_ckpt.idle_timeout_s,
                donors=config.peer_ckpt.donors,
                streams=config.peer_ckpt.streams,
            ),
            snapshots=config.peer_ckpt.snapshots,
            channel_device=wires_at if config.peer_ckpt.transport == "process_group" else None,
            tls=tls_of(config.peer_ckpt),
            watchdog_s=config.recovery.hang_timeout_s + config.recovery.silence_timeout_s,
        ),
        config=config.diloco,
        schedule=trainer.schedule,
        fragments=fragments,
        control=trainer.control,
        group=group,
        wire_device=wires_at,
        make_seat=make_seat,
        trainee=trainee,
        journal=trainer.journal,
        memory=memory,
        remains=remains,
    )


def _await_lighthouse(trainer: ElasticTrainer, trainee: ElasticTrainee, seat: Seat) -> None:
    """Returns when the Lighthouse has heard of this replica: it may be away for a while, and no Manager can be made
    without it."""
    diloco = trainer.run_config.diloco
    end, outage = time.monotonic() + diloco.quorum_timeout_s, Outage("the Lighthouse", logger)
    while True:
        heard = trainer.rank == 0 and introduce(seat, diloco)
        if trainer.control.word([int(heard)]).heard()[0]:
            outage.is_over()
            return
        outage.goes_on(seat.lighthouse)
        trainee.alive()
        if trainer.control.any(time.monotonic() > end):
            raise TimeoutError("the Lighthouse did not answer within diloco.quorum_timeout_s")


def _fill(fragments: Sequence[FlatFragment], trainer: ElasticTrainer, outer: OuterContent) -> None:
    """Let new fragments hold the outer state of a durable snapshot. Before the engine hashes what they hold."""
    parts = trainer.model_parts
    into_flat(parts, len(fragments), outer.momentum, {str(i): f.committed.momentum for i, f in enumerate(fragments)})
    if outer.anchor is not None:
        into_flat(parts, len(fragments), outer.anchor, {str(i): f.committed.anchor for i, f in enumerate(fragments)})
        for fragment in fragments:
            # What the parameters held beyond the anchor is read again: the positions in the data do not count it.
            fragment.write_parameters()
