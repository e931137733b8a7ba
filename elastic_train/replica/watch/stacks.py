"""Where the threads of a replica's ranks stand, written down before a rank that gets nowhere is killed.

A rank that hangs answers no message and runs no Python code, but a signal reaches it: each rank has a handler of
faulthandler's, which is written in C and needs no GIL. A process that was stopped, or that waits inside the kernel,
runs no handler either; of that one there is only what the kernel says.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from elastic_train.replica.watch.failure import ReplicaFailure
from elastic_train.replica.watch.process_watch import ProcessId, is_alive

STACK_SIGNAL = signal.SIGRTMIN + 2
"""A real-time signal: torch and many tools use SIGUSR1 or SIGUSR2, and schedulers send them."""

_PATIENCE_S = 3.0
_LOOK_S = 0.02
_STOPPED = ("T", "t")


def answer_in(path: Path) -> None:
    """Let this process write where its threads stand to ``path`` whenever it gets ``STACK_SIGNAL``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # It stays open, as the handler can open nothing.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


def stacks_tell_of(failure: ReplicaFailure, ranks: int) -> bool:
    """Whether it shows in the stacks of a replica of so many ranks why it failed."""
    if failure.cause == "hang":
        return True
    # Of ranks that wait for one that hangs, the first may lose its patience: gloo raises an error, NCCL aborts.
    return ranks > 1 and (failure.cause == "comm_error" or failure.signal == "SIGABRT")


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """One that is to be asked."""

    rank: int
    process: ProcessId
    answer: Path
    """What it gave to ``answer_in``."""


def write_stacks(folder: Path, ranks: Sequence[RankProcess], why: str, *, patience_s: float = _PATIENCE_S) -> None:
    """Write where the threads of each rank stand to ``rank_<n>.txt`` in ``folder``.

    Args:
        why: the first line of each file.
        patience_s: how long all of them together have to answer.

    Raises:
        OSError: it could not be written.
    """
    asked = [_Asked(rank) for rank in ranks]
    deadline = time.monotonic() + patience_s
    while any(each.may_answer for each in asked) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    folder.mkdir(parents=True, exist_ok=True)
    for each in asked:
        (folder / f"rank_{each.rank}.txt").write_text(f"{why}\n{each.told(patience_s)}")


class _Asked:
    """A rank from the question on."""

    def __init__(self, rank: RankProcess) -> None:
        self.rank = rank.rank
        self._process = rank.process
        self._answer = rank.answer
        self._began = _size(rank.answer)
        self._asked_at = datetime.now().astimezone()
        # Before it is asked, for the question wakes it up.
        self._kernel = KernelView.of(rank.process)
        self._deaf = _deaf_threads(rank.process[0])
        self._was_asked = self._kernel is not None and self._kernel.handles and not self._kernel.is_stopped
        if self._was_asked:
            try:
                os.kill(rank.process[0], STACK_SIGNAL)
            except ProcessLookupError:
                self._was_asked = False

    @property
    def may_answer(self) -> bool:
        """Whether more is to be expected of it."""
        if not self._was_asked or not is_alive(self._process):
            return False
        # Nothing in an answer says where it ends; but the thread that gives it takes no second question meanwhile.
        return _size(self._answer) == self._began or _deaf_threads(self._process[0]) != self._deaf

    def told(self, patience_s: float) -> str:
        """The rest of its file."""
        head = f"rank {self.rank}, process {self._process[0]}, at {self._asked_at.isoformat(timespec='milliseconds')}"
        kernel = self._kernel.text if self._kernel is not None else "The process is gone."
        return f"{head}\n\nPython's threads\n\n{self._python(patience_s)}\n\nWhat the kernel says\n\n{kernel}\n"

    def _python(self, patience_s: float) -> str:
        answer = _read(self._answer)[self._began :].decode(errors="replace").strip()
        if answer:
            return answer
        if self._kernel is None:
            return "None: the process was gone before it could be asked."
        if self._kernel.is_stopped:
            return (
                f"None: the process is in state {self._kernel.state}, by SIGSTOP or by a debugger. Until it is "
                "continued it runs nothing, so it cannot say where it stands."
            )
        if not self._kernel.handles:
            return "None: the process has not begun to build its trainer, and would not understand the question."
        if not is_alive(self._process):
            return "None: the process ended before it answered."
        return f"None: the process did not answer within {patience_s:g} s; it may be waiting inside the kernel."


@dataclass(frozen=True, kw_only=True)
class KernelView:
    """What the kernel says about a process (proc(5))."""

    state: str
    """``S (sleeping)``, ``T (stopped)``, ``D (disk sleep)`` and so on."""
    handles: bool
    """Whether it has a handler for ``STACK_SIGNAL``; without one, the signal would end it."""
    threads: tuple[str, ...]
    """For each its name, state, and where in the kernel it waits; the main thread first."""

    @classmethod
    def of(cls, process: ProcessId) -> KernelView | None:
        """None: the process has ended."""
        status = _status(Path(f"/proc/{process[0]}"))
        if not status or not is_alive(process):
            return None
        return cls(
            state=_field(status, "State"),
            handles=_holds(status, "SigCgt"),
            threads=tuple(_thread(task) for task in _tasks(process[0])),
        )

    @property
    def is_stopped(self) -> bool:
        return self.state.startswith(_STOPPED)

    @property
    def text(self) -> str:
        """Lines for a person; threads that are alike are counted."""
        main, *others = self.threads or ("unknown",)
        counted = [f"{count:>11} x {thread}" for thread, count in Counter(others).most_common()]
        return "\n".join([f"state: {self.state}", f"main thread: {main}", *counted])


def _tasks(pid: int) -> list[Path]:
    """Its threads, the main one first."""
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
    except OSError:
        return []


def _deaf_threads(pid: int) -> set[str]:
    """Those that hold ``STACK_SIGNAL`` back, as each does that handles it."""
    return {task.name for task in _tasks(pid) if _holds(_status(task), "SigBlk")}


def _holds(status: str, signals: str) -> bool:
    """Whether ``STACK_SIGNAL`` is in that set of signals."""
    return bool(int(_field(status, signals) or "0", 16) >> (STACK_SIGNAL - 1) & 1)


def _thread(task: Path) -> str:
    status = _status(task)
    waits_in = _read(task / "wchan").decode(errors="replace")
    place = f", in {waits_in}" if waits_in not in ("", "0") else ""
    return f"{_field(status, 'Name')}: {_field(status, 'State')}{place}"


def _status(folder: Path) -> str:
    return _read(folder / "status").decode(errors="replace")


def _field(status: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.*)$", status, re.MULTILINE)
    return found[1].strip() if found else ""


def _read(path: Path) -> bytes:
    """What is there; nothing if it has gone, or may not be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
