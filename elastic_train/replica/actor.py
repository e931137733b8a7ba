"""The supervisor of one replica: it owns the replica's processes, sees them fail, and starts them again in place.

It carries out what the OrchestrationManager decides and reports what it sees; a failure here touches no other
replica. What an older incarnation still says is logged and ignored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from monarch.actor import Actor, MeshFailure, concurrent_endpoint
from monarch.spmd import setup_torch_elastic_env_async

from elastic_train.clock import SystemClock
from elastic_train.config.faults import FaultSpec
from elastic_train.events import EventWriter, Record, read_all, read_records
from elastic_train.futures import result
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.tls import tls_of
from elastic_train.process_log import print_to
from elastic_train.replica.ending import Ending
from elastic_train.replica.isolation import Fence, end_host
from elastic_train.replica.memory_files import MemoryFiles, keeps_memory
from elastic_train.replica.procs import Procs
from elastic_train.replica.rank import (
    Incarnation,
    SegmentPaths,
    beacon_path,
    stack_answer_path,
    stacks_folder,
    supervisor_log_path,
)
from elastic_train.replica.standby import Standby
from elastic_train.replica.trainer_actor import TrainerActor
from elastic_train.replica.watch.beacon import BeaconReader, Budgets, hang
from elastic_train.replica.watch.failure import PREEMPTED, ReplicaFailure
from elastic_train.replica.watch.process_end import ProcessEnd, crashed_ranks, of_process, of_status
from elastic_train.replica.watch.process_watch import ProcessId, ProcessWatch, end_all
from elastic_train.replica.watch.stacks import RankProcess, stacks_tell_of, write_stacks

logger = logging.getLogger(__name__)

_WATCH_S = 0.1
_SETTLE_S = 1.5
"""A rank that lost a peer says so before the peer's own death is known; the cause is worth a moment's wait."""

_STACKS_S = 10.0
"""Where ranks stand is worth a moment, and no more if the disk hangs too."""

_REMIND_S = 5.0
"""Rare enough for any number of replicas: peers wait for an end only in a doubt."""

_OUTSIDE_OF_THE_STATE = frozenset(
    {"signal", "proc_exit", "hang", "comm_error", "heartbeat_lost", "host_lost", "preempted", "start_timeout"}
)
"""Causes that say nothing against the state that an incarnation held."""

_ENDED_UNSEEN = "its process ended and nobody saw how"


@dataclass(frozen=True, kw_only=True)
class SegmentPart:
    """What a replica's processes wrote since the last reading, and where to go on from."""

    events: list[Record]
    metrics: list[Record]
    offsets: tuple[int, int]


