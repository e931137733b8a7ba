"""Where the threads of real processes stand: of one that holds the GIL, one that was stopped, one that is gone."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_train.replica.watch.failure import ReplicaFailure
from elastic_train.replica.watch.process_watch import ProcessId
from elastic_train.replica.watch.stacks import RankProcess, stacks_tell_of, write_stacks
from tests.programs import running
from tests.waiting import wait_until

# A rank that has begun to build, and then does what its second argument says; one of its threads waits meanwhile.
PROGRAM = """
import ctypes, pathlib, signal, sys, threading
from elastic_train.replica.watch.stacks import STACK_SIGNAL, answer_in

entered = threading.Event()

def a_thread_that_waits():
    entered.set()
    threading.Event().wait()

def ready():
    entered.wait()
    print("ready", flush=True)

def holds_the_gil():
    ready()
    library = ctypes.PyDLL(None)
    while True:
        library.sleep(1000)

def waits():
    ready()
    sys.stdin.read()

def is_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
    waits()

if sys.argv[2] != "waits_in_the_standby":
    answer_in(pathlib.Path(sys.argv[1]))
if sys.argv[2] == "is_deaf":
    # Its only thread, or another one would answer.
    entered.set()
    is_deaf()
threading.Thread(target=a_thread_that_waits, daemon=True).start()
holds_the_gil() if sys.argv[2] == "holds_the_gil" else waits()
"""
LONG_S = 60.0


class Replica:
    """Ranks that do this or that, and what is asked of them."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.folder = run_dir / "stacks" / "replica_0.0"
        self.processes: list[subprocess.Popen[str]] = []
        self.ranks: list[RankProcess] = []
        self._open = contextlib.ExitStack()

    def close(self) -> None:
        self._open.close()

    def add(self, does: str) -> "subprocess.Popen[str]":
        answer = self._run_dir / "segments" / f"rank_{len(self.ranks)}.stacks"
        process = self._open.enter_context(running(PROGRAM, answer, does))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        identity: ProcessId = (process.pid, psutil.Process(process.pid).create_time())
        self.processes.append(process)
        self.ranks.append(RankProcess(rank=len(self.ranks), process=identity, answer=answer))
        return process

    def stop(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(self.processes[rank].pid).status() == psutil.STATUS_STOPPED)

    def write(self, patience_s: float = LONG_S) -> list[str]:
        """What the files say, by rank."""
        write_stacks(self.folder, self.ranks, "replica 0 failed: hang", patience_s=patience_s)
        return [(self.folder / f"rank_{each.rank}.txt").read_text() for each in self.ranks]


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    made = Replica(tmp_path)
    yield made
    made.close()


def test_a_rank_that_holds_the_gil_says_where_it_does(replica: Replica) -> None:
    process = replica.add("holds_the_gil")

    (text,) = replica.write()

    assert text.startswith(f"replica 0 failed: hang\nrank 0, process {process.pid}, at 20")
    assert " in holds_the_gil\n" in text
    assert " in a_thread_that_waits\n" in text
    assert "\n\nWhat the kernel says\n\nstate: " in text
    assert "\nmain thread: " in text
    assert process.poll() is None


def test_all_ranks_are_written_down_not_only_the_one_that_hangs(replica: Replica) -> None:
    for does in ("waits", "holds_the_gil", "waits"):
        replica.add(does)

    texts = replica.write()

    assert [" in holds_the_gil\n" in text for text in texts] == [False, True, False]
    assert [" in waits\n" in text for text in texts] == [True, False, True]


def test_a_stopped_rank_is_not_asked_and_its_state_is_told(replica: Replica) -> None:
    replica.add("waits")
    process = replica.add("waits")
    replica.stop(1)

    texts = replica.write()

    assert " in waits\n" in texts[0]
    assert "None: the process is in state T (stopped), by SIGSTOP or by a debugger." in texts[1]
    assert "\nstate: T (stopped)\nmain thread: " in texts[1]
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED)
    texts = replica.write()
    assert [text.count(" in waits\n") for text in texts] == [1, 1]


def test_a_process_that_is_gone_keeps_nobody_waiting(replica: Replica) -> None:
    replica.add("waits")
    process = replica.add("waits")
    process.kill()
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)

    texts = replica.write(patience_s=3600.0)

    assert " in waits\n" in texts[0]
    assert "None: the process was gone before it could be asked." in texts[1]
    assert texts[1].endswith("What the kernel says\n\nThe process is gone.\n")


def test_a_process_that_ends_in_between_keeps_nobody_waiting(replica: Replica) -> None:
    process = replica.add("is_deaf")
    pending = 1 << (signal.SIGRTMIN + 2 - 1)

    def kill_once_asked() -> None:
        status = Path(f"/proc/{process.pid}/status")
        wait_until(lambda: int(status.read_text().partition("ShdPnd:")[2].split()[0], 16) & pending)
        process.kill()

    killer = threading.Thread(target=kill_once_asked)
    killer.start()
    (text,) = replica.write(patience_s=3600.0)
    killer.join()

    assert "None: the process ended before it answered." in text


def test_a_rank_that_does_not_answer_is_given_up(replica: Replica) -> None:
    process = replica.add("is_deaf")

    (text,) = replica.write(patience_s=0.3)

    assert "None: the process did not answer within 0.3 s; it may be waiting inside the kernel." in text
    assert process.poll() is None


def test_a_process_without_a_handler_is_left_alone(replica: Replica) -> None:
    process = replica.add("waits_in_the_standby")

    (text,) = replica.write()

    assert "None: the process has not begun to build its trainer" in text
    assert process.poll() is None


def test_another_process_with_the_same_pid_is_not_asked(replica: Replica) -> None:
    replica.add("waits")
    rank = replica.ranks[0]
    replica.ranks[0] = RankProcess(rank=0, process=(rank.process[0], rank.process[1] - 60.0), answer=rank.answer)

    (text,) = replica.write()

    assert "the process was gone before it could be asked" in text
    assert rank.answer.read_text() == ""


def test_files_can_be_read_by_others_as_logs_can_and_raw_answers_cannot(replica: Replica) -> None:
    replica.add("waits")
    mask = os.umask(0o022)
    try:
        replica.write()
    finally:
        os.umask(mask)

    assert (replica.folder / "rank_0.txt").stat().st_mode & 0o777 == 0o644
    assert replica.ranks[0].answer.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("cause", "by", "ranks", "tell"),
    [
        ("hang", None, 1, True),
        ("comm_error", None, 2, True),
        ("comm_error", None, 1, False),
        ("signal", "SIGABRT", 2, True),
        ("signal", "SIGABRT", 1, False),
        ("signal", "SIGKILL", 2, False),
        ("exception", None, 2, False),
    ],
)
def test_stacks_are_taken_where_a_rank_may_hang(cause: str, by: str | None, ranks: int, tell: bool) -> None:
    failure = ReplicaFailure(cause=cause, rank=0, step=3, error="it failed", signal=by)

    assert stacks_tell_of(failure, ranks) is tell
