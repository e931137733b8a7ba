"""Keeps the Lighthouse, and the registry beside it, where replicas look for them: starts them, watches them, and starts
them again at their old address when they are lost.

Replicas notice nothing but that they wait at a sync. So what is new must not differ from what is lost in anything that
they rely on: the addresses, the token, and what the registry knew of who has ended and who is given up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from elastic_train.config import EnvironmentProblem
from elastic_train.events import Record
from elastic_train.lighthouse.actor import Listening, Ports
from elastic_train.lighthouse.probe import answers
from elastic_train.orchestrator.end import RunEnd
from elastic_train.orchestrator.held_port import HeldPort
from elastic_train.orchestrator.lighthouse_process import LighthouseProcess
from elastic_train.orchestrator.scheduler.local import this_machine
from elastic_train.orchestrator.slot import RunContext
from elastic_train.peer_ckpt.roll import Roll
from elastic_train.replica.watch.process_end import ProcessEnd

logger = logging.getLogger(__name__)

_PROBE_S = 1.0
"""From one question whether it still answers to the next, and how long an answer may take."""
_PROBES = 3
"""Without an answer, at least: a controller that was stopped itself has only one question open."""
_GONE_S = 10.0
"""How long the kernel may take to remove a process that was killed."""
_TOKEN_BYTES = 32
# 2**64 times any pause is past every bound, and a larger exponent would overflow a float.
_LARGEST_EXPONENT = 64


class Served(Protocol):
    """One life of the process, as ``LighthouseProcess``."""

    async def start(self, ports: Ports, roll: Roll) -> Listening: ...

    async def ended(self) -> ProcessEnd: ...

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


class LighthouseKeeper:
    """Owns the process of the Lighthouse and the registry, through all its lives.

    Where ``lighthouse.address`` names a Lighthouse that somebody else runs, there is only the registry in it.
    """

    def __init__(self, run: RunContext, *, make: Callable[[int], Served] | None = None) -> None:
        """
        Args:
            make: makes a life of the process, given its number from 0; None: a real one.
        """
        self._run = run
        self._make = make
        self._served: Served | None = None
        self._lives = 0
        self._started_at = 0.0
        self._held: list[HeldPort] = []
        self._ports = Ports(lighthouse=run.config.lighthouse.port, registry=0)
        self._spent = 0
        """Losses that still count."""
        self._stopping: set[asyncio.Task[None]] = set()
        run.log.subscribe(self._act_on)

    async def start(self) -> None:
        """Start both for the first time; their addresses and the run's token are known from then on.

        Raises:
            EnvironmentProblem: they cannot listen.
        """
        run = self._run
        run.token = secrets.token_hex(_TOKEN_BYTES)
        self._ports = self._hold_ports()
        if self._make is None:
            allocation = this_machine("lighthouse", run.config.lighthouse.host)
            self._make = lambda number: LighthouseProcess(run, allocation, number)
        listening = await self._start(Roll())
        run.lighthouse, run.registry = listening.lighthouse, listening.registry
        self._ports = Ports(lighthouse=_port_of(listening.lighthouse), registry=_port_of(listening.registry))

    async def keep(self) -> RunEnd:
        """Start them again whenever they are lost; returns when that does not help any more."""
        settings, recovery, clock = self._run.config.lighthouse, self._run.config.recovery, self._run.clock
        while True:
            lost = await self._lost()
            self._discard()
            served_s = clock.monotonic() - self._started_at
            while True:
                self._run.log.emit("lighthouse_lost", cause=lost.cause, signal=lost.signal, error=lost.error)
                self._spent = max(0, self._spent - int(served_s / recovery.forgive_after_s)) + 1
                if self._spent > settings.restarts:
                    return self._given_up(lost)
                await asyncio.sleep(_pause(self._spent, recovery.backoff_initial_s, recovery.backoff_max_s))
                try:
                    # What the controller has heard last, so that nobody's end and no order is forgotten.
                    await self._start(self._run.directory.known)
                    break
                except EnvironmentProblem as error:
                    # It may listen at one of the ports already.
                    await self._discard()
                    lost, served_s = ProcessEnd(cause="exception", error=str(error)), 0.0

    async def close(self) -> None:
        """End the process, and give its ports back."""
        if self._served is not None:
            await self._served.stop()
        if self._stopping:
            await asyncio.wait(self._stopping)
        for port in self._held:
            port.close()

    async def _start(self, roll: Roll) -> Listening:
        assert self._make is not None, "it is started for the first time by start"
        # Known before it starts: whoever is interrupted in the middle still ends it.
        self._served = served = self._make(self._lives)
        self._lives += 1
        listening = await served.start(self._ports, roll)
        self._started_at = self._run.clock.monotonic()
        address, pid = listening.lighthouse, listening.process[0]
        self._run.log.emit("lighthouse_started", address=address, pid=pid, restarts=self._lives - 1)
        return listening

    async def _lost(self) -> ProcessEnd:
        """Returns when the process is gone, or was ended because it did not answer."""
        served = self._served
        assert served is not None, "somebody has started it"
        ended, silent = asyncio.ensure_future(served.ended()), asyncio.ensure_future(self._silence())
        try:
            await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            served.kill()
            await asyncio.wait({ended}, timeout=_GONE_S)
            return ProcessEnd(cause="hang", error=f"it did not answer for {silent.result():.1f} s")
        finally:
            ended.cancel()
            silent.cancel()

    async def _silence(self) -> float:
        """Seconds without an answer, once they are too many."""
        clock, since, questions = self._run.clock, 0.0, 0
        while True:
            asked = clock.monotonic()
            if await asyncio.to_thread(self._answers):
                questions = 0
            else:
                since = since if questions else asked
                questions += 1
                silent_s = clock.monotonic() - since
                if questions >= _PROBES and silent_s >= self._run.config.lighthouse.silence_timeout_s:
                    return silent_s
            await asyncio.sleep(_PROBE_S)

    def _answers(self) -> bool:
        """Whether both answer. What the registry says is kept for its successor."""
        heard = self._run.directory.refresh()
        return heard and (bool(self._run.config.lighthouse.address) or answers(self._run.lighthouse, _PROBE_S))

    def _discard(self) -> asyncio.Task[None]:
        """Let go of a life, whose remains may take long to clear away; gives what does that."""
        assert self._served is not None, "somebody has started it"
        served, self._served = self._served, None
        served.kill()
        stopping = asyncio.ensure_future(served.stop())
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        return stopping

    def _given_up(self, lost: ProcessEnd) -> RunEnd:
        what = "the registry of the replicas" if self._run.config.lighthouse.address else "the Lighthouse"
        often = f"lost {self._spent} times in a row" if self._spent > 1 else "gone"
        return RunEnd(status="failed", cause=lost.cause, reason=f"{what} is {often}: {lost.error}")

    def _hold_ports(self) -> Ports:
        settings = self._run.config.lighthouse
        try:
            wanted = [0] if settings.address else [0, settings.port]
            for port in wanted:
                self._held.append(HeldPort(settings.host, port))
        except OSError as error:
            remedy = "lighthouse.port to a free port, or to 0 for any" if self._held else "lighthouse.host to its own"
            raise EnvironmentProblem(
                f"this machine cannot listen on {settings.host}:{port} ({error.strerror}): set {remedy}"
            ) from error
        return Ports(registry=self._held[0].number, lighthouse=self._held[-1].number)

    def _act_on(self, event: Record) -> None:
        """A fault of kind lighthouse is written to the log by the rank that passes its place, and acts here."""
        if event["event"] == "fault_injected" and event["kind"] == "lighthouse" and self._served is not None:
            self._served.kill()


def _pause(spent: int, initial_s: float, max_s: float) -> float:
    """Seconds before a restart: none for a first loss, then doubling up to the bound."""
    return 0.0 if spent <= 1 else min(max_s, initial_s * 2.0 ** min(spent - 2, _LARGEST_EXPONENT))


def _port_of(address: str) -> int:
    return urlsplit(address).port or 0
