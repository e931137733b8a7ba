"""Start a run as a person would, look at it while it lives, and read what it left: for scripts and process tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from elastic_train.events import Record, read_all, read_records
from scripts.marked_process import MarkedProcess

ROOT = Path(__file__).resolve().parent.parent


def config_path(config: str) -> Path:
    """A path to a config file, or the name of one in ``configs/``."""
    path = Path(config)
    return path if path.exists() else ROOT / "configs" / config


class LaunchedRun(MarkedProcess):
    """One ``elastic-train run`` in a process of its own; leaving the context ends whatever is left of it."""

    def __init__(self, config: str, run_dir: Path, flags: Iterable[str] = (), *, prefix: Sequence[str] = ()) -> None:
        """
        Args:
            config: file name in ``configs/``, or a path.
            flags: further command line arguments, as in ``["--training.steps", "40"]``.
            prefix: words of a command that runs another one.
        """
        self.run_dir = run_dir
        self._event_offset = 0
        self._events: list[Record] = []
        command = [sys.executable, "-m", "elastic_train", "run", str(config_path(config)), "--run_dir", str(run_dir)]
        super().__init__([*prefix, *command, *flags], run_dir.parent / f"{run_dir.name}.console")

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

    def command(self, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """Another command of the command line about this run, as from a second terminal."""
        command = [sys.executable, "-m", "elastic_train", name, str(self.run_dir), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
