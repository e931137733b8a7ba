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
from elastic_train.replica.trainer_actor import NoticeActor, ProcessActor, WarmingActor
from elastic_train.replica.watch.process_watch import ProcessId, ProcessWatch, end_all, is_alive

_STOP_S = 30.0
_LOOK_AT_SILENCE_S = 0.1

_stopping: set[asyncio.Task[None]] = set()
"""Nobody else holds on to them."""


class Procs:
    """One process per rank."""

    def __init__(self, name: str, ranks: int, environment: Mapping[str, str]) -> None:
        """Begins to start them."""
        command = default_bootstrap_cmd().with_env(dict(environment))
        command.args = ["-m", "elastic_train.replica.rank_process"]
        self.mesh: Any = this_host().spawn_procs({"gpus": ranks}, name=name, bootstrap_command=command)
        self.actor: Any = self.mesh.spawn("process", ProcessActor)
        """Answers for each process, also while its trainer is busy."""
        self.notices: Any = self.mesh.spawn("notices", NoticeActor)
        """Tells each process to leave, and hears what it is told from outside."""
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

    async def warm(self) -> None:
        """Let all of them import what a trainer needs; meanwhile they answer."""
        await result(self.mesh.spawn("warmer", WarmingActor).warm.call())

    async def answer(self, timeout_s: float) -> bool:
        """Whether all of them answer within that time; one that was stopped does not, nor one that has ended."""
        answers = asyncio.ensure_future(result(self.actor.identity.call()))
        deadline = time.monotonic() + timeout_s
        try:
            while self.all_alive and time.monotonic() < deadline:
                done, _ = await asyncio.wait({answers}, timeout=_LOOK_AT_SILENCE_S)
                if done:
                    return answers.exception() is None
            return False
        finally:
            answers.cancel()

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
