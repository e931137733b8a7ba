import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.pace import quotas

STEP_S = st.floats(1e-3, 100.0)


def test_equal_replicas_train_the_interval() -> None:
    assert quotas([0.3, 0.3, 0.3], 50) == [50, 50, 50]


def test_a_replica_of_half_the_speed_trains_half_the_steps() -> None:
    assert quotas([0.1, 0.2], 30) == [40, 20]


def test_a_replica_without_a_time_is_of_mean_speed() -> None:
    assert quotas([0.1, 0.0, 0.2], 30) == [40, 30, 20]
    assert quotas([0.0, 0.0], 30) == [30, 30]
    assert quotas([], 30) == []


def test_everybody_trains_at_least_one_step() -> None:
    assert quotas([0.001, 10.0], 4) == [8, 1]


@given(st.lists(STEP_S, min_size=1, max_size=8), st.integers(1, 1000))
def test_all_arrive_within_half_a_step_of_one_moment(step_s: list[float], interval: int) -> None:
    steps = quotas(step_s, interval)

    together = interval * len(step_s) / sum(1 / s for s in step_s)
    for s, n in zip(step_s, steps, strict=True):
        assert n >= 1
        assert n == 1 or abs(n * s - together) <= s * (0.5 + 1e-6)


@given(st.lists(STEP_S, min_size=1, max_size=8), st.integers(1, 1000))
def test_together_they_train_as_much_as_before(step_s: list[float], interval: int) -> None:
    steps = quotas(step_s, interval)

    assert sum(steps) >= interval * len(step_s) - 0.5 * len(step_s) - 1e-6
    assert sum(n for n in steps if n > 1) <= interval * len(step_s) + 0.5 * len(step_s) + 1e-6


@given(st.lists(STEP_S, min_size=2, max_size=8), st.integers(1, 1000), st.randoms())
def test_the_order_of_the_members_does_not_matter(step_s: list[float], interval: int, rng) -> None:
    order = list(range(len(step_s)))
    rng.shuffle(order)

    assert quotas([step_s[i] for i in order], interval) == [quotas(step_s, interval)[i] for i in order]


@pytest.mark.parametrize("step_s", [-1.0, math.nan, math.inf])
def test_what_is_no_time(step_s: float) -> None:
    with pytest.raises(ValueError, match="no times of a step"):
        quotas([0.1, step_s], 10)


def test_an_empty_interval() -> None:
    with pytest.raises(ValueError, match="at least one inner step, not 0"):
        quotas([0.1], 0)
