import contextlib
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.config import DilocoConfig, RecoveryConfig, RunConfig
from elastic_train.replica.watch.beacon import Beacon, BeaconReader, Budgets, Phase, Sample, hang
from tests.programs import running
from tests.waiting import wait_until

BUDGETS = Budgets(
    build_s=600.0, first_step_s=700.0, step_s=90.0, quorum_s=80.0, evaluate_s=300.0, save_s=500.0, silence_s=15.0
)
SOON = replace(BUDGETS, silence_s=1.5)
NOW = 10_000.0

# The rank is in a step; then it does what its second argument says, while its main thread gets nowhere.
PROGRAM = """
import ctypes, pathlib, sys
from elastic_train.replica.watch.beacon import Beacon, Phase
beacon = Beacon(pathlib.Path(sys.argv[1]))
beacon.moved(Phase[sys.argv[2]], 7)
print("ready", flush=True)
exec(sys.argv[3])
"""
HOLDS_THE_GIL = "ctypes.PyDLL(None).sleep(1000)"
WAITS = "sys.stdin.read()"


@pytest.mark.parametrize(
    ("phase", "stuck_s", "silent_s", "words"),
    [
        (Phase.STEP, 0.0, 0.0, None),
        (Phase.STEP, 90.0, 15.0, None),
        (Phase.STEP, 90.5, 0.2, "did not move on for 90.5 s in phase step at step 7"),
        (Phase.SYNC, 89.0, 0.2, None),
        (Phase.SYNC, 91.0, 0.2, "did not move on for 91.0 s in phase sync at step 7"),
        (Phase.BUILD, 599.0, 0.2, None),
        (Phase.BUILD, 601.0, 0.2, "did not move on for 601.0 s in phase build at step 7"),
        (Phase.FIRST_STEP, 699.0, 0.2, None),
        (Phase.FIRST_STEP, 701.0, 0.2, "did not move on for 701.0 s in phase first_step at step 7"),
        (Phase.SAVE, 499.0, 0.2, None),
        (Phase.SAVE, 501.0, 0.2, "did not move on for 501.0 s in phase save at step 7"),
        (Phase.EVALUATE, 299.0, 0.2, None),
        (Phase.EVALUATE, 301.0, 0.2, "did not move on for 301.0 s in phase evaluate at step 7"),
        (Phase.QUORUM, 79.0, 0.2, None),
        (Phase.QUORUM, 81.0, 0.2, "did not move on for 81.0 s in phase quorum at step 7"),
        (Phase.IDLE, 9000.0, 0.2, None),
    ],
)
def test_how_long_a_living_rank_may_stand_still(
    phase: Phase, stuck_s: float, silent_s: float, words: str | None
) -> None:
    sample = Sample(phase=phase, step=7, progress_at=NOW - stuck_s, alive_at=NOW - silent_s)

    assert hang(sample, NOW, BUDGETS) == words


@pytest.mark.parametrize("phase", Phase)
def test_silence_is_a_hang_in_every_phase_and_a_start_gets_more_of_it(phase: Phase) -> None:
    silent_s = 60.5 if phase in (Phase.BUILD, Phase.FIRST_STEP) else 15.5
    sample = Sample(phase=phase, step=7, progress_at=NOW - silent_s, alive_at=NOW - silent_s)

    assert hang(replace(sample, alive_at=sample.alive_at + 1), NOW, BUDGETS) is None
    assert hang(sample, NOW, BUDGETS) == (
        f"ran no Python code for {silent_s} s in phase {phase.name.lower()} at step 7 "
        "(stopped, or something holds the GIL)"
    )


def test_a_phase_that_nobody_bounds_is_that_in_which_a_rank_has_nothing_to_do() -> None:
    assert [phase for phase in Phase if BUDGETS.of_phase(phase) is None] == [Phase.IDLE]


def test_a_config_gives_each_phase_its_budget() -> None:
    recovery = RecoveryConfig(
        start_hang_timeout_s=601.0,
        first_step_hang_timeout_s=602.0,
        hang_timeout_s=91.0,
        evaluate_hang_timeout_s=303.0,
        save_hang_timeout_s=504.0,
        silence_timeout_s=16.0,
    )

    budgets = Budgets.of(RunConfig(recovery=recovery))

    assert {phase: budgets.of_phase(phase) for phase in Phase} == {
        Phase.BUILD: 601.0,
        Phase.FIRST_STEP: 602.0,
        Phase.STEP: 91.0,
        Phase.SYNC: 91.0,
        Phase.QUORUM: 91.0,
        Phase.EVALUATE: 303.0,
        Phase.SAVE: 504.0,
        Phase.IDLE: None,
    }
    assert (budgets.of_silence(Phase.STEP), budgets.of_silence(Phase.FIRST_STEP)) == (16.0, 64.0)


