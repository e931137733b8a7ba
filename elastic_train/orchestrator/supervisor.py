"""The controller's end of one ReplicaActor: asks it, and notices when it is gone."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from elastic_train.clock import Clock
from elastic_train.config import RunConfig
from elastic_train.futures import result, within
from elastic_train.orchestrator.host_watch import HostWatch
from elastic_train.orchestrator.scheduler import Allocation, Scheduler
from elastic_train.orchestrator.serving_process import serving_command
from elastic_train.replica.actor import ReplicaActor
from elastic_train.replica.watch.process_end import ProcessEnd, of_process, of_status
from elastic_train.replica.watch.process_watch import ProcessWatch

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_ANSWER_S = 10.0
"""How long a supervisor that is not busy may take to answer."""
_STARTED_S = 120.0
"""How long its process may take to start."""
_TOLD_S = 1.5
"""How long the kernel, or Monarch, may take to tell how a process has ended."""


class SupervisorLost(Exception):
    """The ReplicaActor is gone, and with it whoever could have written a failure down."""

    def __init__(self, end: ProcessEnd | None, text: str) -> None:
        super().__init__(text)
        self.end = end
        """How its process ended, if anybody saw it."""


class Supervisor:
    """One ReplicaActor in a process of its own."""

    def __init__(
        self,
        allocation: Allocation,
        name: str,
        slot: int,
        run_dir: Path,
        *,
        config: RunConfig,
        scheduler: Scheduler,
        clock: Clock,
    ) -> None:
        isolation_s = None if allocation.is_here else config.recovery.isolation_timeout_s
        command = serving_command("" if allocation.is_here else config.scheduler.python)
        self._mesh = allocation.mesh.spawn_procs({"replica": 1}, name=name, bootstrap_command=command)
        self._actor = self._mesh.spawn("replica", ReplicaActor, slot, run_dir, allocation.place, isolation_s)
        self._on_this_host = allocation.is_here
        self._host: HostWatch | None = None
        self._host_lost: asyncio.Future[str] | None = None
        if not allocation.is_here:
            self._host = HostWatch(
                lambda heard: result(self._actor.hold.call_one(heard)),
                lambda: scheduler.lost(allocation),
                timeout_s=config.recovery.host_timeout_s,
                start_s=config.scheduler.start_timeout_s,
                clock=clock,
            )
            self._host_lost = asyncio.ensure_future(self._host.lost())
        self._hosts = ", ".join(allocation.hosts)
        self._watch: ProcessWatch | None = None
        self._getting_known = asyncio.Lock()

    @property
    def heard_at(self) -> float | None:
        """When another host was last heard, by the clock; None on this one."""
        return None if self._host is None else self._host.heard_at

    async def ask(self, endpoint: str, *arguments: Any) -> Any:
        """What the actor answers, however long it takes.

        Raises:
            SupervisorLost: its process has ended, or the actor has failed.
        """
        async with self._getting_known:
            if self._on_this_host and self._watch is None:
                try:
                    self._watch = ProcessWatch(await asyncio.wait_for(self._answer("identity", ()), _STARTED_S))
                except TimeoutError as error:
                    raise SupervisorLost(None, f"its process did not start within {_STARTED_S:.0f} s") from error
        return await self._answer(endpoint, arguments)

    async def ask_soon(self, endpoint: str, *arguments: Any) -> Any:
        """What the actor answers to something that it can answer at once.

        Raises:
            SupervisorLost: as ``ask``.
            TimeoutError: it does not answer.
        """
        return await asyncio.wait_for(self.ask(endpoint, *arguments), _ANSWER_S)

    async def start(self, *arguments: Any) -> Any:
        """``ReplicaActor.start``, which is also told how its ranks address it."""
        return await self.ask("start", *arguments, self._actor)

    async def close(self, grace_s: float) -> None:
        """End the replica's processes; the actor goes on answering."""
        if self._host_lost is not None and self._host_lost.done():
            return
        ending = self._actor.shut_down.call_one(grace_s)
        await within(grace_s + _ANSWER_S, ending, "a replica does not shut down")

    async def stop(self) -> None:
        """End the actor's process."""
        if self._watch is not None:
            self._watch.close()
        if self._host_lost is not None:
            self._host_lost.cancel()
        await within(_ANSWER_S, self._mesh.stop("its slot is done with it"), "a supervisor does not stop")

    async def _answer(self, endpoint: str, arguments: tuple[Any, ...]) -> Any:
        work = asyncio.ensure_future(result(getattr(self._actor, endpoint).call_one(*arguments)))
        gone = asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise SupervisorLost(await self._end(""), "its process has ended")
        except SupervisorLost:
            raise
        except Exception as error:
            text = str(error).strip()
            raise SupervisorLost(await self._end(text), text.splitlines()[-1] if text else repr(error)) from error
        finally:
            work.cancel()
            gone.cancel()

    async def _ended(self) -> None:
        """Returns when the actor's process has ended; for one on another host, when that is lost: else Monarch has to
        tell."""
        if self._host_lost is not None:
            await asyncio.wait({self._host_lost})
            return
        while self._watch is None or not self._watch.ended:
            await asyncio.sleep(_LOOK_S)

    async def _end(self, report: str) -> ProcessEnd | None:
        """How the process ended, by the kernel or by Monarch's report; None if it runs, or nobody saw."""
        if self._host_lost is not None:
            # Monarch may hear of it first.
            await asyncio.wait({self._host_lost}, timeout=_TOLD_S)
            if self._host_lost.done() and not self._host_lost.cancelled():
                return ProcessEnd(
                    cause="host_lost", error=f"is lost with its host {self._hosts}: {self._host_lost.result()}"
                )
        if self._watch is not None:
            for _ in range(round(_TOLD_S / _LOOK_S)):
                if (status := self._watch.status()) is not None:
                    return of_status(status)
                if not self._watch.ended:
                    break
                await asyncio.sleep(_LOOK_S)
        return of_process(report)
