"""One life of the process that serves the Lighthouse and the registry."""

from __future__ import annotations

import asyncio
from typing import Any

from elastic_train.config import EnvironmentProblem
from elastic_train.futures import result, within
from elastic_train.lighthouse.actor import LighthouseActor, Listening, Ports
from elastic_train.orchestrator.scheduler import Allocation
from elastic_train.orchestrator.serving_process import serving_command
from elastic_train.orchestrator.slot import RunContext
from elastic_train.peer_ckpt.roll import Roll
from elastic_train.peer_ckpt.tls import tls_of
from elastic_train.replica.watch.process_end import ProcessEnd, of_process, of_status
from elastic_train.replica.watch.process_watch import ProcessWatch, kill_process

_LOOK_S = 0.1
_STOP_S = 10.0
_TOLD_S = 1.5
"""How long the kernel, or Monarch, may take to tell how the process has ended."""


class LighthouseProcess:
    """The controller's end of it."""

    def __init__(self, run: RunContext, allocation: Allocation, number: int) -> None:
        """
        Args:
            number: which life it is, from 0.
        """
        self._run = run
        self._mesh = allocation.mesh.spawn_procs(
            {"lighthouse": 1}, name=f"lighthouse_{number}", bootstrap_command=serving_command()
        )
        self._actor: Any = self._mesh.spawn(
            "lighthouse",
            LighthouseActor,
            run.config.lighthouse,
            run.token,
            tls_of(run.config.peer_ckpt),
            run.folder.lighthouse_log,
        )
        self._watch: ProcessWatch | None = None

    async def start(self, ports: Ports, roll: Roll) -> Listening:
        """Let it listen.

        Raises:
            EnvironmentProblem: it does not.
        """
        settings = self._run.config.lighthouse
        try:
            listening: Listening = await asyncio.wait_for(
                result(self._actor.start.call_one(ports, roll)), self._run.config.orchestrator.start_timeout_s
            )
        except TimeoutError as error:
            raise EnvironmentProblem("the Lighthouse's process does not start: see logs/ in the run folder") from error
        except Exception as error:
            if settings.address:
                raise EnvironmentProblem(
                    f"the registry of the replicas cannot listen on {settings.host}: "
                    "set lighthouse.host to an address of this machine"
                ) from error
            raise EnvironmentProblem(
                f"the Lighthouse cannot listen on {settings.host}:{ports.lighthouse}: "
                "set lighthouse.port to a free port, or to 0 for any"
            ) from error
        self._watch = ProcessWatch(listening.process)
        return listening

    async def ended(self) -> ProcessEnd:
        """Returns when the process is gone, and how it ended, by the kernel or by Monarch's report."""
        serving, watch = asyncio.ensure_future(result(self._actor.serve.call_one())), self._watch
        try:
            while not serving.done() and not (watch is not None and watch.ended):
                await asyncio.wait({serving}, timeout=_LOOK_S)
            for _ in range(round(_TOLD_S / _LOOK_S)):
                if watch is not None and (status := watch.status()) is not None:
                    return of_status(status)
                if serving.done() and (end := of_process(str(serving.exception()))):
                    return end
                await asyncio.sleep(_LOOK_S)
            said = str(serving.exception()) if serving.done() else "its process is gone, and nobody saw how"
            return ProcessEnd(cause="exception", error=said)
        finally:
            serving.cancel()

    def kill(self) -> None:
        """End it at once, whatever it does."""
        if self._watch is not None:
            kill_process(self._watch.process)

    async def stop(self) -> None:
        """End it, if it lives, and forget it."""
        if self._watch is None or not self._watch.ended:
            await within(_STOP_S, self._actor.shut_down.call_one(), "the Lighthouse does not stop")
        await within(_STOP_S, self._mesh.stop("it is done with"), "the Lighthouse's process does not end")
        self.kill()
        if self._watch is not None:
            self._watch.close()
