"""One process of a world: one rank of a replica, with the engine, from its start to the end of the run."""

from __future__ import annotations

import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torchft.coordination import LighthouseClient
from torchft.manager import REPLICA_ID_KEY, Manager
from torchft.process_group import ProcessGroup, ProcessGroupGloo

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.elastic import ElasticEngine
from elastic_train.diloco.engine import ForeignReplica, Sync, SyncKind, Trained
from elastic_train.diloco.flat import flatten
from elastic_train.diloco.fragments import split
from elastic_train.diloco.peers import Transfers
from elastic_train.diloco.presence import Identity
from elastic_train.diloco.quorum import QuorumSeat
from elastic_train.events import LineFile
from elastic_train.process_log import print_to
from scripts.sync_world.board import Board, Stage
from scripts.sync_world.model import build
from scripts.sync_world.spec import HOST, Place, WorldSpec
from scripts.sync_world.trainee import Diary, WorldJournal, WorldTrainee

DONE, FAILED, REFUSED = 0, 1, 3

_CPU = torch.device("cpu")
_TRANSFER_TIMEOUT_S = 10.0
_LOCAL_TIMEOUT_S = 30.0
_FOREVER_S = 3600.0
_RETRIES = 36000


def events_of(folder: Path, slot: int) -> Path:
    """Where a replica writes what happens to it."""
    return folder / f"replica_{slot}.jsonl"


def state_of(folder: Path, slot: int, rank: int) -> Path:
    """Where a rank writes its outer state at the end: ``<fragment>.anchor`` and ``<fragment>.momentum``."""
    return folder / f"replica_{slot}.{rank}.npz"


def run_rank(spec: WorldSpec, place: Place, board: Board, folder: Path) -> None:
    """Live one life. Never returns: the process ends with DONE, FAILED or REFUSED."""
    print_to(folder / f"replica_{place.slot}.{place.rank}.log")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    diary = Diary(LineFile(events_of(folder, place.slot)), place)
    try:
        WorldRank(spec, place, board, diary).live(folder)
        code = DONE
    except ForeignReplica as error:
        diary.tell_for_rank("refused", error=str(error))
        code = REFUSED
    except Exception as error:
        traceback.print_exc()
        diary.tell_for_rank("rank_failed", error=f"{type(error).__name__}: {error}")
        code = FAILED
    # A request that is still pending would hold the process.
    os._exit(code)


