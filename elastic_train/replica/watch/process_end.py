"""How a process ended, from a wait status or from what Monarch's supervision says about it.

Apart from ``causes``, because supervisors need it and start without torch.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

_KILLED = re.compile(r"Killed\(sig=(\d+)\)")
_EXITED = re.compile(r"exited with non-zero code (-?\d+)")
_CRASHED = re.compile(r"crashed_ranks=\[([\d, ]*)\]")


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """How a process ended, as its supervisor reported it."""

    cause: str
    """``signal`` or ``proc_exit``."""
    signal: str | None = None
    """Name of the signal, such as SIGKILL."""
    error: str


def of_status(status: int) -> ProcessEnd:
    """How a process ended, from its wait status (``os.waitpid``)."""
    if os.WIFSIGNALED(status):
        return _by_signal(os.WTERMSIG(status))
    return _by_exit(os.WEXITSTATUS(status))


def crashed_ranks(report: str) -> list[int]:
    """The ranks that a report of Monarch's supervision speaks of."""
    found = _CRASHED.search(report)
    return [int(rank) for rank in found[1].split(",") if rank.strip()] if found else []


def of_process(report: str) -> ProcessEnd | None:
    """How a process ended according to Monarch's supervision; None if the report speaks of no process's end."""
    if killed := _KILLED.search(report):
        return _by_signal(int(killed[1]))
    if exited := _EXITED.search(report):
        return _by_exit(int(exited[1]))
    if "process exited cleanly" in report:
        return _by_exit(0)
    return None


def _by_signal(number: int) -> ProcessEnd:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return ProcessEnd(cause="signal", signal=name, error=f"killed by {name}")


def _by_exit(code: int) -> ProcessEnd:
    return ProcessEnd(cause="proc_exit", error=f"exited with code {code} before it had trained to the end")
