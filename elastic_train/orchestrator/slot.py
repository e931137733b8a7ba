"""One slot of the run, from its first allocation to its end: one incarnation after the other.

The slot carries out what the policy decides about its failures. It never looks at another slot.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from elastic_train.orchestrator.generation import Generation, GenerationOver, Plea
from elastic_train.orchestrator.monarch_env import trainer_environment
from elastic_train.orchestrator.policy import (
    AskToRestore,
    Failure,
    Reallocate,
    RestartInPlace,
    Retire,
    Stop,
    decide,
)
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler import Allocation, Scheduler
from elastic_train.orchestrator.supervisor import Supervisor, SupervisorLost
from elastic_train.orchestrator.turns import StandbyTurns
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.tls import tls_of
from elastic_train.replica.actor import SegmentPart
from elastic_train.replica.ending import Ending
from elastic_train.replica.rank import Incarnation
from elastic_train.replica.watch.failure import PREEMPTED, ReplicaFailure
from elastic_train.replica.watch.process_watch import ProcessId, end_all, is_alive

logger = logging.getLogger(__name__)

_TELL_AGAIN_S = 1.0
_TO_END_S = 2.0
"""How much longer than agreed a replica that hears nothing may take to end itself."""
_STANDBY_PAUSE_S = 5.0
_STANDBY_PAUSE_MAX_S = 300.0
"""Before another standby is made for one that was lost or could not be made; it doubles with each in a row."""

_LIFECYCLE_OF_EVENT = {
    "heal_started": Trigger.HEAL_STARTED,
    "heal_finished": Trigger.HEAL_FINISHED,
    "joined": Trigger.JOINED,
    "drain_started": Trigger.DRAIN,
}

_TELLS_OUTER_STEP = frozenset({"sync_committed", "caught_up", "heal_finished", "replica_left"})

_HOSTS_ARE_LOST = frozenset({"host_lost", "preempted"})
"""Causes of failures that take the hosts away."""


@dataclass(kw_only=True)
class RunContext:
    """What all slots of a run share."""

    config: RunConfig
    folder: RunFolder
    log: EventLog
    metrics: LineFile
    clock: Clock
    scheduler: Scheduler
    generation: Generation
    """The present one."""
    on_metrics: list[Callable[[Record], None]]
    """Called with every record of metrics.jsonl."""
    lighthouse: str = ""
    """The Lighthouse's address, once it is known."""
    registry: str = ""
    """The registry's address, once it is known."""
    token: str = field(default="", repr=False)
    """What a request to the registry or to a replica must show; for this run alone, and written nowhere."""
    turns: StandbyTurns = field(default_factory=StandbyTurns)
    """When a standby may be made."""
    draining: bool = False
    """Whether the run is interrupted: nobody is started again."""
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
        self.has_left = False
        """Whether its replica was asked to leave and has, with the state of its last commit."""
        self.outer_step = 0
        """That of the state which its replica holds, as far as it was heard."""
        self._number = -1
        self._incarnation: Incarnation | None = None
        self._allocation: Allocation | None = None
        self._supervisor: Supervisor | None = None
        self._processes: list[ProcessId] = []
        self._holder = -1
        """The incarnation whose processes those are."""
        self._failures: list[Failure] = []
        self._generation = run.generation
        """To which the current incarnation belongs."""
        self._running_since: float | None = None
        self._offsets = (0, 0)
        """How far the segment of the present allocation was read."""
        self._silent_since: float | None = None
        """When the host of the present allocation, if it is another than this one, was last heard."""
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
            if self._allocation is None and not self._is_draining():
                await self._allocate()
            if self._is_draining():
                return self._interrupted()
            try:
                outcome = await self._live()
            except GenerationOver:
                await self._begin_anew()
                continue
            await self.pump()
            self._trains.clear()
            if outcome is Ending.FINISHED:
                self.finished = True
                self.apply(Trigger.FINISHED)
                return SlotEnd(state=self.state)
            if outcome is Ending.LEFT:
                self.has_left = True
                if not self._is_draining():
                    await self._save_what_nobody_else_holds()
                if self._is_draining():
                    self.apply(Trigger.DRAINED)
                    return SlotEnd(state=self.state)
                outcome = self._preempted()
            end = await self._act_on(outcome)
            if end is not None:
                return end

    def _is_draining(self) -> bool:
        """Now: it may change wherever the slot waits."""
        return self._run.draining

    def _interrupted(self, failure: Failure | None = None) -> SlotEnd:
        """The run is interrupted, and nobody is started again."""
        self.apply(Trigger.STOP)
        if failure is None:
            return SlotEnd(state=self.state)
        return SlotEnd(state=self.state, cause=failure.cause, reason=failure.error)

    @property
    def last_failure(self) -> Failure | None:
        return self._failures[-1] if self._failures else None

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
                if part.offsets == self._offsets or incarnation is not self._incarnation:
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

    async def drain(self, within_s: float) -> None:
        """Let the replica leave at its next commit, at the latest in so many seconds."""
        self._run.log.emit("drain_started", replica=self.slot, incarnation=self._number, within_s=within_s)
        if self.state is not ReplicaState.DRAINING:
            self.apply(Trigger.DRAIN)
        if self._supervisor is None:
            return
        try:
            await self._supervisor.ask_soon("leave", within_s)
        except (SupervisorLost, TimeoutError) as error:
            logger.warning("replica %d could not be asked to leave: %s", self.slot, error)

    async def save(self, *, whole: bool) -> bool:
        """Let the replica, which trains no more, write its state: all that a run can go on from, or the parameters."""
        assert self._supervisor is not None, "a slot whose replica trains no more has its supervisor"
        try:
            failure = await self._supervisor.ask("save", whole)
        except SupervisorLost as error:
            logger.warning("replica %d could not write its state: %s", self.slot, error)
            return False
        await self.pump()
        return failure is None

    async def shut_down(self, grace_s: float | None = None, *, failed: bool = False, surely: bool = False) -> None:
        """End the slot's processes and give its hosts back.

        Args:
            grace_s: how long they may take to end by themselves; None: ``recovery.stop_timeout_s``.
            failed: whether the next allocation had better be on other hosts.
            surely: whether to wait until nothing is left on a host that is lost, so that others may count on it.
        """
        if grace_s is None:
            grace_s = self._run.config.recovery.stop_timeout_s
        if self._telling is not None:
            self._telling.cancel()
        if self._supervisor is not None:
            await self._supervisor.close(grace_s)
            await self.pump()
            supervisor, self._supervisor = self._supervisor, None
            self._silent_since = supervisor.heard_at
            await supervisor.stop()
        if self._run.scheduler.is_local:
            # A ReplicaActor that died left nobody else to end its ranks.
            await self._end_ranks()
        if (allocation := self._allocation) is None:
            return
        within_s = self._isolated_in_s() if surely else 0.0
        await self._run.scheduler.release(allocation, failed=failed, within_s=within_s)
        self._allocation = None
        if surely and not allocation.is_here:
            await self._tell_end(self._number)

    def _isolated_in_s(self) -> float:
        """Seconds until a replica on another host that hears nothing must have ended itself."""
        if self._silent_since is None:
            return 0.0
        ends_at = self._silent_since + self._run.config.recovery.isolation_timeout_s + _TO_END_S
        return max(0.0, ends_at - self._run.clock.monotonic())

    async def _tell_end(self, number: int) -> None:
        """Let the registry know that nothing is left of the incarnations up to that one."""
        if self._run.registry and number >= 0:
            await asyncio.to_thread(self._run.directory.ended, self.slot, number)

    async def _tell_retired(self) -> None:
        """Let the others take over the data of this slot, which nobody reads any more."""
        while not await asyncio.to_thread(self._run.directory.retired, self.slot):
            await asyncio.sleep(_TELL_AGAIN_S)

    async def _end_ranks(self) -> None:
        """Kill the ranks that are known, and once they are gone say so to whoever may wait for their answer."""
        processes = [*self._processes, *self._standing_by]
        try:
            await end_all(processes)
        except RuntimeError as error:
            logger.error("replica %d: %s", self.slot, error)
            return
        # Processes of the current incarnation that nobody has heard of yet may still live.
        if self._holder == self._number:
            await self._tell_end(self._holder)

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
        if after is ReplicaState.BACKOFF or after.is_end:
            self._run.turns.started(self.slot)
        if after is ReplicaState.RUNNING and before is not ReplicaState.RUNNING:
            self._running_since = self._run.clock.monotonic()

    # -- one incarnation -------------------------------------------------------------------------------------------

    async def _allocate(self) -> None:
        name = f"replica_{self.slot}"
        self._run.log.emit("allocation_requested", replica=self.slot)
        self._allocation = await self._run.scheduler.allocate(name)
        self._run.log.emit("allocation_granted", replica=self.slot, hosts=list(self._allocation.hosts))
        self._silent_since = None
        if not self._allocation.is_here:
            # A new part of a host, where nobody has written yet; on this machine it is the same segment as before.
            self._offsets = (0, 0)
        self.apply(Trigger.ALLOCATED)

    async def _live(self) -> Ending | ReplicaFailure:
        """One incarnation, from its processes' start to its end."""
        run, allocation = self._run, self._allocation
        assert allocation is not None, "whoever lives has hosts"
        self._number += 1
        self._trains.clear()
        run.turns.starts(self.slot)
        self._running_since = None
        self._generation = generation = run.generation
        self.has_left = False
        self.outer_step = generation.began_at
        self._incarnation = incarnation = Incarnation(
            config=run.config,
            run_dir=run.folder.path,
            slot=self.slot,
            number=self._number,
            joining=generation.barrier.released,
            lighthouse=run.lighthouse,
            host=allocation.address,
            place=allocation.place,
            fired=frozenset(run.fired),
            registry=run.registry,
            token=run.token,
            resume=generation.snapshot,
            restores=generation.number,
            environment=self._environment() if allocation.is_here else (),
        )
        try:
            return await generation.unless_over(self._train_to_end(incarnation, generation))
        except SupervisorLost as lost:
            return self._supervisor_lost(lost)

    async def _train_to_end(self, incarnation: Incarnation, generation: Generation) -> Ending | ReplicaFailure:
        supervisor = self._ensure_supervisor()
        start = supervisor.start(incarnation)
        failure: ReplicaFailure | None = await (start if incarnation.joining else self._unless_too_late(start))
        if failure is not None:
            return failure
        self.apply(Trigger.READY)
        if not incarnation.joining:
            generation.holders.add(self.slot)
            await generation.barrier.arrive(self.slot)
            if self.slot not in generation.barrier.released_slots:
                return self._too_late()
            self.apply(Trigger.RELEASED)
        outcome: Ending | ReplicaFailure = await supervisor.ask("train")
        return outcome

    async def _save_what_nobody_else_holds(self) -> None:
        """The replica has left and is about to be ended. If it is the last one with the run's state, that must be on
        the disk before, so that all can begin again from it."""
        run, generation = self._run, self._generation
        if generation.holders - {self.slot} or run.config.diloco.engine != "elastic":
            return
        if self.outer_step <= generation.began_at:
            # There is nothing new in it.
            return
        bound_s = run.config.recovery.save_hang_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                await generation.unless_over(self.save(whole=True))
        except TimeoutError:
            logger.warning("replica %d did not write its state within %.0f s", self.slot, bound_s)
        except GenerationOver:
            logger.info("replica %d's state is not wanted any more: all begin anew", self.slot)

    async def _begin_anew(self) -> None:
        """All replicas go back to a durable snapshot, this one with them, whatever it was doing."""
        await self.pump()
        self._trains.clear()
        self._run.log.emit(
            "restart_scheduled",
            replica=self.slot,
            incarnation=self._number + 1,
            level=AskToRestore.level,
            delay_s=0.0,
        )
        self.apply(Trigger.RESTORE if self._allocation is not None else Trigger.REALLOCATE)

    def _environment(self) -> tuple[tuple[str, str], ...]:
        settings = self._run.config.orchestrator
        environment = trainer_environment(
            replicas=settings.replicas,
            procs=settings.procs_per_replica,
            cores=os.cpu_count() or 1,
            interface="lo",
        )
        environment |= find(os.environ).share(self.slot, settings.procs_per_replica)
        return tuple(environment.items())

    async def _unless_too_late(self, start: Awaitable[ReplicaFailure | None]) -> ReplicaFailure | None:
        """Wait for a start that the cold start waits for; the release without this slot makes it a failure."""
        starting = asyncio.ensure_future(start)
        released = asyncio.ensure_future(self._generation.barrier.wait())
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
                config=self._run.config,
                scheduler=self._run.scheduler,
                clock=self._run.clock,
            )
        return self._supervisor

    def _supervisor_lost(self, lost: SupervisorLost) -> ReplicaFailure:
        supervisor, self._supervisor = self._supervisor, None
        silence_s = 0.0
        if supervisor is not None:
            self._silent_since = supervisor.heard_at
            if self._silent_since is not None:
                silence_s = self._run.clock.monotonic() - self._silent_since
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
            detect_s=round(silence_s, 3),
        )
        self._log_failure(failure)
        return failure

    def _preempted(self) -> ReplicaFailure:
        """The replica has left because its host is about to be taken away."""
        failure = ReplicaFailure(cause="preempted", rank=None, step=self._step, error=PREEMPTED)
        self._log_failure(failure)
        return failure

    def _log_failure(self, failure: ReplicaFailure) -> None:
        self._run.log.emit("failure_detected", replica=self.slot, incarnation=self._number, **failure.fields())

    def _follow(self, event: Record) -> None:
        """Let the slot's state follow what its current incarnation reports."""
        name = event["event"]
        if name == "fault_injected":
            self._run.fired.add(event["spec"])
            if event["kind"] == "host" and self._allocation is not None:
                self._run.scheduler.strike(self._allocation)
        if name == "standby_started":
            # Whichever incarnation it was begun beside.
            self._standing_by = list(zip(event["pids"], event["created"], strict=True))
        if event.get("incarnation") != self._number:
            return
        if name in _TELLS_OUTER_STEP:
            self.outer_step = event["outer_step"]
        if name == "procs_started":
            self._processes = list(zip(event["pids"], event["created"], strict=True))
            self._holder = self._number
        elif name == "first_step":
            self._run.turns.started(self.slot)
            self._trains.set()
        elif name in _LIFECYCLE_OF_EVENT:
            self.apply(_LIFECYCLE_OF_EVENT[name])
            if name == "heal_started":
                self._generation.holders.discard(self.slot)
            elif name == "heal_finished":
                self._generation.holders.add(self.slot)

    async def _keep_standby(self) -> None:
        """Have a warm standby whenever the replica trains, made when no replica starts."""
        pause_s = _STANDBY_PAUSE_S
        while True:
            await self._trains.wait()
            if await self._standby_served():
                pause_s = _STANDBY_PAUSE_S
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _STANDBY_PAUSE_MAX_S)

    async def _standby_served(self) -> bool:
        """Have a standby until it is gone; False if it was lost, or could not be made."""
        try:
            async with self._run.turns.turn():
                if not self._trains.is_set():
                    return True
                supervisor = self._supervisor
                if supervisor is None:
                    return False
                await supervisor.ask("make_standby")
            return bool(await supervisor.ask("standby_gone"))
        except SupervisorLost as lost:
            logger.info("replica %d: its standby went with its supervisor: %s", self.slot, lost)
            return False

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
        history = tuple(self._failures)
        self._failures.append(failure)
        self._generation.holders.discard(self.slot)
        if self._is_draining():
            return self._interrupted(failure)
        decision = decide(
            failure,
            history,
            live=self._others_live(self.slot),
            min_replicas=run.config.lighthouse.min_replicas,
            recovery=run.config.recovery,
            jitter=run.jitter.random(),
        )
        match decision:
            case AskToRestore():
                self._generation.ask_to_restore(Plea(cause=decision.cause, reason=decision.reason))
                if failure.cause == "host_lost":
                    await self._give_hosts_back(failure.cause, failed=True)
                await self._generation.over()
                await self._begin_anew()
                return None
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
                if isinstance(decision, Reallocate):
                    # Before the pause: peers may have to wait until nothing is left of it.
                    is_leaving = failure.cause == "preempted" and not self._run.scheduler.is_local
                    await self._give_hosts_back(failure.cause, failed=decision.exclude_host or is_leaving)
                await self._pause(decision.delay_s)
                if self._is_draining():
                    return self._interrupted(failure)
                self.apply(Trigger.RESTART if isinstance(decision, RestartInPlace) else Trigger.REALLOCATE)
                return None

    async def _pause(self, delay_s: float) -> None:
        """Before a restart. While nobody holds the state there is nobody to join, and if all begin anew, the standby is
        wanted for that."""

        async def pausing() -> None:
            await asyncio.sleep(delay_s)
            await self._generation.worth_joining()

        with contextlib.suppress(GenerationOver):
            await self._generation.unless_over(pausing())

    async def _give_hosts_back(self, cause: str, *, failed: bool = False) -> None:
        if cause in _HOSTS_ARE_LOST and self._allocation is not None:
            self._run.log.emit(
                "allocation_lost",
                replica=self.slot,
                incarnation=self._number,
                hosts=list(self._allocation.hosts),
                cause=cause,
            )
        await self.shut_down(failed=failed, surely=True)

    async def _retire(self, cause: str) -> SlotEnd:
        self._run.log.emit("replica_retired", replica=self.slot, incarnation=self._number, cause=cause)
        self.apply(Trigger.RETIRE)
        self._run.generation.barrier.give_up(self.slot)
        await self._give_hosts_back(cause)
        # Not before its processes are gone: from then on others read its data.
        if self._run.registry and not (
            self._run.scheduler.is_local and any(is_alive(process) for process in self._processes)
        ):
            self._telling = asyncio.ensure_future(self._tell_retired())
        return SlotEnd(state=self.state, cause=cause, reason=self._failures[-1].error)
