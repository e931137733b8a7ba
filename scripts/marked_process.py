"""A command in a process of its own, and all the processes that come of it: found and ended by their ids."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_POLL_S = 0.05
_LEAVE_S = 10.0
_KILL_ROUNDS = 3
_GONE_S = 10.0
# Every process that comes of it inherits the mark, also one whose parent died and that is nobody's child any more.
_MARK = "ELASTIC_TRAIN_LAUNCHED_RUN"


class MarkedProcess:
    """A command that runs; leaving the context ends whatever is left of it."""

    def __init__(self, command: Sequence[str], console: Path, environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            console: file that takes what it prints.
            environment: variables that it gets besides those of this process.
        """
        self._mark = uuid.uuid4().hex
        self.console = console
        console.parent.mkdir(parents=True, exist_ok=True)
        with console.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {}), _MARK: self._mark},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def wait(self, timeout_s: float) -> int:
        """The exit code, once it has ended.

        Raises:
            TimeoutError: it has not ended in time; the message shows the end of its console.
        """
        self.wait_until(lambda: self.process.poll() is not None, timeout_s)
        return self.process.wait()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition, looking often.

        Raises:
            TimeoutError: it has not become true in time.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s} s:\n{self.tail()}")
            time.sleep(_POLL_S)

    def tail(self, lines: int = 25) -> str:
        """The end of what it printed."""
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """Every process of it that lives, whoever its parent is; zombies aside."""
        return [process for process in psutil.process_iter(["name"]) if self._is_mine(process)]

    def end(self) -> list[psutil.Process]:
        """End it and everything that it left, by pid.

        Returns:
            Processes that were still there although it had ended by itself: leaks.
        """
        leaks: list[psutil.Process] = []
        if self.process.poll() is not None:
            # What dies with it may take a moment to be gone.
            _, leaks = psutil.wait_procs(self.processes(), timeout=_LEAVE_S)
        self.process.kill()
        self.process.wait()
        # More than once: a process that dies may just have started another.
        for _ in range(_KILL_ROUNDS):
            left = self.processes()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=_GONE_S)
        return leaks

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            marked = process.environ().get(_MARK) == self._mark
            return marked and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False
