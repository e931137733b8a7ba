"""Faults on purpose, inside the process that they are meant for.

A plan is checked at named points of the training loop. A fault is written to the log before it acts, so that what
it kills cannot keep it secret, and so that a restarted incarnation knows that it has fired.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import NoReturn

from elastic_train.config.faults import FaultSpec

logger = logging.getLogger(__name__)


class InjectedError(RuntimeError):
    """Raised by a fault of kind ``exception``, and by one that strikes before there is what it acts on."""


class FaultPlan:
    """The faults meant for one rank; each fires once, at its first passage at or after its step."""

    def __init__(
        self,
        specs: Iterable[FaultSpec],
        *,
        replica: int,
        rank: int,
        announce: Callable[[FaultSpec], object],
        supervisor_pid: int,
    ) -> None:
        """
        Args:
            specs: faults that have not fired yet in this run; those for other ranks are ignored.
            announce: writes the fault to the log; called before it acts.
            supervisor_pid: process of the ReplicaActor, on the same host.
        """
        self._address = (replica, rank)
        self._pending = [spec for spec in specs if (spec.replica, spec.rank) == self._address]
        self._announce = announce
        self.abort_groups = _too_early("a communication fault", "communicate over")
        """Aborts every process group of this rank, as a failing collective library does; set once there are any."""
        self.poison = _too_early("a NaN", "poison")
        """Makes what this rank gives to the next average not finite; set once there are parameters."""
        self.flip_bit = _too_early("a bit flip", "flip a bit of")
        """Changes one bit of this rank's anchor, as failing memory does; set once there is one."""
        self.slow_down = _too_early("a slow rank", "slow down")
        """Makes every further inner step of this rank take longer; set once there are any to come."""
        self._supervisor_pid = supervisor_pid
        self._lock = threading.Lock()

    def arm(self, spec: FaultSpec) -> None:
        """Add a fault to a living process. Called from another thread."""
        with self._lock:
            self._pending.append(spec)

    def passing(self, point: str, step: int) -> None:
        """The main thread passes ``point`` at nominal step ``step``; whatever is due there acts now."""
        with self._lock:
            due = next((s for s in self._pending if s.point == point and s.step <= step), None)
            if due is None:
                return
            self._pending.remove(due)
        self._announce(due)
        self._act(due)

    def _act(self, spec: FaultSpec) -> None:
        match spec.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                # It stops the whole process, and this thread at once; sent to the process, this thread would run on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "exception":
                raise InjectedError(f"injected by {spec}")
            case "comms":
                self.abort_groups()
            case "hang":
                _hold_the_gil()
            case "nan":
                self.poison()
            case "bitflip":
                self.flip_bit()
            case "slow":
                self.slow_down()
            case "replica_actor":
                os.kill(self._supervisor_pid, signal.SIGKILL)
            case "lighthouse" | "host":
                # The controller ends them when it reads of the fault.
                return
            case other:
                raise ValueError(f"no way to inject a fault of kind {other!r} into a rank")


def _hold_the_gil() -> NoReturn:
    """Let no other Python thread of this process run."""
    library = ctypes.PyDLL(None)  # unlike CDLL, it keeps the GIL while it calls
    while True:
        # A signal ends a sleep.
        library.sleep(24 * 3600)


def _too_early(fault: str, aim: str) -> Callable[[], None]:
    def refuse() -> None:
        raise InjectedError(f"{fault} before there was anything to {aim}")

    return refuse


_installed: list[FaultPlan] = []


def install(plan: FaultPlan) -> None:
    """Make ``plan`` the one that faults from outside are added to. A process has one rank, so it has one plan."""
    _installed[:] = [plan]


def installed() -> FaultPlan | None:
    """The plan of the rank in this process; None before it is built."""
    return _installed[0] if _installed else None