def test_a_wait_that_cannot_be_looked_into_may_take_as_long_as_all_that_is_done_in_it() -> None:
    stock = RunConfig(diloco=DilocoConfig(engine="torchft"))

    assert Budgets.of(stock).of_phase(Phase.QUORUM) == 3600.0 + 300.0 + 90.0


def read(path: Path) -> Sample:
    sample = BeaconReader(path).read()
    assert sample is not None
    return sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segments" / "rank_0.beacon"


def test_a_reader_sees_where_the_rank_is(path: Path) -> None:
    assert BeaconReader(path).read() is None
    before = time.monotonic()
    beacon = Beacon(path)
    try:
        seen = [read(path)]
        for phase, step in ((Phase.IDLE, None), (Phase.STEP, 3), (Phase.QUORUM, None), (Phase.STEP, 0)):
            beacon.moved(phase, step)
            seen.append(read(path))
    finally:
        beacon.close()

    assert [(sample.phase, sample.step) for sample in seen] == [
        (Phase.BUILD, 0),
        (Phase.IDLE, 0),
        (Phase.STEP, 3),
        (Phase.QUORUM, 3),
        (Phase.STEP, 0),
    ]
    times = [sample.progress_at for sample in seen]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= time.monotonic()


def test_a_phase_inside_another_ends_where_it_began(path: Path) -> None:
    beacon = Beacon(path)
    try:
        beacon.moved(Phase.STEP, 5)
        before = read(path)
        with contextlib.suppress(KeyError), beacon.during(Phase.SYNC):
            inside = read(path)
            raise KeyError
        after = read(path)
    finally:
        beacon.close()

    assert (inside.phase, after.phase, after.step) == (Phase.SYNC, Phase.STEP, 5)
    assert before.progress_at < inside.progress_at < after.progress_at


def test_a_rank_that_waits_is_alive_but_does_not_move(path: Path) -> None:
    with running(PROGRAM, path, "STEP", WAITS) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        first = read(path)

        wait_until(lambda: read(path).alive_at > first.alive_at)

        later = read(path)
        assert (later.phase, later.step, later.progress_at) == (Phase.STEP, 7, first.progress_at)


def becomes_silent(path: Path, budgets: Budgets) -> str:
    return wait_until(lambda: hang(read(path), time.monotonic(), budgets) or "")


@pytest.mark.parametrize("phase", ["STEP", "QUORUM", "IDLE"])
def test_a_rank_that_holds_the_gil_becomes_silent(path: Path, phase: str) -> None:
    with running(PROGRAM, path, phase, HOLDS_THE_GIL) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"

        words = becomes_silent(path, SOON)

        assert words.startswith("ran no Python code for ")
        assert rank.poll() is None


def test_a_stopped_rank_becomes_silent_and_comes_back(path: Path) -> None:
    with running(PROGRAM, path, "QUORUM", WAITS) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"

        rank.send_signal(signal.SIGSTOP)
        becomes_silent(path, SOON)
        silent_since = read(path).alive_at
        rank.send_signal(signal.SIGCONT)

        wait_until(lambda: read(path).alive_at > silent_since)


def test_a_reader_never_meets_half_of_a_write(path: Path) -> None:
    """A sample of zeros, or of an old time in a new phase, would get a healthy rank killed."""
    busy = "while True: beacon.moved(Phase.STEP); beacon.moved(Phase.QUORUM)"
    with running(PROGRAM, path, "STEP", busy) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        reader = BeaconReader(path)
        began = wait_until(reader.read).progress_at

        samples = [reader.read() for _ in range(2000)]

    seen = [(sample.phase, sample.step, sample.progress_at) for sample in samples if sample is not None]
    assert len(seen) == len(samples)
    assert {(phase, step) for phase, step, _ in seen} <= {(Phase.STEP, 7), (Phase.QUORUM, 7)}
    times = [began, *(progress_at for _, _, progress_at in seen)]
    assert times == sorted(times)


def test_a_file_that_is_not_whole_yet_is_no_beacon(path: Path) -> None:
    Beacon(path).close()
    whole = path.read_bytes()

    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert BeaconReader(path).read() is None