class WorldRank:
    """A rank and its engine."""

    def __init__(self, spec: WorldSpec, place: Place, board: Board, diary: Diary) -> None:
        self._spec = spec
        self._place = place
        self._board = board
        self._diary = diary
        self._store = self._make_store()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("replica", self._store),
            rank=place.rank,
            world_size=spec.ranks,
            timeout=timedelta(seconds=_LOCAL_TIMEOUT_S),
        )
        control = ControlGroup(_LOCAL_TIMEOUT_S)
        model = build(spec.width, spec.ranks)
        self._group = ProcessGroupGloo(timeout=timedelta(seconds=spec.diloco.timeout_s))
        self._trainee = trainee = WorldTrainee(spec, place, model, control, board, diary)
        self._fragments = flatten(split([model], spec.diloco.fragments), device=_CPU, pin_memory=False)
        trainee.faults.abort_groups = self._group.abort
        trainee.faults.poison = trainee.poison
        trainee.faults.flip_bit = lambda: trainee.flip_bit_of(self._fragments[0])
        self._engine = ElasticEngine(
            Identity(
                slot=place.slot,
                incarnation=place.incarnation,
                host=HOST,
                registry=place.registry,
                token=place.token,
                config_digest=int(place.slot in spec.foreign),
                transfers=Transfers(timeout_s=_TRANSFER_TIMEOUT_S),
                channel_device=_CPU if spec.channels else None,
                watchdog_s=15.0,
            ),
            config=spec.diloco,
            schedule=spec.schedule,
            fragments=self._fragments,
            control=control,
            group=self._group,
            wire_device=_CPU,
            make_seat=lambda: make_seat(spec, place, self._store, self._group),
            trainee=trainee,
            journal=WorldJournal(diary, trainee),
        )

    def live(self, folder: Path) -> None:
        """Train to the end of the run, and serve the others until they have."""
        spec, place, board, engine = self._spec, self._place, self._board, self._engine
        here = place.slot, place.rank
        if place.joining:
            self._take_in(engine.join())
        else:
            engine.open_membership()
            board.enter(*here, Stage.READY)
            board.wait_for_release()
            engine.enter()
        board.enter(*here, Stage.TRAINING)
        while engine.outer_step < spec.schedule.outer_steps:
            while not engine.due:
                self._step()
            self._take_in(engine.sync())
        board.wait_for_peers(*here)
        self._write_state(state_of(folder, *here))
        self._diary.tell(
            "replica_finished",
            outer_step=engine.outer_step,
            tokens=engine.tokens,
            positions=self._trainee.positions.committed.tolist(),
        )
        board.enter(*here, Stage.FINISHED)
        board.wait_for_the_end()
        engine.close()

    def _step(self) -> None:
        spec, slot = self._spec, self._place.slot
        began = time.monotonic()
        self._trainee.alive()
        self._trainee.at_point("step")
        self._trainee.compute()
        self._engine.before_optimizer()
        self._trainee.optimize()
        time.sleep(max(0.0, spec.step_s[slot] - (time.monotonic() - began)))
        self._engine.step_ended(Trained(tokens=spec.tokens[slot], seconds=time.monotonic() - began))

    def _take_in(self, sync: Sync) -> None:
        trainee, engine = self._trainee, self._engine
        trainee.outer_step = sync.outer_step
        anchor_hash = engine.anchor_hash(lambda value: [value])
        if sync.kind is SyncKind.COMMITTED:
            assert sync.progress is not None
            trainee.positions.commit(sync.progress)
            self._diary.tell(
                "sync_committed",
                outer_step=sync.outer_step,
                steps=trainee.steps,
                participants=sync.participants,
                tokens=sync.tokens,
                anchor_hash=anchor_hash,
                bytes=sync.bytes,
                wait_s=round(sync.wait_s, 4),
                reduce_s=round(sync.reduce_s, 4),
            )
        else:
            self._diary.tell("state_taken", outer_step=sync.outer_step, kind=sync.kind.value, anchor_hash=anchor_hash)
        engine.settled()
        self._board.at(self._place.slot, self._place.rank, sync.outer_step)

    def _make_store(self) -> dist.TCPStore:
        """The replica's own, new in every incarnation."""
        place, timeout = self._place, timedelta(seconds=_LOCAL_TIMEOUT_S)
        if place.rank == 0:
            store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            self._board.tell_port(place.slot, store.port)
            return store
        return dist.TCPStore(
            HOST, self._board.port(place.slot), is_master=False, wait_for_workers=False, timeout=timeout
        )

    def _write_state(self, path: Path) -> None:
        arrays = {}
        for number, fragment in enumerate(self._fragments):
            arrays[f"{number}.anchor"] = fragment.committed.anchor.numpy()
            arrays[f"{number}.momentum"] = fragment.committed.momentum.numpy()
        np.savez(path, **arrays)  # type: ignore[arg-type]


def make_seat(spec: WorldSpec, place: Place, store: dist.TCPStore, group: ProcessGroup) -> QuorumSeat:
    """A Manager that never heals anybody; from here on the replica heartbeats."""
    connect = timedelta(seconds=spec.diloco.connect_timeout_s)
    manager = Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=True,
        timeout=timedelta(seconds=_LOCAL_TIMEOUT_S),
        quorum_timeout=timedelta(seconds=_FOREVER_S),
        connect_timeout=connect,
        rank=place.rank,
        world_size=spec.ranks,
        store_addr=store.host,
        store_port=store.port,
        lighthouse_addr=place.lighthouse,
        replica_id=f"replica_{place.slot}",
        hostname=HOST,
        port=0,
        init_sync=False,
        quorum_retries=_RETRIES,
    )
    if place.rank == 0:
        # Before the release, so that nobody's first quorum forms without this replica.
        client = LighthouseClient(place.lighthouse, connect_timeout=connect)
        client.heartbeat(store.get(REPLICA_ID_KEY).decode(), connect)
    return QuorumSeat(manager)
