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
