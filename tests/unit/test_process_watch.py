import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from elastic_train.replica.watch.process_end import ProcessEnd, of_status
from elastic_train.replica.watch.process_watch import ProcessId, ProcessWatch, is_alive, kill_process
from tests.programs import running
from tests.waiting import wait_until

# Starts a child, says its pid and reaps it when it ends, or never. The child ends with the code that it is given.
PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "exit(int(input()))"])
print(child.pid, flush=True)
child.wait() if sys.argv[1] == "reaps" else signal.pause()
"""

# Told by Linux from 6.15 on.
needs_exit_info = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15),
    reason="this kernel does not tell how the process of another parent ended",
)


class Stranger:
    """A process that is no child of the test's."""

    def __init__(self, parent: "subprocess.Popen[str]") -> None:
        assert parent.stdin is not None
        assert parent.stdout is not None
        self._input = parent.stdin
        self.pid = int(parent.stdout.readline())
        self.id: ProcessId = (self.pid, psutil.Process(self.pid).create_time())

    def end(self, code: int) -> None:
        self._input.write(f"{code}\n")
        self._input.flush()


@contextmanager
def stranger(parent: str = "reaps") -> Iterator[Stranger]:
    with running(PARENT, parent) as process:
        yield Stranger(process)


@contextmanager
def watching(process: ProcessId) -> Iterator[ProcessWatch]:
    watch = ProcessWatch(process)
    try:
        yield watch
    finally:
        watch.close()


@needs_exit_info
@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_of_a_process_of_another_parent(code: int) -> None:
    with stranger() as process, watching(process.id) as watch:
        assert (watch.ended, watch.status()) == (False, None)

        process.end(code)

        wait_until(lambda: watch.status() is not None)
        status = watch.status()
        assert status is not None
        assert os.waitstatus_to_exitcode(status) == code
        assert of_status(status).error == f"exited with code {code} before it had trained to the end"
        assert watch.ended


@needs_exit_info
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_signal_that_ended_a_process_of_another_parent(number: signal.Signals) -> None:
    with stranger() as process, watching(process.id) as watch:
        os.kill(process.pid, number)

        status = wait_until(watch.status)
        assert of_status(status) == ProcessEnd(cause="signal", signal=number.name, error=f"killed by {number.name}")


def test_a_zombie_has_ended() -> None:
    with stranger("does not reap") as process, watching(process.id) as watch:
        assert is_alive(process.id)

        process.end(3)

        wait_until(lambda: watch.ended)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert not is_alive(process.id)


def test_another_process_with_the_same_pid_is_not_the_one() -> None:
    with stranger() as process:
        pid, created = process.id
        earlier = (pid, created - 60.0)

        with watching(earlier) as watch:
            assert watch.ended
        assert not is_alive(earlier)
        kill_process(earlier)
        assert is_alive(process.id)

        kill_process(process.id)
        wait_until(lambda: not is_alive(process.id))


def test_a_process_that_is_gone_before_it_is_watched() -> None:
    with stranger() as process:
        process.end(0)
        wait_until(lambda: not psutil.pid_exists(process.pid))

        with watching(process.id) as watch:
            assert (watch.ended, watch.status()) == (True, None)
        kill_process(process.id)


def test_a_closed_watch_tells_nothing_and_closes_again() -> None:
    with stranger() as process:
        watch = ProcessWatch(process.id)
        open_files = psutil.Process().num_fds()

        watch.close()
        watch.close()

        assert psutil.Process().num_fds() == open_files - 1
        assert watch.status() is None
