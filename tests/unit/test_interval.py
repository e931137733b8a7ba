import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.engine import Trained
from elastic_train.diloco.interval import Interval
from elastic_train.diloco.schedule import OuterSchedule

SCHEDULE = OuterSchedule(steps=20, sync_every=8, fragments=2)
STEP = Trained(tokens=10, seconds=0.5)


@pytest.fixture
def interval() -> Interval:
    return Interval(SCHEDULE)


def train(interval: Interval, steps: int) -> None:
    for _ in range(steps):
        interval.add(STEP)


def test_a_whole_run_walks_through_every_step() -> None:
    interval, walked, fragments = Interval(SCHEDULE), [], []
    while interval.outer_step < SCHEDULE.outer_steps:
        while not interval.full:
            walked.append(interval.next_step)
            interval.add(STEP)
        fragments.append(interval.fragment)
        interval.begin(interval.outer_step + 1)

    assert walked == list(range(1, 21))
    assert fragments == [0, 1, 0, 1, 0, 1]


def test_a_run_that_goes_on_from_a_snapshot_begins_there() -> None:
    interval = Interval(OuterSchedule(steps=20, sync_every=8, fragments=2, first=3))

    assert (interval.outer_step, interval.fragment, interval.next_step, interval.quota) == (3, 1, 13, 4)


def test_an_interval_is_full_at_its_quota(interval: Interval) -> None:
    assert (interval.done, interval.quota, interval.full) == (0, 4, False)
    train(interval, 3)
    assert (interval.next_step, interval.full) == (4, False)
    train(interval, 1)
    assert (interval.done, interval.full) == (4, True)

    interval.begin(1)

    assert (interval.done, interval.quota, interval.full, interval.next_step) == (0, 4, False, 5)


def test_a_quota_of_its_own(interval: Interval) -> None:
    interval.begin(1, 2)

    walked = []
    while not interval.full:
        walked.append(interval.next_step)
        interval.add(STEP)

    assert walked == [6, 8]
    interval.begin(2)
    assert interval.quota == 4


def test_at_the_end_of_the_run_there_is_nothing_to_train_whatever_the_pace(interval: Interval) -> None:
    interval.begin(5, 7)

    assert (interval.quota, interval.full) == (0, True)
    assert interval.next_step == 20


@pytest.mark.parametrize("steps", [0, 1])
def test_an_interval_can_end_early(interval: Interval, steps: int) -> None:
    train(interval, 2)

    interval.end_after(steps)

    assert interval.quota == 2 + steps
    train(interval, steps)
    assert interval.full


def means(interval: Interval) -> tuple[float, float | None, float | None]:
    return interval.step_s, interval.loss, interval.grad_norm


def test_means_are_those_since_the_last_outer_step(interval: Interval) -> None:
    assert means(interval) == (0.0, None, None)
    interval.add(Trained(tokens=30, seconds=1.0, loss=torch.tensor(2.0), grad_norm=0.5))
    interval.add(Trained(tokens=10, seconds=4.0, loss=torch.tensor(6.0)))
    interval.add(Trained(tokens=5, seconds=4.0))

    assert means(interval) == (3.0, (30 * 2.0 + 10 * 6.0) / 40, 0.5)

    interval.begin(1)

    assert means(interval) == (0.0, None, None)


def test_each_fragment_settles_its_own_tokens(interval: Interval) -> None:
    train(interval, 4)
    assert (interval.unsettled, interval.unsettled_of(0), interval.unsettled_of(1)) == (40, 40, 40)

    interval.settle(0, interval.tokens)
    interval.begin(1)
    train(interval, 4)

    assert interval.unsettled == 40
    assert (interval.unsettled_of(0), interval.unsettled_of(1)) == (40, 80)

    interval.settle(1, interval.tokens)

    assert interval.unsettled == 0
    assert (interval.unsettled_of(0), interval.unsettled_of(1)) == (40, 0)


def test_what_was_trained_beside_a_sync_stays_unsettled(interval: Interval) -> None:
    train(interval, 3)
    captured = interval.tokens
    train(interval, 1)

    interval.settle(0, captured)
    interval.begin(1)

    assert (interval.tokens, interval.unsettled, interval.unsettled_of(0), interval.unsettled_of(1)) == (40, 10, 10, 40)


def test_all_is_settled_at_once(interval: Interval) -> None:
    train(interval, 3)

    interval.settle_all()

    assert (interval.tokens, interval.unsettled) == (30, 0)
    assert (interval.unsettled_of(0), interval.unsettled_of(1)) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["commit", "retry", "abandon"])), max_size=12))
def test_every_token_is_settled_once_or_pending(intervals: list[tuple[int, str]]) -> None:
    interval, settled, gone = Interval(SCHEDULE), 0, 0
    for steps, end in intervals:
        train(interval, steps)
        if end == "commit":
            settled += interval.unsettled
            interval.settle(interval.fragment, interval.tokens)
            interval.begin(interval.outer_step + 1)
        elif end == "abandon":
            gone += interval.unsettled
            interval.settle_all()
            interval.begin(interval.outer_step)
        assert settled + gone + interval.unsettled == interval.tokens
        assert all(interval.unsettled_of(fragment) >= interval.unsettled for fragment in (0, 1))
