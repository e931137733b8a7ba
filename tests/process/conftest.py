"""Whole runs, started as a person starts them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.launched_run import LaunchedRun

# So that an assertion there says as much as one in a test.
pytest.register_assert_rewrite("tests.process.logs")

Launch = Callable[..., LaunchedRun]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts runs; at the end of the test none may have left a process.

    Without ``standby`` no time goes into processes that most tests never need.
    """
    runs: list[LaunchedRun] = []

    def start(config: str, *flags: str, name: str = "run", standby: bool = False) -> LaunchedRun:
        run = LaunchedRun(config, tmp_path / name, ["--recovery.standby", str(standby).lower(), *flags])
        runs.append(run)
        return run

    yield start
    leaks = [process for run in runs for process in run.end()]
    assert not leaks, f"runs that had ended left processes: {leaks}"
