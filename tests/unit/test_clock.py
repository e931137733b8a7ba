"""The two clocks keep one contract: unix time, and a second reading that never falls."""

import subprocess

import pytest

from elastic_train.clock import Clock, ManualClock, SystemClock


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_monotonic_never_falls(clock: Clock) -> None:
    before = clock.monotonic()
    assert clock.monotonic() >= before


def test_system_clock_is_unix_time() -> None:
    told_by_date = float(subprocess.check_output(["date", "+%s"]))
    assert told_by_date <= SystemClock().now() < told_by_date + 60


def test_manual_clock_moves_only_by_hand() -> None:
    clock = ManualClock(now=100.0)
    assert (clock.now(), clock.monotonic()) == (100.0, 0.0)
    clock.advance(2.5)
    assert (clock.now(), clock.monotonic()) == (102.5, 2.5)


def test_manual_clock_refuses_to_go_back() -> None:
    with pytest.raises(ValueError, match="-1"):
        ManualClock().advance(-1)
