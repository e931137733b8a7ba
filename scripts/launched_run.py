"""Start a run as a person would, look at it while it lives, and read what it left: for scripts and process tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import psutil

from elastic_train.events import Record, read_all, read_records

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05


class LaunchedRun:
    """One ``elastic-train run`` in a process of its own; leaving the context ends whatever is left of it."""

    def __init__(self, config: str, run_dir: Path, flags: Iterable[str] = ()) -> None:
        """
        Args:
            config: file name in ``configs/``, or a path.
            flags: further command line arguments, as in ``["--training.steps", "40"]``.
        """
        self.run_dir = run_dir
        self._known: dict[int, psutil.Process] = {}
        self._event_offset = 0
        self._events: list[Record] = []
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.console = run_dir.with_suffix(".console")
        path = Path(config) if Path(config).exists() else ROOT / "configs" / config
        with self.console.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic_train.cli", "run", str(path), "--run_dir", str(run_dir), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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
            self._remember_processes()
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

    def processes(self) -> list[psutil.Process]:
        """Every process that the run was seen to have and that still lives, zombies aside."""
        self._remember_processes()
        alive = []
        for process in self._known.values():
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.NoSuchProcess:
                continue
        return alive

    def end(self) -> list[psutil.Process]:
        """End the run and everything that it left, by pid.

        Returns:
            Processes that were still there although the run had ended by itself: leaks.
        """
        ended_by_itself = self.process.poll() is not None
        left = self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=10)
        return [process for process in left if ended_by_itself and process.pid != self.process.pid]

    def _remember_processes(self) -> None:
        """Children are found through their parent, so they have to be noted while it lives."""
        try:
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                self._known.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            return
