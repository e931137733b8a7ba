"""Start a run as a person would, look at it while it lives, and read what it left: for scripts and process tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import psutil

from elastic_train.events import Record, read_all, read_records

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05
_LEAVE_S = 3.0
_KILL_ROUNDS = 3
_GONE_S = 10.0
# Every process of a run inherits it, also one whose parent died and that is nobody's child any more.
_MARK = "ELASTIC_TRAIN_LAUNCHED_RUN"


def config_path(config: str) -> Path:
    """A path to a config file, or the name of one in ``configs/``."""
    path = Path(config)
    return path if path.exists() else ROOT / "configs" / config


class LaunchedRun:
    """One ``elastic-train run`` in a process of its own; leaving the context ends whatever is left of it."""

    def __init__(self, config: str, run_dir: Path, flags: Iterable[str] = ()) -> None:
        """
        Args:
            config: file name in ``configs/``, or a path.
            flags: further command line arguments, as in ``["--training.steps", "40"]``.
        """
        self.run_dir = run_dir
        self._mark = uuid.uuid4().hex
        self._event_offset = 0
        self._events: list[Record] = []
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.console = run_dir.parent / f"{run_dir.name}.console"
        command = [sys.executable, "-m", "elastic_train", "run", str(config_path(config)), "--run_dir", str(run_dir)]
        with self.console.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, _MARK: self._mark},
            )

    def __enter__(self) -> LaunchedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def wait(self, timeout_s: float) -> int:
        """The exit code, once the run has ended.

        Raises:
            TimeoutError: it has not ended in time; the message shows the end of its console.
        """
        self.wait_until(lambda: self.process.poll() is not None, timeout_s)
        return self.process.wait()

    def wait_for_event(self, name: str, timeout_s: float, where: Callable[[Record], bool] = lambda _: True) -> Record:
        """The first event of that name for which ``where`` is true.

        Raises:
            TimeoutError: none came in time.
        """

        def found() -> bool:
            return self.process.poll() is not None or any(where(e) for e in self.events() if e["event"] == name)

        self.wait_until(found, timeout_s)
        match = next((e for e in self.events() if e["event"] == name and where(e)), None)
        if match is None:
            raise TimeoutError(f"the run ended without the event {name}:\n{self.tail()}")
        return match

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

    def events(self) -> list[Record]:
        """The event log so far."""
        while True:
            batch, offset = read_records(self.run_dir / "events.jsonl", self._event_offset)
            if offset == self._event_offset:
                return self._events
            self._event_offset = offset
            self._events += batch

    def metrics(self) -> list[Record]:
        """The metrics so far."""
        return read_all(self.run_dir / "metrics.jsonl")

    def tail(self, lines: int = 25) -> str:
        """The end of what the run printed."""
        return "\n".join(self.console.read_text(errors="replace").splitlines()[-lines:])

    def command(self, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """Another command of the command line about this run, as from a second terminal."""
        command = [sys.executable, "-m", "elastic_train", name, str(self.run_dir), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def processes(self) -> list[psutil.Process]:
        """Every process of the run that lives, whoever its parent is; zombies aside."""
        return [process for process in psutil.process_iter(["name"]) if self._is_mine(process)]

    def end(self) -> list[psutil.Process]:
        """End the run and everything that it left, by pid.

        Returns:
            Processes that were still there although the run had ended by itself: leaks.
        """
        leaks: list[psutil.Process] = []
        if self.process.poll() is not None:
            # What dies with the run may take a moment to be gone.
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
