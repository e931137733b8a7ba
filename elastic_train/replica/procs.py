"""The processes of one replica on this host: one proc mesh of Monarch's, and each of its processes by pid.

An incarnation has one set, and a warm standby, which waits to become the next incarnation, is another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from monarch.actor import default_bootstrap_cmd, this_host

from elastic_train.futures import result, within
from elastic_train.replica.trainer_actor import ProcessActor
from elastic_train.replica.watch.process_watch import ProcessId, ProcessWatch, is_alive, kill_process

_STOP_S = 30.0
_GONE_S = 10.0
"""How long the kernel may take to remove a process that was killed."""
_LOOK_S = 0.02

_stopping: set[asyncio.Task[None]] = set()
"""Nobody else holds on to them."""


class Procs:
    """One process per rank."""

    def __init__(self, name: str, ranks: int, environment: Mapping[str, str]) -> None:
        """Begins to start them."""
        self.mesh: Any = this_host().spawn_procs(
            {"gpus": ranks}, name=name, bootstrap_command=default_bootstrap_cmd().with_env(dict(environment))
        )
        self.actor: Any = self.mesh.spawn("process", ProcessActor)
        """Answers for each process, also while its trainer is busy."""
        self.identities: list[ProcessId] = []
        """By rank; empty until they have started."""
        self.watches: list[ProcessWatch] = []
        self._stop: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Wait until all of them run."""
        answers = await result(self.actor.identity.call())
        self.identities = [identity for _, identity in answers.items()]
        self.watches = [ProcessWatch(identity) for identity in self.identities]

    @property
    def all_alive(self) -> bool:
        """Whether none of them has ended."""
        return bool(self.identities) and all(is_alive(identity) for identity in self.identities)

    async def answer(self, timeout_s: float) -> bool:
        """Whether all of them answer within that time; one that was stopped does not."""
        try:
            await asyncio.wait_for(result(self.actor.identity.call()), timeout_s)
        except Exception:  # Monarch's errors, whatever they are, or the time
            return False
        return True

    async def end(self) -> None:
        """Kill all of them and see them gone.

        Raises:
            RuntimeError: one survives SIGKILL.
        """
        if self._stop is None:
            # Stopping a mesh with a dead or stopped process can take long; the kill below does not wait for it.
            self._stop = asyncio.ensure_future(within(_STOP_S, self.mesh.stop("replaced"), "a mesh does not stop"))
            _stopping.add(self._stop)
            self._stop.add_done_callback(_stopping.discard)
        if not self.identities:
            # Nobody knows yet what to kill: Monarch has to end it.
            await asyncio.wait({self._stop})
        watches, self.watches = self.watches, []
        for watch in watches:
            watch.close()
        await end_all(self.identities)


async def end_all(processes: list[ProcessId]) -> None:
    """Kill processes of this host and see them gone.

    Raises:
        RuntimeError: one survives SIGKILL.
    """
    for process in processes:
        kill_process(process)
    deadline = time.monotonic() + _GONE_S
    while any(is_alive(process) for process in processes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes survive SIGKILL: {processes}")
        await asyncio.sleep(_LOOK_S)
