"""The last resort: when no replica holds the run's state any more, all of them begin again from the last durable
snapshot.

Nobody starts from new parameters after the first release. If there is no snapshot, or the budget for going back is
spent, the run ends and says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from elastic_train.config import ConfigError, EnvironmentProblem, RunConfig
from elastic_train.lifecycle import ReplicaState
from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.end import RunEnd
from elastic_train.orchestrator.generation import Generation, Plea
from elastic_train.orchestrator.policy import Loss, Stop, decide_for_all
from elastic_train.orchestrator.resume import find_snapshot
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext
from elastic_train.replica.durable.folder import Damaged, DurableSnapshot, check

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_HEALING_S = 10.0
"""How long one that was fetching the state may take to say that it has all of it, although its donor is gone."""


class Restorer:
    """Takes the run from one generation to the next."""

    def __init__(self, run: RunContext, slots: Sequence[ReplicaSlot], hear_all: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            hear_all: merges what all replicas have written into the log.
        """
        self._run = run
        self._slots = slots
        self._hear_all = hear_all
        self._first = run.generation.snapshot
        self._history: list[Loss] = []

    async def keep(self) -> RunEnd:
        """Release every generation, and begin the next one when it is lost; returns once none can help any more."""
        run = self._run
        while True:
            generation = run.generation
            end = await self._release(generation)
            if end is not None:
                return end
            began = run.clock.monotonic()
            plea = await self._lost(generation)
            healthy_s = run.clock.monotonic() - began
            snapshot, without = await asyncio.to_thread(last_snapshot, run.config, run.folder.path, self._first)
            loss = Loss(
                cause=plea.cause,
                reason=plea.reason,
                outer_step=snapshot.facts.outer_step if snapshot is not None else None,
                without=without,
                healthy_s=healthy_s,
            )
            decision = decide_for_all(loss, self._history, recovery=run.config.recovery, jitter=run.jitter.random())
            if isinstance(decision, Stop):
                return RunEnd(status="failed", cause=decision.cause, reason=decision.reason)
            assert snapshot is not None, "without one the decision is to stop"
            self._history.append(loss)
            run.log.emit("note", text=f"{plea.reason}: all replicas begin again from {snapshot.path}")
            await asyncio.sleep(decision.delay_s)
            self._begin(snapshot)

    async def _release(self, generation: Generation) -> RunEnd | None:
        """Let a generation begin; the end of the run, if it cannot."""
        orchestrator = self._run.config.orchestrator
        released = asyncio.ensure_future(
            generation.barrier.release_when_ready(
                orchestrator.start_timeout_s, self._run.config.lighthouse.min_replicas
            )
        )
        asked = asyncio.ensure_future(generation.asked())
        try:
            await asyncio.wait({released, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not released.done():
                # It has not trained a step: going back would change nothing.
                return RunEnd(status="failed", cause=asked.result().cause, reason=asked.result().reason)
            slots = released.result()
        except TimeoutError:
            return RunEnd(
                status="failed",
                cause="start_timeout",
                reason="fewer than lighthouse.min_replicas were ready within orchestrator.start_timeout_s",
            )
        finally:
            for task in (released, asked):
                task.cancel()
            await asyncio.gather(released, asked, return_exceptions=True)
        if (snapshot := generation.snapshot) is not None:
            self._run.log.emit(
                "run_restored",
                outer_step=snapshot.facts.outer_step,
                inner_step=snapshot.facts.step,
                path=str(snapshot.path),
                replicas=sorted(slots),
            )
        return None

    async def _lost(self, generation: Generation) -> Plea:
        """Why this generation cannot go on, once it cannot."""
        while True:
            await asyncio.sleep(_LOOK_S)
            at_its_end = any(slot.finished for slot in self._slots) or all(slot.state.is_end for slot in self._slots)
            if at_its_end or self._run.draining:
                continue
            if generation.plea is not None:
                return generation.plea
            if not generation.holders and await self._is_lost(generation) and (why := self._why_lost()) is not None:
                return why

    def _why_lost(self) -> Plea | None:
        """None: it does not show yet."""
        lost = "no replica holds the state any more"
        last = max(
            (slot.last_failure for slot in self._slots if slot.last_failure is not None),
            key=lambda failure: failure.t,
            default=None,
        )
        if last is not None:
            return Plea(cause=last.cause, reason=f"{lost}, since replica {last.slot} failed ({last.error})")
        if any(slot.state is ReplicaState.HEALING for slot in self._slots):
            return Plea(cause="heal_failed", reason=f"{lost}, as the last one was kept out of the average")
        return None

    async def _is_lost(self, generation: Generation) -> bool:
        """Whether nobody will turn out to hold the state after all: what replicas say is heard a little later."""
        clock = self._run.clock
        deadline = clock.monotonic() + _HEALING_S
        while True:
            await self._hear_all()
            if generation.holders or any(slot.finished for slot in self._slots):
                return False
            if clock.monotonic() > deadline or all(slot.state is not ReplicaState.HEALING for slot in self._slots):
                return True
            await asyncio.sleep(_LOOK_S)

    def _begin(self, snapshot: DurableSnapshot) -> None:
        before = self._run.generation
        barrier = ColdStart(len(self._slots))
        for slot in self._slots:
            if slot.state.is_end:
                barrier.give_up(slot.slot)
        self._run.generation = Generation(barrier=barrier, number=before.number + 1, snapshot=snapshot)
        before.end()


def last_snapshot(
    config: RunConfig, run_dir: Path, first: DurableSnapshot | None
) -> tuple[DurableSnapshot | None, str]:
    """The newest sound snapshot that a run can go back to, and if there is none, why and what to do about it.

    Reads every byte of it.

    Args:
        first: what the run itself began from; it is as good as long as the run has written none.
    """
    try:
        return find_snapshot(config, run_dir)[0], ""
    except (ConfigError, EnvironmentProblem) as problem:
        logger.warning("%s", problem)
    if first is not None:
        try:
            return check(first.path), ""
        except Damaged as damaged:
            logger.warning("%s", damaged)
    return None, f"there is no durable snapshot to go back to: {_advice(config)}"


def _advice(config: RunConfig) -> str:
    settings = config.checkpoint
    if config.diloco.engine != "elastic":
        return f'diloco.engine = "{config.diloco.engine}" writes none, only "elastic" does'
    if not settings.enable:
        return "set checkpoint.enable = true"
    return (
        f"lower checkpoint.interval = {settings.interval} if no multiple of it was reached; logs/controller.log says "
        "what was wrong with those that are there"
    )
