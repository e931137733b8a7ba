import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.schedule import OuterSchedule


@st.composite
def schedules(draw: st.DrawFn) -> OuterSchedule:
    fragments = draw(st.integers(1, 6))
    return OuterSchedule(
        steps=draw(st.integers(1, 300)),
        sync_every=fragments * draw(st.integers(1, 25)),
        fragments=fragments,
    )


@given(schedules())
def test_quotas_add_up_to_the_run(schedule: OuterSchedule) -> None:
    assert sum(schedule.quota(k) for k in range(schedule.outer_steps)) == schedule.steps
    assert schedule.start(0) == 0
    assert schedule.start(schedule.outer_steps) == schedule.steps
    assert schedule.quota(schedule.outer_steps) == 0


@given(schedules())
def test_only_the_last_interval_is_short(schedule: OuterSchedule) -> None:
    quotas = [schedule.quota(k) for k in range(schedule.outer_steps)]
    trained = [quota for quota in quotas if quota]

    assert quotas == trained + [0] * (schedule.fragments - 1)
    assert all(quota == schedule.interval for quota in trained[:-1])
    assert 1 <= trained[-1] <= schedule.interval


@given(schedules())
def test_every_fragment_syncs_with_all_that_was_trained(schedule: OuterSchedule) -> None:
    last_sync = {k % schedule.fragments: schedule.start(k + 1) for k in range(schedule.outer_steps)}

    assert last_sync == dict.fromkeys(range(schedule.fragments), schedule.steps)


@given(schedules())
def test_a_fragment_syncs_once_in_sync_every_steps(schedule: OuterSchedule) -> None:
    for outer_step in range(schedule.outer_steps - schedule.fragments):
        apart = schedule.start(outer_step + schedule.fragments) - schedule.start(outer_step)
        assert apart == min(schedule.sync_every, schedule.steps - schedule.start(outer_step))


@pytest.mark.parametrize(
    ("schedule", "starts"),
    [
        (OuterSchedule(steps=10, sync_every=4), [0, 4, 8, 10]),
        (OuterSchedule(steps=8, sync_every=4), [0, 4, 8]),
        (OuterSchedule(steps=3, sync_every=1), [0, 1, 2, 3]),
        (OuterSchedule(steps=3, sync_every=20), [0, 3]),
        (OuterSchedule(steps=10, sync_every=4, fragments=2), [0, 2, 4, 6, 8, 10, 10]),
        (OuterSchedule(steps=3, sync_every=4, fragments=4), [0, 1, 2, 3, 3, 3, 3]),
    ],
)
def test_where_the_syncs_are(schedule: OuterSchedule, starts: list[int]) -> None:
    assert [schedule.start(k) for k in range(schedule.outer_steps + 1)] == starts


@st.composite
def trained_intervals(draw: st.DrawFn) -> tuple[OuterSchedule, int]:
    """A schedule, and an outer step after which there is something to train."""
    schedule = draw(schedules())
    return schedule, draw(st.integers(0, -(-schedule.steps // schedule.interval) - 1))


@given(trained_intervals())
def test_a_replica_at_the_nominal_pace_counts_one_by_one(place: tuple[OuterSchedule, int]) -> None:
    schedule, outer_step = place
    length = schedule.quota(outer_step)

    numbers = [schedule.number(outer_step, done, length) for done in range(1, length + 1)]

    assert numbers == list(range(schedule.start(outer_step) + 1, schedule.start(outer_step + 1) + 1))


@given(trained_intervals(), st.integers(1, 60))
def test_a_replica_at_another_pace_walks_from_the_first_to_the_last(
    place: tuple[OuterSchedule, int], quota: int
) -> None:
    schedule, outer_step = place
    length, start = schedule.quota(outer_step), schedule.start(outer_step)

    numbers = [schedule.number(outer_step, done, quota) for done in range(1, quota + 1)]

    assert numbers == sorted(numbers)
    assert start + 1 <= numbers[0] <= start + -(-length // quota)
    assert numbers[-1] == schedule.start(outer_step + 1)
    # Nobody skips more nominal steps than its pace makes necessary, nor stands still for longer.
    apart = [after - before for before, after in itertools.pairwise(numbers)]
    assert all(length // quota <= gap <= -(-length // quota) for gap in apart)
    assert schedule.number(outer_step, quota + 3, quota) == numbers[-1]


@given(schedules(), st.integers(0, 5))
def test_after_the_end_every_step_is_the_last(schedule: OuterSchedule, done: int) -> None:
    assert schedule.number(schedule.outer_steps, done, 0) == schedule.steps


@pytest.mark.parametrize(
    ("quota", "numbers"), [(2, [6, 8]), (3, [6, 7, 8]), (4, [5, 6, 7, 8]), (6, [5, 6, 6, 7, 8, 8])]
)
def test_how_a_replica_with_a_quota_of_its_own_counts(quota: int, numbers: list[int]) -> None:
    schedule = OuterSchedule(steps=10, sync_every=4)

    assert [schedule.number(1, done, quota) for done in range(1, quota + 1)] == numbers


def test_an_interval_that_ends_before_its_first_step_is_at_its_end() -> None:
    assert OuterSchedule(steps=10, sync_every=4).number(1, 1, 0) == 8
