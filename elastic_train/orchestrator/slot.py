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
from typing import Any

from monarch.actor import ProcMesh

from elastic_train.clock import Clock
from elastic_train.config import RunConfig
from elastic_train.config.faults import FaultSpec
from elastic_train.events import EventLog, LineFile, Record
from elastic_train.futures import result, within
from elastic_train.lifecycle import IllegalTransition, ReplicaLifecycle, ReplicaState, Trigger
from elastic_train.orchestrator.accelerators import find
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.monarch_env import trainer_environment
from elastic_train.orchestrator.policy import Failure, Reallocate, RestartInPlace, Retire, Stop, decide
from elastic_train.orchestrator.runfolder import RunFolder
from elastic_train.orchestrator.scheduler import Allocation, Scheduler
from elastic_train.replica.actor import ReplicaActor, SegmentPart
from elastic_train.replica.failure import ReplicaFailure
from elastic_train.replica.process_end import of_process
from elastic_train.replica.process_watch import ProcessId
from elastic_train.replica.rank import Incarnation

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
"""How long a supervisor that is not busy may take to answer."""

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
    lighthouse: str = ""
    """The Lighthouse's address, once it is known."""
    fired: set[str] = field(default_factory=set)
    """Faults that have acted."""
    jitter: random.Random = field(default_factory=random.Random)


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
        self.finished = False
        """Whether this slot trained to the end itself and holds the last state."""
        self._number = -1
        self._incarnation: Incarnation | None = None
        self._allocation: Allocation | None = None
        self._actor: Any = None
        self._actor_mesh: ProcMesh | None = None
        self._processes: list[ProcessId] = []
        self._failures: list[Failure] = []
        self._running_since: float | None = None
        self._offsets = (0, 0)
        self._background: set[asyncio.Future[None]] = set()
        self._step = 0
        self._pumping = asyncio.Lock()

    @property
    def state(self) -> ReplicaState:
        return self.lifecycle.state

    async def run(self) -> SlotEnd:
        """Keep the slot training until it has trained to the end, or nothing more can be done about it."""
        while True:
            if self._allocation is None:
                await self._allocate()
            failure = await self._live()
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
            actor, incarnation = self._actor, self._incarnation
            if actor is None or incarnation is None:
                return
            while True:
                try:
                    part: SegmentPart = await asyncio.wait_for(
                        result(actor.read_segment.call_one(incarnation, self._offsets)), _ANSWER_S
                    )
                except Exception as error:
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
                subscriber(record)

    async def inject(self, spec: FaultSpec) -> bool:
        """Pass a fault on to the process it is meant for; False if there is none at the moment."""
        if self._actor is None:
            return False
        try:
            return bool(await asyncio.wait_for(result(self._actor.inject.call_one(spec)), _ANSWER_S))
        except Exception:
            # A fault that ends the ReplicaActor itself leaves no answer.
            return spec.kind == "replica_actor"

    async def save(self) -> bool:
        """Let the replica, which has trained to the end, write the last state of the run."""
        try:
            failure = await result(self._actor.save.call_one())
        except Exception as error:
            logger.warning("replica %d could not write the last state: %s", self.slot, error)
            return False
        await self.pump()
        return failure is None

    async def shut_down(self) -> None:
        """End the slot's processes and give its hosts back."""
        if self._actor is not None:
            grace = self._run.config.recovery.stop_timeout_s
            ending = self._actor.shut_down.call_one(grace)
            await within(grace + _ANSWER_S, ending, f"replica {self.slot} does not shut down")
            await self.pump()
        actor_mesh, self._actor, self._actor_mesh = self._actor_mesh, None, None
        if actor_mesh is not None:
            await within(_ANSWER_S, actor_mesh.stop("the run ends"), f"replica {self.slot}'s supervisor does not stop")
        if self._allocation is not None:
            await self._run.scheduler.release(self._allocation)
            self._allocation = None

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
            environment=self._environment(),
        )
        try:
            actor = self._ensure_actor()
            start = result(actor.start.call_one(incarnation, self._processes, actor))
            failure = await (start if incarnation.joining else self._unless_too_late(start))
            if failure is not None:
                return failure
            await self.pump()
            self.apply(Trigger.READY)
            if not incarnation.joining:
                await run.barrier.arrive(self.slot)
                self.apply(Trigger.RELEASED)
            return await result(actor.train.call_one())
        except Exception as error:
            return self._supervisor_lost(error)

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
        failure = ReplicaFailure(
            cause="start_timeout",
            rank=None,
            step=0,
            error=f"not ready within orchestrator.start_timeout_s = {self._run.config.orchestrator.start_timeout_s}",
        )
        self._log_failure(failure)
        return failure

    def _ensure_actor(self) -> Any:
        if self._actor is None:
            assert self._allocation is not None
            self._actor_mesh = self._allocation.mesh.spawn_procs(
                {"replica": 1}, name=f"replica_actor_{self.slot}_{self._number}"
            )
            self._actor = self._actor_mesh.spawn("replica", ReplicaActor, self.slot, self._run.folder.path)
        return self._actor

    def _supervisor_lost(self, error: Exception) -> ReplicaFailure:
        """The ReplicaActor is gone, and with it whoever could have written the failure down."""
        end = of_process(str(error))
        mesh, self._actor, self._actor_mesh = self._actor_mesh, None, None
        if mesh is not None:
            # Its process may have outlived the actor, and stopping a dead one can take long.
            stop = asyncio.ensure_future(
                within(_ANSWER_S, mesh.stop("its actor is gone"), "a supervisor does not stop")
            )
            self._background.add(stop)
            stop.add_done_callback(self._background.discard)
        failure = ReplicaFailure(
            cause=end.cause if end else "exception",
            rank=None,
            step=self._step,
            error=f"its ReplicaActor {end.error if end else 'failed: ' + str(error).strip().splitlines()[-1]}",
            signal=end.signal if end else None,
            traceback=None if end else str(error),
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
        elif name in _LIFECYCLE_OF_EVENT:
            self.apply(_LIFECYCLE_OF_EVENT[name])

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
        return SlotEnd(state=self.state, cause=cause, reason=self._failures[-1].error)
