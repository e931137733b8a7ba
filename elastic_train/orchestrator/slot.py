"""One slot of the run, from its first allocation to its end: one incarnation after the other.

The slot carries out what the policy decides about its failures. It never looks at another slot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property

from elastic_train.clock import Clock
from elastic_train.config import RunConfig
from elastic_train.config.faults import FaultSpec
from elastic_train.events import EventLog, LineFile, Record
from elastic_train.lifecycle import IllegalTransition, ReplicaLifecycle, ReplicaState, Trigger
from elastic_train.orchestrator.accelerators import find
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.monarch_env import trainer_environment
from elastic_train.orchestrator.policy import Failure, Reallocate, RestartInPlace, Retire, Stop, decide
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler import Allocation, Scheduler
from elastic_train.orchestrator.supervisor import Supervisor, SupervisorLost
from elastic_train.orchestrator.turns import StandbyTurns
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.tls import tls_of
from elastic_train.replica.actor import SegmentPart
from elastic_train.replica.durable.folder import DurableSnapshot
from elastic_train.replica.rank import Incarnation
from elastic_train.replica.watch.failure import ReplicaFailure
from elastic_train.replica.watch.process_watch import ProcessId, is_alive, kill_process

logger = logging.getLogger(__name__)

_GONE_S = 10.0
"""How long the kernel may take to remove a process that was killed."""
_GONE_LOOK_S = 0.02
_TELL_AGAIN_S = 1.0
_STANDBY_AGAIN_S = 5.0
"""After a standby that could not be made, and once there is a new ReplicaActor."""

_LIFECYCLE_OF_EVENT = {
    "heal_started": Trigger.HEAL_STARTED,
    "heal_finished": Trigger.HEAL_FINISHED,
    "joined": Trigger.JOINED,
}


@dataclass(kw_only=True)
class RunContext:
    """What all slots of a run share."""

    config: RunConfig
    folder: RunFolder
    log: EventLog
    metrics: LineFile
    clock: Clock
    scheduler: Scheduler
    barrier: ColdStart
    host: str
    """Name under which replicas reach each other."""
    on_metrics: list[Callable[[Record], None]]
    """Called with every record of metrics.jsonl."""
    resume: DurableSnapshot | None = None
    """What the run starts from, if not from new parameters."""
    lighthouse: str = ""
    """The Lighthouse's address, once it is known."""
    registry: str = ""
    """The registry's address, once it is known."""
    token: str = field(default="", repr=False)
    """What a request to the registry or to a replica must show; for this run alone, and written nowhere."""
    turns: StandbyTurns = field(default_factory=StandbyTurns)
    """When a standby may be made."""
    fired: set[str] = field(default_factory=set)
    """Faults that have acted."""
    jitter: random.Random = field(default_factory=random.Random)

    @cached_property
    def directory(self) -> Directory:
        """By which the controller talks to the registry, once that listens."""
        return Directory(self.registry, self.token, tls=tls_of(self.config.peer_ckpt))


@dataclass(frozen=True, kw_only=True)
class SlotEnd:
    """How a slot's part of the run ended."""

    state: ReplicaState
    cause: str | None = None
    reason: str | None = None
    stops_run: bool = False
    """Whether the run cannot go on after this."""


