"""The actors in a trainer process: one that trains, one that answers while the other is busy, one that imports ahead.

Messages to an actor wait for its running endpoint, so what must reach a busy process goes to the second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import psutil
from monarch.actor import Actor, concurrent_endpoint, current_rank, endpoint

from elastic_train.clock import SystemClock
from elastic_train.config.environment import VARIABLES
from elastic_train.config.faults import FaultSpec
from elastic_train.events import EventWriter, LineFile
from elastic_train.process_log import print_to
from elastic_train.replica import faults, notice
from elastic_train.replica.background import behind_others
from elastic_train.replica.ending import Ending
from elastic_train.replica.rank import Incarnation, SegmentPaths, beacon_path, rank_log_path, stack_answer_path
from elastic_train.replica.watch.beacon import Beacon
from elastic_train.replica.watch.process_watch import ProcessId
from elastic_train.replica.watch.stacks import answer_in

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from elastic_train.replica.trainer import ElasticTrainer

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class TrainerActor(Actor):
    """Owns one rank. What ends it is reported to the ReplicaActor before the exception leaves the process."""

    def __init__(self, incarnation: Incarnation, supervisor: Any) -> None:
        self._incarnation = incarnation
        self._supervisor = supervisor
        self._rank = current_rank().rank
        self._store: TCPStore | None = None
        self._trainer: ElasticTrainer | None = None

    @endpoint
    def prepare(self) -> int:
        """Everything that needs no other rank. Rank 0 returns the port of the store by which the ranks meet."""
        with self._reporting():
            return self._prepare()

    @endpoint
    def build(self) -> None:
        """Everything that needs no other replica: model, data, groups inside the replica."""
        with self._reporting():
            self._build()

    @endpoint
    def train(self) -> Ending:
        """Train to the end of the run, or until the replica is to leave."""
        with self._reporting():
            assert self._trainer is not None, "build comes first"
            notice.here().heed(True)
            try:
                return self._trainer.run()
            finally:
                notice.here().heed(False)

    @endpoint
    def save(self, whole: bool) -> None:
        """Write the state, the whole of it or the parameters alone."""
        with self._reporting():
            assert self._trainer is not None, "build comes first"
            self._trainer.save(whole=whole, wait=True)

    @endpoint
    def close(self) -> None:
        """Leave the quorum and close what is open."""
        if self._trainer is not None:
            self._trainer.close()

    def _prepare(self) -> int:
        incarnation, rank = self._incarnation, self._rank
        print_to(rank_log_path(incarnation.run_dir, incarnation.slot, rank))
        answer_in(stack_answer_path(incarnation.run_dir, incarnation.slot, incarnation.number, rank))
        for name in VARIABLES:
            # torchft prefers them to its arguments; the controller has already put them into the config.
            os.environ.pop(name, None)
        # With it torchft's DiLoCo reduces in buckets, which leave out any tensor that is larger than one.
        os.environ.pop("TORCHFT_USE_BUCKETIZATION", None)

        import elastic_train.replica.trainer  # noqa: F401
        from elastic_train.replica.meeting import expect_store, open_store

        expect_store()
        if rank != 0:
            return 0
        self._store = open_store(incarnation.host)
        return int(self._store.port)

    def _build(self) -> None:
        incarnation, rank = self._incarnation, self._rank
        paths = SegmentPaths.of(incarnation.run_dir, incarnation.slot, incarnation.place)
        events = EventWriter(
            paths.events, SystemClock(), replica=incarnation.slot, incarnation=incarnation.number, rank=rank
        )
        beacon = Beacon(beacon_path(incarnation.run_dir, incarnation.slot, incarnation.number, rank))
        plan = faults.FaultPlan(
            (spec for spec in map(FaultSpec.parse, incarnation.config.faults.at) if str(spec) not in incarnation.fired),
            replica=incarnation.slot,
            rank=rank,
            announce=lambda spec: events.emit("fault_injected", kind=spec.kind, point=spec.point, spec=str(spec)),
            supervisor_pid=incarnation.supervisor_pid,
        )
        faults.install(plan)

        from elastic_train.replica.trainer import ElasticTrainer

        self._trainer = ElasticTrainer(
            incarnation,
            events=events,
            metrics=LineFile(paths.metrics),
            beacon=beacon,
            faults=plan,
            notice=notice.here(),
        )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            from elastic_train.replica.watch.causes import of_exception

            text = traceback.format_exc()
            # A config that has trained cannot be what is wrong.
            proven = self._incarnation.joining or self._incarnation.restores > 0
            cause = of_exception(error, proven=proven)
            logger.error("this rank failed:\n%s", text)
            try:
                self._supervisor.report_training_error.call_one(
                    self._incarnation.slot, self._rank, self._incarnation.number, cause, text
                ).get(timeout=5)
            except Exception:
                logger.exception("the supervisor could not be told")
            raise


class ProcessActor(Actor):
    """Answers for the process while its trainer is busy."""

    @endpoint
    def identity(self) -> ProcessId:
        """Pid, and when the process was made (unix seconds): together they name a process for good."""
        return os.getpid(), psutil.Process().create_time()

    @endpoint
    def arm(self, spec: FaultSpec) -> bool:
        """Let a fault happen at its next passage; False while there is nothing to pass yet."""
        plan = faults.installed()
        if plan is None:
            return False
        plan.arm(spec)
        return True


class NoticeActor(Actor):
    """Stands between the supervisor and the notice of a process.

    Apart from ``ProcessActor``, as Monarch does not mix coroutines with other endpoints.
    """

    @concurrent_endpoint
    async def leave(self, within_s: float) -> None:
        """Let the replica leave at its next commit, at the latest in so many seconds; its rank 0 is told."""
        notice.here().give(within_s)

    @concurrent_endpoint
    async def warned(self) -> None:
        """Returns once this process was told from outside that it is about to be killed."""
        while not notice.here().warned:
            await asyncio.sleep(_LOOK_S)


class WarmingActor(Actor):
    """Gets a process ready before there is an incarnation to train for."""

    @endpoint
    def warm(self) -> None:
        """Import everything that a trainer needs, without taking processors from those who train."""
        behind_others(lambda: import_module("elastic_train.replica.trainer"))
