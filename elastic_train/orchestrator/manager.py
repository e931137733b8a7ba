"""The OrchestrationManager: starts the Lighthouse and the replicas, releases them, and ends the run.

It observes (events of all replicas), decides (``policy``) and acts (``slot``). It alone knows the whole run.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from elastic_train.config import ConfigError, digest
from elastic_train.config.faults import FaultSpec
from elastic_train.lifecycle import ReplicaState, Trigger
from elastic_train.metrics import RunFold
from elastic_train.orchestrator.control import ControlServer, Reply, Request
from elastic_train.orchestrator.drain import Drain
from elastic_train.orchestrator.end import RunEnd
from elastic_train.orchestrator.interruption import Interruption
from elastic_train.orchestrator.lighthouse_keeper import LighthouseKeeper
from elastic_train.orchestrator.restore import Restorer
from elastic_train.orchestrator.slot import ReplicaSlot, RunContext, SlotEnd

logger = logging.getLogger(__name__)

_PUMP_S = 0.2
_LOOK_S = 0.5

_IN_THE_RUN = frozenset({ReplicaState.RUNNING, ReplicaState.DRAINING})
"""States in which a replica may yet train to the end."""


class OrchestrationManager:
    """Owns the Lighthouse and the slots of one run."""

    def __init__(self, run: RunContext, name: str) -> None:
        self._run = run
        self._name = name
        self._fold = RunFold()
        run.log.subscribe(self._fold.apply)
        run.on_metrics.append(self._fold.apply_metrics)
        slots = range(run.config.orchestrator.replicas)
        self._slots = [ReplicaSlot(slot, run, self._others_live) for slot in slots]
        self._lighthouse = LighthouseKeeper(run)
        self._control = ControlServer(self._answer)
        self._background: list[asyncio.Task[None]] = []

    async def run(self, interruption: Interruption) -> RunEnd:
        """Train to the end of the run, or until it is interrupted. Nothing is left running afterwards."""
        config, log = self._run.config, self._run.log
        log.emit(
            "run_started",
            replicas=config.orchestrator.replicas,
            procs_per_replica=config.orchestrator.procs_per_replica,
            steps=config.training.steps,
            config_digest=digest(config),
            name=self._name,
            run_dir=str(self._run.folder.path),
        )
        end = RunEnd(status="failed", cause="exception", reason="the controller failed")
        try:
            await self._control.start()
            self._run.folder.announce_controller(self._control.socket)
            end = await self._until(interruption)
        finally:
            try:
                await self._shut_down(0.0 if interruption.is_hurried else self._run.config.recovery.stop_timeout_s)
            finally:
                log.emit(
                    "run_finished",
                    status=end.status,
                    cause=end.cause,
                    inner_step=self._fold.inner_step,
                    outer_step=self._fold.outer_step,
                    loss=self._fold.last_loss,
                )
        return end

    async def _until(self, interruption: Interruption) -> RunEnd:
        training, asked = asyncio.ensure_future(self._train()), asyncio.ensure_future(interruption.asked())
        drain = Drain(self._run, self._slots, self._fold, self._pump_all)
        tasks: list[asyncio.Future[Any]] = [training, asked]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                return training.result()
            draining = asyncio.ensure_future(drain.run(training))
            ends = [draining, asyncio.ensure_future(interruption.hurried())]
            tasks += ends
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()
            # Its last sync may have been the run's last.
            if training.done() and training.result().status == "succeeded":
                return training.result()
            return RunEnd(status="interrupted")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _train(self) -> RunEnd:
        await self._lighthouse.start()
        slots = {asyncio.ensure_future(slot.run()): slot for slot in self._slots}
        pumps = [self._pump(slot) for slot in self._slots]
        self._background = [asyncio.ensure_future(work) for work in (*pumps, self._random_faults())]
        restorer = Restorer(self._run, self._slots, self._pump_all)
        ends = [asyncio.ensure_future(end) for end in (self._follow(slots), self._lighthouse.keep(), restorer.keep())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in (*slots, *ends):
                task.cancel()
            await asyncio.gather(*slots, *ends, return_exceptions=True)

    async def _follow(self, slots: dict[asyncio.Task[SlotEnd], ReplicaSlot]) -> RunEnd:
        """Wait for the slots to end; once one has trained to the end, the others soon must."""
        loop = asyncio.get_running_loop()
        running = set(slots)
        finish_by: float | None = None
        last: SlotEnd | None = None
        while running:
            timeout = None if finish_by is None else _LOOK_S
            done, _ = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                last = task.result()
                if last.stops_run and not any(slot.finished for slot in self._slots):
                    return RunEnd(status="failed", cause=last.cause, reason=last.reason)
                if last.state is ReplicaState.FAILED:
                    self._run.log.emit("run_degraded", live=self._others_live(None))
            running -= done
            if running and any(slot.finished for slot in self._slots):
                await self._pump_all()
                finish_by = finish_by or loop.time() + self._run.config.orchestrator.finish_timeout_s
                # Whoever is not in the run any more has nobody left to get a state from.
                overdue = loop.time() >= finish_by
                for task in list(running):
                    if overdue or slots[task].state not in _IN_THE_RUN:
                        task.cancel()
                        running.discard(task)
                        slots[task].apply(Trigger.PEERS_FINISHED)
        if await self._save_last_state():
            return RunEnd(status="succeeded")
        if last is not None and last.cause is not None:
            return RunEnd(status="failed", cause=last.cause, reason=f"no replica is left: {last.reason}")
        return RunEnd(status="failed", cause="exception", reason="no replica could write the last state")

    async def _save_last_state(self) -> bool:
        """One of the replicas that trained to the end writes what they all hold; the next one if it cannot."""
        for slot in self._slots:
            if slot.finished and await slot.save(whole=not self._run.config.checkpoint.last_save_model_only):
                return True
        return False

    async def _shut_down(self, grace_s: float) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._pump_all()
        for slot in self._slots:
            if not slot.state.is_end:
                slot.apply(Trigger.STOP)
        for ended in await asyncio.gather(*(slot.shut_down(grace_s) for slot in self._slots), return_exceptions=True):
            if isinstance(ended, BaseException):
                logger.error("a replica could not be shut down", exc_info=ended)
        await self._lighthouse.close()
        await self._control.close()

    def _others_live(self, slot: int | None) -> int:
        return sum(1 for other in self._slots if other.slot != slot and not other.state.is_end)

    # -- while it runs -----------------------------------------------------------------------------------------------

    async def _pump(self, slot: ReplicaSlot) -> None:
        while True:
            try:
                await slot.pump()
            except Exception:
                logger.exception("replica %d: merging its events failed, and is tried again", slot.slot)
            await asyncio.sleep(_PUMP_S)

    async def _pump_all(self) -> None:
        for ended in await asyncio.gather(*(slot.pump() for slot in self._slots), return_exceptions=True):
            if isinstance(ended, Exception):
                logger.error("merging the events of a replica failed", exc_info=ended)

    async def _random_faults(self) -> None:
        """Faults at random, reproducible from the seed as far as the replicas' states allow."""
        settings = self._run.config.faults
        if settings.every_s <= 0:
            return
        await self._run.generation.barrier.wait()
        chance = random.Random(settings.seed)
        while True:
            await asyncio.sleep(settings.every_s * chance.uniform(0.5, 1.5))
            replica = chance.randrange(len(self._slots))
            rank = chance.randrange(self._run.config.orchestrator.procs_per_replica)
            kind = chance.choice(settings.kinds)
            if self._slots[replica].state is ReplicaState.RUNNING:
                await self._slots[replica].inject(FaultSpec(replica=replica, rank=rank, step=0, kind=kind))

    async def _answer(self, request: Request) -> Reply:
        match request["op"]:
            case "inject":
                return await self._inject(request)
            case other:
                return {"ok": False, "text": f"no such request: {other}"}

    async def _inject(self, request: Request) -> Reply:
        try:
            spec = FaultSpec.parse(f"{request['replica']}.{request['rank']}@0/{request['point']}:{request['kind']}")
        except ConfigError as error:
            return {"ok": False, "text": str(error)}
        ranks = self._run.config.orchestrator.procs_per_replica
        if spec.replica >= len(self._slots) or spec.rank >= ranks:
            return {
                "ok": False,
                "text": f"there are {len(self._slots)} replicas of {ranks} ranks, counted from 0",
            }
        if spec.kind == "host" and self._run.scheduler.is_local:
            return {"ok": False, "text": "the replicas run on the controller's own host, which may not fail"}
        self._run.log.emit("control", request="inject", replica=spec.replica, rank=spec.rank, kind=spec.kind)
        slot = self._slots[spec.replica]
        # One that is on its way back would take it later, when nobody expects it any more.
        if slot.state is ReplicaState.RUNNING and await slot.inject(spec):
            return {
                "ok": True,
                "text": f"replica {spec.replica} rank {spec.rank}: {spec.kind} at the next {spec.point}",
            }
        return {"ok": False, "text": f"replica {spec.replica} is {slot.state} and cannot take a fault now"}