class ReplicaSlot:
    """Supervises the incarnations of one slot."""

    def __init__(self, slot: int, run: RunContext, others_live: Callable[[int], int]) -> None:
        """
        Args:
            others_live: counts the slots other than the given one that have not ended.
        """
        self.slot = slot
        self.lifecycle = ReplicaLifecycle()
        self._run = run
        self._others_live = others_live
        self._telling: asyncio.Task[None] | None = None
        self.finished = False
        """Whether this slot trained to the end itself and holds the last state."""
        self._number = -1
        self._incarnation: Incarnation | None = None
        self._allocation: Allocation | None = None
        self._supervisor: Supervisor | None = None
        self._processes: list[ProcessId] = []
        self._holder = -1
        """The incarnation whose processes those are."""
        self._failures: list[Failure] = []
        self._running_since: float | None = None
        self._offsets = (0, 0)
        self._background: set[asyncio.Future[None]] = set()
        self._step = 0
        self._pumping = asyncio.Lock()
        self._trains = asyncio.Event()
        """Whether the current incarnation is past its first step, so that a standby can be made beside it."""
        self._standing_by: list[ProcessId] = []
        """The processes of the last standby that was heard of."""

    @property
    def state(self) -> ReplicaState:
        return self.lifecycle.state

    async def run(self) -> SlotEnd:
        """Keep the slot training until it has trained to the end, or nothing more can be done about it."""
        keeping = asyncio.ensure_future(self._keep_standby()) if self._run.config.recovery.standby else None
        try:
            return await self._run_to_end()
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait({keeping})

    async def _run_to_end(self) -> SlotEnd:
        while True:
            if self._allocation is None:
                await self._allocate()
            failure = await self._live()
            self._trains.clear()
            await self.pump()
            if failure is None:
                self.apply(Trigger.FINISHED)
                self.finished = True
                return SlotEnd(state=self.state)
            end = await self._act_on(failure)
            if end is not None:
                return end

    async def pump(self) -> None:
        """Merge what the slot's processes wrote since the last time into the run's log."""
        async with self._pumping:
            supervisor, incarnation = self._supervisor, self._incarnation
            if supervisor is None or incarnation is None:
                return
            while True:
                try:
                    part: SegmentPart = await supervisor.ask_soon("read_segment", incarnation, self._offsets)
                except (SupervisorLost, TimeoutError) as error:
                    # A dead supervisor shows in the call that is pending on it; its successor reads on from here.
                    logger.info("replica %d: its events could not be read: %s", self.slot, error)
                    return
                if part.offsets == self._offsets:
                    return
                self._take(part)

    def _take(self, part: SegmentPart) -> None:
        self._offsets = part.offsets
        for event in part.events:
            self._follow(self._run.log.append(event))
        for record in part.metrics:
            self._step = record["step"]
            self._run.metrics.append(record)
            for subscriber in self._run.on_metrics:
                try:
                    subscriber(record)
                except Exception:
                    logger.exception("a reader of the metrics failed")

    async def inject(self, spec: FaultSpec) -> bool:
        """Pass a fault on to the process it is meant for; False if there is none at the moment."""
        if self._supervisor is None:
            return False
        try:
            return bool(await self._supervisor.ask_soon("inject", spec))
        except (SupervisorLost, TimeoutError):
            # A fault that ends the ReplicaActor itself leaves no answer.
            return spec.kind == "replica_actor"

    async def save(self) -> bool:
        """Let the replica, which has trained to the end, write the last state of the run."""
        assert self._supervisor is not None, "a slot that trained to the end has its supervisor"
        try:
            failure = await self._supervisor.ask("save")
        except SupervisorLost as error:
            logger.warning("replica %d could not write the last state: %s", self.slot, error)
            return False
        await self.pump()
        return failure is None

    async def shut_down(self) -> None:
        """End the slot's processes and give its hosts back."""
        if self._telling is not None:
            self._telling.cancel()
        if self._supervisor is not None:
            await self._supervisor.close(self._run.config.recovery.stop_timeout_s)
            await self.pump()
            supervisor, self._supervisor = self._supervisor, None
            await supervisor.stop()
        if self._run.scheduler.loopback:
            # A ReplicaActor that died left nobody else to end its ranks.
            await self._end_ranks()
        if self._allocation is not None:
            await self._run.scheduler.release(self._allocation)
            self._allocation = None

    async def _tell_retired(self) -> None:
        """Let the others take over the data of this slot, which nobody reads any more."""
        while not await asyncio.to_thread(self._run.directory.retired, self.slot):
            await asyncio.sleep(_TELL_AGAIN_S)

    async def _end_ranks(self) -> None:
        """Kill the ranks that are known, and once they are gone say so to whoever may wait for their answer."""
        processes = [*self._processes, *self._standing_by]
        for process in processes:
            kill_process(process)
        deadline = self._run.clock.monotonic() + _GONE_S
        while any(is_alive(process) for process in processes):
            if self._run.clock.monotonic() > deadline:
                logger.error("processes of replica %d survive SIGKILL: %s", self.slot, processes)
                return
            await asyncio.sleep(_GONE_LOOK_S)
        # Processes of the current incarnation that nobody has heard of yet may still live.
        if self._run.registry and self._holder == self._number >= 0:
            await asyncio.to_thread(self._run.directory.ended, self.slot, self._holder)

    def apply(self, trigger: Trigger) -> None:
        """Move the slot's state, and say so in the log."""
        try:
            before, after = self.lifecycle.apply(trigger)
        except IllegalTransition as error:
            logger.warning("replica %d: %s", self.slot, error)
            return
        if after is not before:
            self._run.log.emit(
                "replica_state",
                replica=self.slot,
                incarnation=max(self._number, 0),
                **{"from": before, "to": after},
            )
        self._run.turns.starting(self.slot, after is ReplicaState.STARTING)
        if after is ReplicaState.RUNNING and before is not ReplicaState.RUNNING:
            self._running_since = self._run.clock.monotonic()

    # -- one incarnation -------------------------------------------------------------------------------------------

    async def _allocate(self) -> None:
        name = f"replica_{self.slot}"
        self._run.log.emit("allocation_requested", replica=self.slot)
        self._allocation = await self._run.scheduler.allocate(name)
        self._run.log.emit("allocation_granted", replica=self.slot, hosts=list(self._allocation.hosts))
        self.apply(Trigger.ALLOCATED)

    async def _live(self) -> ReplicaFailure | None:
        """One incarnation, from its processes' start to its end; None if it trained to the end of the run."""
        run = self._run
        self._number += 1
        self._running_since = None
        self._incarnation = incarnation = Incarnation(
            config=run.config,
            run_dir=run.folder.path,
            slot=self.slot,
            number=self._number,
            joining=run.barrier.released,
            lighthouse=run.lighthouse,
            host=run.host,
            fired=frozenset(run.fired),
            registry=run.registry,
            token=run.token,
            resume=run.resume,
            environment=self._environment(),
        )
        try:
            supervisor = self._ensure_supervisor()
            start = supervisor.start(incarnation)
            failure: ReplicaFailure | None = await (start if incarnation.joining else self._unless_too_late(start))
            if failure is not None:
                return failure
            self.apply(Trigger.READY)
            if not incarnation.joining:
                await run.barrier.arrive(self.slot)
                if self.slot not in run.barrier.released_slots:
                    return self._too_late()
                self.apply(Trigger.RELEASED)
            failure = await supervisor.ask("train")
            return failure
        except SupervisorLost as lost:
            return self._supervisor_lost(lost)

    def _environment(self) -> tuple[tuple[str, str], ...]:
        settings = self._run.config.orchestrator
        environment = trainer_environment(
            replicas=settings.replicas,
            procs=settings.procs_per_replica,
            cores=os.cpu_count() or 1,
            one_machine=self._run.scheduler.loopback,
        )
        if self._run.scheduler.loopback:
            environment |= find(os.environ).share(self.slot, settings.procs_per_replica)
        return tuple(environment.items())

    async def _unless_too_late(self, start: Awaitable[ReplicaFailure | None]) -> ReplicaFailure | None:
        """Wait for a start that the cold start waits for; the release without this slot makes it a failure."""
        starting, released = asyncio.ensure_future(start), asyncio.ensure_future(self._run.barrier.wait())
        try:
            await asyncio.wait({starting, released}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
        finally:
            released.cancel()
            if not starting.done():
                starting.cancel()
        return self._too_late()

    def _too_late(self) -> ReplicaFailure:
        """The cold start went on without this slot, which now has to come as a joiner."""
        failure = ReplicaFailure(
            cause="start_timeout",
            rank=None,
            step=0,
            error=f"not ready within orchestrator.start_timeout_s = {self._run.config.orchestrator.start_timeout_s}",
        )
        self._log_failure(failure)
        return failure

    def _ensure_supervisor(self) -> Supervisor:
        if self._supervisor is None:
            assert self._allocation is not None
            self._supervisor = Supervisor(
                self._allocation,
                f"replica_actor_{self.slot}_{self._number}",
                self.slot,
                self._run.folder.path,
                on_this_host=self._run.scheduler.loopback,
            )
        return self._supervisor

    def _supervisor_lost(self, lost: SupervisorLost) -> ReplicaFailure:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            # Its process may have outlived the actor, and stopping a dead one can take long.
            stopping = asyncio.ensure_future(supervisor.stop())
            self._background.add(stopping)
            stopping.add_done_callback(self._background.discard)
        failure = ReplicaFailure(
            cause=lost.end.cause if lost.end else "exception",
            rank=None,
            step=self._step,
            error=f"its ReplicaActor {lost.end.error if lost.end else f'failed: {lost}'}",
            signal=lost.end.signal if lost.end else None,
            traceback=None if lost.end else str(lost.__cause__ or lost),
        )
        self._log_failure(failure)
        return failure

    def _log_failure(self, failure: ReplicaFailure) -> None:
        self._run.log.emit("failure_detected", replica=self.slot, incarnation=self._number, **failure.fields())

    def _follow(self, event: Record) -> None:
        """Let the slot's state follow what its current incarnation reports."""
        name = event["event"]
        if name == "fault_injected":
            self._run.fired.add(event["spec"])
        if event.get("incarnation") != self._number:
            return
        if name == "procs_started":
            self._processes = list(zip(event["pids"], event["created"], strict=True))
            self._holder = self._number
        elif name == "standby_started":
            self._standing_by = list(zip(event["pids"], event["created"], strict=True))
        elif name == "first_step":
            self._trains.set()
        elif name in _LIFECYCLE_OF_EVENT:
            self.apply(_LIFECYCLE_OF_EVENT[name])

    async def _keep_standby(self) -> None:
        """Have a warm standby whenever the replica trains, made when no replica starts."""
        while True:
            await self._trains.wait()
            made = False
            try:
                async with self._run.turns.turn():
                    if self._trains.is_set() and self._supervisor is not None:
                        made = await self._supervisor.ask("make_standby")
                if made and self._supervisor is not None:
                    await self._supervisor.ask("standby_gone")
                    continue
            except SupervisorLost as lost:
                logger.info("replica %d: its standby went with its supervisor: %s", self.slot, lost)
            await asyncio.sleep(_STANDBY_AGAIN_S)

    # -- after a failure ---------------------------------------------------------------------------------------------

    async def _act_on(self, lost: ReplicaFailure) -> SlotEnd | None:
        run, now = self._run, self._run.clock.monotonic()
        failure = Failure(
            slot=self.slot,
            incarnation=self._number,
            cause=lost.cause,
            step=lost.step,
            error=lost.error,
            t=self._run.clock.now(),
            healthy_s=0.0 if self._running_since is None else now - self._running_since,
        )
        self.apply(Trigger.FAILED)
        decision = decide(
            failure,
            self._failures,
            live=self._others_live(self.slot),
            min_replicas=run.config.lighthouse.min_replicas,
            recovery=run.config.recovery,
            jitter=run.jitter.random(),
        )
        self._failures.append(failure)
        match decision:
            case Stop():
                return SlotEnd(state=self.state, cause=decision.cause, reason=decision.reason, stops_run=True)
            case Retire():
                return await self._retire(decision.cause)
            case RestartInPlace() | Reallocate():
                run.log.emit(
                    "restart_scheduled",
                    replica=self.slot,
                    incarnation=self._number + 1,
                    level=decision.level,
                    delay_s=round(decision.delay_s, 3),
                )
                await asyncio.sleep(decision.delay_s)
                if isinstance(decision, RestartInPlace):
                    self.apply(Trigger.RESTART)
                else:
                    await self.shut_down()
                    self.apply(Trigger.REALLOCATE)
                return None

    async def _retire(self, cause: str) -> SlotEnd:
        self._run.log.emit("replica_retired", replica=self.slot, incarnation=self._number, cause=cause)
        self.apply(Trigger.RETIRE)
        self._run.barrier.give_up(self.slot)
        await self.shut_down()
        # Not before its processes are gone: from then on others read its data.
        if self._run.registry and not any(is_alive(process) for process in self._processes):
            self._telling = asyncio.ensure_future(self._tell_retired())
        return SlotEnd(state=self.state, cause=cause, reason=self._failures[-1].error)
