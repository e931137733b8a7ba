import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from elastic_train.config.faults import POINTS, FaultSpec
from elastic_train.replica import faults
from elastic_train.replica.faults import FaultPlan, InjectedError
from elastic_train.replica.watch.beacon import BeaconReader
from tests.programs import running
from tests.waiting import wait_until

# Announces its fault as a line, passes the point of it, and says so if it comes back.
PROGRAM = """
import sys
from elastic_train.config.faults import FaultSpec
from elastic_train.replica.faults import FaultPlan

spec = FaultSpec.parse(sys.argv[1])
plan = FaultPlan(
    [spec], replica=0, rank=0, announce=lambda spec: print(spec, flush=True), supervisor_pid=int(sys.argv[2])
)
plan.passing(spec.point, spec.step)
print("went on", flush=True)
"""


class Passages:
    """A plan of replica 1, rank 2, with what it announced and what came of passing a point."""

    def __init__(self, *texts: str) -> None:
        self.announced: list[str] = []
        self.plan = FaultPlan(
            (FaultSpec.parse(text) for text in texts),
            replica=1,
            rank=2,
            announce=lambda spec: self.announced.append(str(spec)),
            supervisor_pid=0,
        )

    def fires(self, point: str, step: int) -> bool:
        try:
            self.plan.passing(point, step)
        except InjectedError:
            return True
        return False


def test_a_fault_fires_once_at_the_first_passage_at_or_after_its_step() -> None:
    passages = Passages("1.2@5:exception")

    assert [step for step in (3, 4, 7, 8, 5) if passages.fires("step", step)] == [7]
    assert passages.announced == ["1.2@5:exception"]


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_fires_at_its_own_point_alone(point: str) -> None:
    passages = Passages(f"1.2@5/{point}:exception")

    assert [other for other in POINTS if passages.fires(other, 5)] == [point]


def test_faults_of_other_ranks_are_theirs() -> None:
    passages = Passages("0.2@1:exception", "1.0@1:exception", "2.1@1:exception")

    assert not any(passages.fires(point, 9) for point in POINTS)
    assert passages.announced == []


def test_faults_that_are_due_together_fire_one_a_passage() -> None:
    passages = Passages("1.2@5:exception", "1.2@5:exception", "1.2@6:exception")

    assert [passages.fires("step", 6) for _ in range(4)] == [True, True, True, False]
    assert passages.announced == ["1.2@5:exception", "1.2@5:exception", "1.2@6:exception"]


def test_the_exception_names_its_fault() -> None:
    with pytest.raises(InjectedError, match=r"injected by 1\.2@5/vote:exception"):
        Passages("1.2@5/vote:exception").plan.passing("vote", 5)


ACTS = {"comms": "abort_groups", "nan": "poison", "bitflip": "flip_bit", "slow": "slow_down"}


@pytest.mark.parametrize("kind", ACTS)
def test_what_the_trainer_provides_acts_once_after_it_was_announced(kind: str) -> None:
    passages = Passages(f"1.2@5:{kind}")
    acted: list[tuple[str, int]] = []
    for act in ACTS.values():
        setattr(passages.plan, act, lambda act=act: acted.append((act, len(passages.announced))))

    passages.plan.passing("step", 5)
    passages.plan.passing("step", 6)

    assert acted == [(ACTS[kind], 1)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("comms", "a communication fault before there was anything to communicate over"),
        ("nan", "a NaN before there was anything to poison"),
        ("bitflip", "a bit flip before there was anything to flip a bit of"),
        ("slow", "a slow rank before there was anything to slow down"),
    ],
)
def test_a_fault_that_comes_before_what_it_acts_on_is_an_error(kind: str, said: str) -> None:
    passages = Passages(f"1.2@5:{kind}")

    with pytest.raises(InjectedError, match=f"^{said}$"):
        passages.plan.passing("step", 5)

    assert passages.announced == [f"1.2@5:{kind}"]


def test_a_fault_armed_from_another_thread_fires_at_the_next_passage() -> None:
    passages = Passages()
    thread = threading.Thread(target=passages.plan.arm, args=[FaultSpec.parse("1.2@0:exception")])
    thread.start()
    thread.join()

    assert [passages.fires("step", step) for step in (41, 42)] == [True, False]


def test_many_threads_arm_while_the_rank_passes() -> None:
    passages = Passages()
    threads = [
        threading.Thread(target=passages.plan.arm, args=[FaultSpec.parse(f"1.2@{n}:exception")]) for n in range(8)
    ]
    for thread in threads:
        thread.start()

    wait_until(lambda: passages.fires("step", 9) and len(passages.announced) == 8)

    assert sorted(passages.announced) == [f"1.2@{n}:exception" for n in range(8)]


def test_the_installed_plan_is_the_one_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_installed", [])
    first, second = Passages().plan, Passages().plan
    assert faults.installed() is None

    faults.install(first)
    faults.install(second)

    assert faults.installed() is second


@pytest.mark.parametrize(
    ("kind", "code"),
    [("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV), ("exit", 3), ("exception", 1)],
)
def test_faults_that_end_their_process_are_announced_first(kind: str, code: int) -> None:
    with running(PROGRAM, f"0.0@5:{kind}", 0) as process:
        said, _ = process.communicate(timeout=60)
        assert (said, process.returncode) == (f"0.0@5:{kind}\n", code)


def test_a_stopped_process_stands_still_after_its_announcement() -> None:
    with running(PROGRAM, "0.0@5/reduce:stop", 0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0.0@5/reduce:stop\n"
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)

        process.send_signal(signal.SIGCONT)

        assert process.stdout.readline() == "went on\n"


def test_a_hanging_process_lives_and_runs_no_thread(tmp_path: Path) -> None:
    path = tmp_path / "beacon"
    beating = (
        "import pathlib, sys; from elastic_train.replica.watch.beacon import Beacon; Beacon(pathlib.Path(sys.argv[3]))"
    )
    with running(beating + PROGRAM, "0.0@5:hang", 0, path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0.0@5:hang\n"

        wait_until(lambda: (sample := BeaconReader(path).read()) and time.monotonic() - sample.alive_at > 1.0)

        assert process.poll() is None


def test_the_lighthouse_is_announced_and_left_to_the_controller() -> None:
    with running(PROGRAM, "0.0@5:lighthouse", 0) as process:
        said, _ = process.communicate(timeout=60)
        assert (said, process.returncode) == ("0.0@5:lighthouse\nwent on\n", 0)


def test_the_supervisor_is_the_one_that_dies() -> None:
    with running("input()") as supervisor, running(PROGRAM, "0.0@5:replica_actor", supervisor.pid) as process:
        said, _ = process.communicate(timeout=60)
        assert (said, process.returncode) == ("0.0@5:replica_actor\nwent on\n", 0)
        assert supervisor.wait(60) == -signal.SIGKILL