class ReplicaActor(Actor):
    """Owns the processes of one incarnation at a time, and those of a standby beside them."""

    def __init__(self, slot: int, run_dir: Path, place: str = "", isolation_s: float | None = None) -> None:
        """
        Args:
            place: as ``Incarnation.place``.
            isolation_s: how long it may go on without the controller; None: on the controller's own host, where it
                ends with it.
        """
        print_to(supervisor_log_path(run_dir, slot))
        self._slot = slot
        self._writer = EventWriter(SegmentPaths.of(run_dir, slot, place).events, SystemClock(), replica=slot)
        self._fence = None if isolation_s is None else Fence(isolation_s, end_host)
        self._incarnation: Incarnation | None = None
        self._replaced: Incarnation | None = None
        """One that is being ended in favour of the next, though it had not failed."""
        self._handle: Any = None
        self._starting: asyncio.Task[ReplicaFailure | None] | None = None
        self._procs: Procs | None = None
        self._trainers: Any = None
        self._standby: Standby | None = None
        self._memory = MemoryFiles()
        self._last_cause = ""
        """Of the failure that was seen last."""
        self._orphans: list[ProcessId] = []
        """Processes on this host that a ReplicaActor before this one left behind."""
        self._holder = -1
        """The newest incarnation that has had processes on this host."""
        self._told_end = -1
        """The newest incarnation of which the registry knows that it has ended."""
        self._directory: Directory | None = None
        self._reminding: asyncio.Task[None] | None = None
        self._ending = asyncio.Lock()
        self._meshes = 0
        self._warned: Incarnation | None = None
        """One that leaves because a process of it was told that it is about to be killed."""
        self._reports: list[ReplicaFailure] = []
        self._ends: dict[int, ProcessEnd] = {}
        self._reported = asyncio.Event()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """Take note of how a process ended; that it has ended is found out elsewhere, and sooner."""
        report = str(failure)
        logger.info("supervision: %s", report)
        if end := of_process(report):
            for rank in crashed_ranks(report):
                if rank < len(self._watches) and self._watches[rank].ended:
                    self._ends[rank] = end
        return True

    @concurrent_endpoint
    async def identity(self) -> ProcessId:
        """This process, which others may want to watch."""
        return os.getpid(), psutil.Process().create_time()

    @concurrent_endpoint
    async def hold(self, heard: int) -> int:
        """The controller is there, and has got the answer of that number (0: none yet); the number of this one."""
        return 0 if self._fence is None else self._fence.renew(heard)

    @concurrent_endpoint
    async def start(self, incarnation: Incarnation, handle: Any) -> ReplicaFailure | None:
        """Bring an incarnation up to where it waits for its release; replaces the one before, in place.

        Args:
            handle: this actor, as its ranks address it.
        """
        self._handle = handle
        if self._starting is not None:
            # The manager gave up waiting for the incarnation before; its start must not go on beside this one.
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if incarnation.registry and self._directory is None:
            tls = tls_of(incarnation.config.peer_ckpt)
            self._directory = Directory(incarnation.registry, incarnation.token, tls=tls)
            self._reminding = asyncio.ensure_future(self._remind(self._directory))
        self._adopt_orphans(incarnation)
        fired = incarnation.fired | self._fired_here(incarnation)
        told = replace(incarnation, supervisor_pid=os.getpid(), fired=fired)
        self._starting = asyncio.ensure_future(self._stop_and_restart(told))
        try:
            return await self._starting
        except asyncio.CancelledError:
            return ReplicaFailure(cause="start_timeout", rank=None, step=0, error="replaced before it was ready")

    @concurrent_endpoint
    async def train(self) -> Ending | ReplicaFailure:
        """Train to the end of the run, or until the replica is to leave. Unless it failed, its processes still hold the
        state."""
        heeding = asyncio.ensure_future(self._heed_warnings())
        try:
            # All ranks of a replica end alike: they leave by a common word.
            answers = await self._on_all_ranks("train")
            return answers if isinstance(answers, ReplicaFailure) else answers[0]
        finally:
            heeding.cancel()
            await asyncio.gather(heeding, return_exceptions=True)

    async def _heed_warnings(self) -> None:
        """Let the replica leave once a process of it was told from outside that it is about to be killed."""
        incarnation, procs = self._incarnation, self._procs
        if incarnation is None or procs is None:
            return
        ranks = range(incarnation.config.orchestrator.procs_per_replica)
        warnings = [asyncio.ensure_future(result(procs.notices.slice(gpus=rank).warned.call_one())) for rank in ranks]
        try:
            done, _ = await asyncio.wait(warnings, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for warning in warnings:
                warning.cancel()
            await asyncio.gather(*warnings, return_exceptions=True)
        # One that has died gives an error, and Monarch's own end of a mesh looks like a warning.
        rank = next((rank for rank in ranks if warnings[rank] in done and not warnings[rank].exception()), None)
        if rank is None or incarnation is not self._incarnation or procs is not self._procs:
            return
        self._warned = incarnation
        within_s = incarnation.config.recovery.preemption_grace_s
        self._events(incarnation).emit("drain_started", rank=rank, within_s=within_s, cause="preempted")
        await self._tell_to_leave(procs, within_s)

    @concurrent_endpoint
    async def leave(self, within_s: float) -> bool:
        """Let the replica end its training at its next commit, at the latest in so many seconds; False if it has not
        begun. Its processes stay, with the state of the last commit."""
        if self._procs is None:
            return False
        await self._tell_to_leave(self._procs, within_s)
        return True

    async def _tell_to_leave(self, procs: Procs, within_s: float) -> None:
        await result(procs.notices.slice(gpus=0).leave.call_one(within_s))

    @concurrent_endpoint
    async def save(self, whole: bool) -> ReplicaFailure | None:
        """Write the state, the whole of it or the parameters alone."""
        answers = await self._on_all_ranks("save", whole)
        return answers if isinstance(answers, ReplicaFailure) else None

    @concurrent_endpoint
    async def report_training_error(self, slot: int, rank: int, incarnation: int, cause: str, traceback: str) -> None:
        """A rank is about to end because of an exception."""
        current = self._incarnation
        if current is None or incarnation != current.number:
            logger.warning("ignored a report of replica %d's incarnation %d: %s", slot, incarnation, cause)
            return
        lines = [line for line in traceback.splitlines() if line.strip()]
        self._reports.append(
            ReplicaFailure(
                cause=cause,
                rank=rank,
                step=self._last_step(),
                error=lines[-1] if lines else cause,
                traceback=traceback,
            )
        )
        self._reported.set()

    @concurrent_endpoint
    async def inject(self, spec: FaultSpec) -> bool:
        """Let a fault happen to this actor now, or to one of its ranks at its next passage."""
        if self._incarnation is None or self._procs is None:
            return False
        if spec.kind == "replica_actor":
            self._events(self._incarnation).emit("fault_injected", kind=spec.kind, point=spec.point, spec=str(spec))
            os.kill(os.getpid(), signal.SIGKILL)
        return bool(await result(self._procs.actor.slice(gpus=spec.rank).arm.call_one(spec)))

    @concurrent_endpoint
    async def read_segment(self, incarnation: Incarnation, offsets: tuple[int, int]) -> SegmentPart:
        """Hand over what this replica's processes wrote to their host's disk."""
        paths = SegmentPaths.of(incarnation.run_dir, self._slot, incarnation.place)
        events, events_offset = read_records(paths.events, offsets[0])
        metrics, metrics_offset = read_records(paths.metrics, offsets[1])
        return SegmentPart(events=events, metrics=metrics, offsets=(events_offset, metrics_offset))

    @concurrent_endpoint
    async def shut_down(self, stop_timeout_s: float) -> None:
        """End this replica's processes: let them close for so long, then make sure that they are gone."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        ending = asyncio.ensure_future(self._end_standby())
        if self._trainers is not None:
            close = asyncio.ensure_future(result(self._trainers.close.call()))
            await asyncio.wait({close}, timeout=stop_timeout_s)
            close.cancel()
        try:
            await ending
            await self._end_processes()
        finally:
            self._memory.close()

    @concurrent_endpoint
    async def make_standby(self) -> None:
        """Have processes warm for the next incarnation; returns once they are, or are gone."""
        incarnation = self._incarnation
        if incarnation is None:
            return
        if self._standby is None:
            recovery = incarnation.config.recovery
            self._standby = Standby(silence_s=recovery.silence_timeout_s, start_s=recovery.start_hang_timeout_s)
        began = time.monotonic()

        def started(procs: Procs) -> None:
            self._events(incarnation).emit("standby_started", **_named(procs))

        if await self._standby.make(lambda: self._start_procs(incarnation, "standby"), started):
            self._events(incarnation).emit("standby_ready", duration_s=round(time.monotonic() - began, 3))

    @concurrent_endpoint
    async def standby_gone(self) -> bool:
        """Returns once there is no standby; whether the last one was taken into use, and not lost."""
        return self._standby is not None and await self._standby.gone()

    async def _end_standby(self) -> None:
        if self._standby is not None:
            await self._standby.end()

    def _adopt_orphans(self, incarnation: Incarnation) -> None:
        """Take over processes on this host whose ReplicaActor died, perhaps before it could tell anybody of them."""
        if self._incarnation is not None:
            return
        events = read_all(SegmentPaths.of(incarnation.run_dir, self._slot, incarnation.place).events)
        for name in ("procs_started", "standby_started"):
            started = [event for event in events if event["event"] == name]
            if started:
                self._orphans += zip(started[-1]["pids"], started[-1]["created"], strict=True)
                if name == "procs_started":
                    self._holder = max(self._holder, started[-1]["incarnation"])

    def _fired_here(self, incarnation: Incarnation) -> frozenset[str]:
        """Faults that acted on this host, also one that the controller cannot know of: it ended its messenger."""
        events = read_all(SegmentPaths.of(incarnation.run_dir, self._slot, incarnation.place).events)
        return frozenset(event["spec"] for event in events if event["event"] == "fault_injected")

    # -- one incarnation -------------------------------------------------------------------------------------------

    async def _stop_and_restart(self, incarnation: Incarnation) -> ReplicaFailure | None:
        self._replaced = self._incarnation
        await self._end_processes()
        if not incarnation.joining or self._last_cause not in _OUTSIDE_OF_THE_STATE:
            # What it starts from lies elsewhere, or may be what the last incarnation failed of.
            self._memory.close()
        if keeps_memory(incarnation.config):
            self._memory.renew(incarnation.config.orchestrator.procs_per_replica)
            incarnation = replace(incarnation, memory=self._memory.paths, remains=self._memory.remains)
        self._incarnation = incarnation
        self._reports.clear()
        self._reported.clear()
        self._ends.clear()
        for beacon in self._beacons(incarnation):
            # Of a run that had this folder before, on a host where nobody has removed it.
            beacon.remove()
        if failure := await self._started(incarnation, self._spawn(incarnation)):
            return failure
        answers = await self._on_all_ranks("prepare")
        if isinstance(answers, ReplicaFailure):
            return answers
        if failure := await self._started(incarnation, self._introduce(incarnation, answers[0])):
            return failure
        answers = await self._on_all_ranks("build")
        if isinstance(answers, ReplicaFailure):
            return answers
        self._events(incarnation).emit("replica_ready")
        return None

    async def _started(self, incarnation: Incarnation, start: Coroutine[Any, Any, None]) -> ReplicaFailure | None:
        """Do a part of the start; what goes wrong in it is written to the log."""
        try:
            async with asyncio.timeout(incarnation.config.recovery.start_hang_timeout_s):
                await start
        except TimeoutError:
            late = "its processes did not start within recovery.start_hang_timeout_s"
            return self._detected(incarnation, ReplicaFailure(cause="start_timeout", rank=None, step=0, error=late))
        except Exception as error:
            logger.exception("the processes could not be started")
            lost = ReplicaFailure(cause="proc_exit", rank=None, step=0, error=_one_line(error))
            return self._detected(incarnation, lost)
        return None

    async def _spawn(self, incarnation: Incarnation) -> None:
        procs = await self._standby.take() if self._standby is not None else None
        warm = procs is not None
        if procs is None:
            procs = self._start_procs(incarnation, "cold")
        self._procs = procs
        if not warm:
            await procs.started()
        self._holder = incarnation.number
        self._events(incarnation).emit("procs_started", **_named(procs), standby=warm)
        self._trainers = procs.mesh.spawn("trainer", TrainerActor, incarnation, self._handle)

    async def _introduce(self, incarnation: Incarnation, port: int) -> None:
        """Tell the ranks of each other, and of the store by which they meet."""
        assert self._procs is not None, "who has answered has a process"
        await setup_torch_elastic_env_async(self._procs.mesh, incarnation.host, port)

    def _start_procs(self, incarnation: Incarnation, purpose: str) -> Procs:
        self._meshes += 1
        return Procs(
            f"replica_{self._slot}_{incarnation.number}_{purpose}_{self._meshes}",
            incarnation.config.orchestrator.procs_per_replica,
            dict(incarnation.environment),
        )

    @property
    def _watches(self) -> list[ProcessWatch]:
        return self._procs.watches if self._procs is not None else []

    async def _on_all_ranks(self, endpoint: str, *arguments: Any) -> list[Any] | ReplicaFailure:
        """Call an endpoint of every rank and wait until all have answered, or one has failed, is gone, or hangs."""
        incarnation = self._incarnation
        assert incarnation is not None
        ranks = range(incarnation.config.orchestrator.procs_per_replica)
        calls = {
            asyncio.ensure_future(result(getattr(self._trainers.slice(gpus=rank), endpoint).call_one(*arguments))): rank
            for rank in ranks
        }
        reported = asyncio.ensure_future(self._reported.wait())
        watch = asyncio.ensure_future(self._watch(incarnation))
        try:
            running = set(calls)
            while running:
                done, _ = await asyncio.wait({*running, reported, watch}, return_when=asyncio.FIRST_COMPLETED)
                running -= done
                if reported in done or watch in done or any(call.exception() for call in done & set(calls)):
                    cause = await self._find_cause(calls, watch)
                    failure = self._detected(incarnation, await self._with_stacks(incarnation, cause))
                    break
            else:
                return [call.result() for call in calls]
        finally:
            for task in (*calls, reported, watch):
                task.cancel()
            await asyncio.gather(*calls, reported, watch, return_exceptions=True)
        await self._give_up(incarnation)
        return failure

    async def _find_cause(
        self, calls: Mapping[asyncio.Task[Any], int], watch: asyncio.Task[ReplicaFailure]
    ) -> ReplicaFailure:
        """The failure that explains the others, as far as it shows within a moment."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            found = [(0 if report.cause != "comm_error" else 2, report) for report in self._reports]
            for rank, process in enumerate(self._watches):
                if (status := process.status()) is not None:
                    self._ends[rank] = of_status(status)
            found += [(0, self._of_end(rank, end)) for rank, end in self._ends.items()]
            if watch.done():
                found.append((1 if watch.result().error == _ENDED_UNSEEN else 0, watch.result()))
            for call, rank in calls.items():
                if call.done() and (error := call.exception()):
                    end = of_process(str(error))
                    found.append((0, self._of_end(rank, end)) if end else (3, self._of_call(rank, error)))
            doubt, best = min(found, key=lambda weighed: weighed[0])
            everybody_spoke = {report.rank for report in self._reports} == set(calls.values())
            if doubt == 0 or everybody_spoke or time.monotonic() >= deadline:
                return best
            await asyncio.sleep(_WATCH_S / 2)

    def _of_call(self, rank: int, error: BaseException) -> ReplicaFailure:
        return ReplicaFailure(
            cause="exception", rank=rank, step=self._last_step(), error=_one_line(error), traceback=str(error)
        )

    def _of_end(self, rank: int, end: ProcessEnd) -> ReplicaFailure:
        return ReplicaFailure(cause=end.cause, rank=rank, step=self._last_step(), error=end.error, signal=end.signal)

    async def _with_stacks(self, incarnation: Incarnation, failure: ReplicaFailure) -> ReplicaFailure:
        """With what only the processes can tell, before they are ended: how long they were silent, where they stand."""
        if incarnation is self._warned and failure.cause != "preempted":
            # Whatever ended it, it was told beforehand.
            failure = replace(failure, cause="preempted", error=f"{PREEMPTED}; {failure.error}")
        failure = replace(failure, detect_s=round(self._silence(failure.rank), 3))
        processes = self._procs.identities if self._procs is not None else []
        if not stacks_tell_of(failure, len(processes)):
            return failure
        run_dir, slot, number = incarnation.run_dir, incarnation.slot, incarnation.number
        ranks = [
            RankProcess(rank=rank, process=process, answer=stack_answer_path(run_dir, slot, number, rank))
            for rank, process in enumerate(processes)
        ]
        where = "" if failure.rank is None else f", rank {failure.rank}"
        why = f"replica {slot}, incarnation {number} failed{where}: {failure.cause}: {failure.error}"
        folder = stacks_folder(run_dir, slot, number)
        try:
            async with asyncio.timeout(_STACKS_S):
                await asyncio.to_thread(write_stacks, folder, ranks, why)
        except (OSError, TimeoutError):
            logger.exception("where the ranks stood could not be written down")
            return failure
        return replace(failure, stacks=str(folder.relative_to(run_dir)))

    def _detected(self, incarnation: Incarnation, failure: ReplicaFailure) -> ReplicaFailure:
        """Write a failure to the log before anything is done about it."""
        if incarnation is not self._incarnation or incarnation is self._replaced:
            logger.info("incarnation %d was replaced before it failed: %s", incarnation.number, failure.error)
            return failure
        self._last_cause = failure.cause
        self._events(incarnation).emit("failure_detected", **failure.fields())
        return failure

    # -- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self, incarnation: Incarnation) -> ReplicaFailure:
        """Return when a process of the incarnation has ended, or gets nowhere."""
        budgets = Budgets.of(incarnation.config)
        readers, began = self._beacons(incarnation), time.monotonic()
        while True:
            for rank, process in enumerate(self._watches):
                if process.ended:
                    return ReplicaFailure(cause="proc_exit", rank=rank, step=self._last_step(), error=_ENDED_UNSEEN)
            now = time.monotonic()
            for rank, reader in enumerate(readers):
                sample = reader.read()
                if sample is not None and (words := hang(sample, now, budgets)):
                    return ReplicaFailure(cause="hang", rank=rank, step=sample.step, error=words)
                if sample is None and now - began > budgets.build_s:
                    return ReplicaFailure(cause="hang", rank=rank, step=0, error="its process does not even begin")
            await asyncio.sleep(_WATCH_S)

    def _beacons(self, incarnation: Incarnation) -> list[BeaconReader]:
        ranks = range(incarnation.config.orchestrator.procs_per_replica)
        return [
            BeaconReader(beacon_path(incarnation.run_dir, incarnation.slot, incarnation.number, rank)) for rank in ranks
        ]

    def _last_step(self) -> int:
        if self._incarnation is None:
            return 0
        samples = [reader.read() for reader in self._beacons(self._incarnation)]
        return max((sample.step for sample in samples if sample is not None), default=0)

    def _silence(self, rank: int | None) -> float:
        """Seconds since a rank, or the most silent of all, ran any code."""
        if self._incarnation is None:
            return 0.0
        samples = [reader.read() for reader in self._beacons(self._incarnation)]
        now = time.monotonic()
        silences = [now - sample.alive_at for sample in samples if sample is not None]
        if rank is not None and rank < len(samples) and samples[rank] is not None:
            return now - samples[rank].alive_at  # type: ignore[union-attr]
        return max(silences, default=0.0)

    # -- ending ------------------------------------------------------------------------------------------------------

    async def _give_up(self, incarnation: Incarnation) -> None:
        """End what is left of an incarnation that failed: its peers may have to wait until all of it is gone."""
        async with self._ending:
            if incarnation is self._incarnation:
                await self._end_now()

    async def _end_processes(self) -> None:
        """End every process of the last incarnation and see it gone: two must never hold one slot."""
        async with self._ending:
            await self._end_now()

    async def _end_now(self) -> None:
        procs, self._procs, self._trainers = self._procs, None, None
        if procs is not None:
            # Should one of them survive, the next attempt is at it again.
            self._orphans += procs.identities
            await procs.end()
        await end_all(self._orphans)
        self._orphans = []
        if (ended := self._incarnation) is not None:
            for rank, beacon in enumerate(self._beacons(ended)):
                beacon.remove()
                stack_answer_path(ended.run_dir, ended.slot, ended.number, rank).unlink(missing_ok=True)
        await self._tell_end()

    async def _tell_end(self) -> None:
        """Let the registry know that nothing is left of the incarnations up to now."""
        number = self._holder
        if self._directory is None or number <= self._told_end:
            return
        if await asyncio.to_thread(self._directory.ended, self._slot, number):
            self._told_end = number

    async def _remind(self, directory: Directory) -> None:
        """Tell a registry that was away, or was started again, of the ends that were seen here."""
        while True:
            await asyncio.sleep(_REMIND_S)
            await asyncio.to_thread(directory.refresh)

    def _events(self, incarnation: Incarnation) -> EventWriter:
        return self._writer.bind(incarnation=incarnation.number)


def _named(procs: Procs) -> dict[str, Any]:
    """Their processes, as the log has them."""
    return {"pids": [pid for pid, _ in procs.identities], "created": [created for _, created in procs.identities]}


def _one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
