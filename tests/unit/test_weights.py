import math
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_train.diloco.weights import shares, weighted_mean

MEMBERS = st.lists(st.tuples(st.integers(0, 10**12), st.booleans()), max_size=8)
WEIGHTINGS = st.sampled_from(["tokens", "uniform"])


def test_by_tokens() -> None:
    assert shares([100, 300, 0, 400], [True, True, True, False]) == [0.25, 0.75, 0.0, 0.0]


def test_uniform_leaves_out_who_trained_nothing() -> None:
    assert shares([100, 300, 0, 400], [True, True, True, False], "uniform") == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("weighting", ["tokens", "uniform"])
def test_nobody_with_tokens(weighting: Literal["tokens", "uniform"]) -> None:
    assert shares([0, 0, 5], [True, True, False], weighting) == [0.0, 0.0, 0.0]
    assert shares([], [], weighting) == []


@given(MEMBERS, WEIGHTINGS)
def test_shares_sum_to_one_and_leave_out_who_does_not_count(
    members: list[tuple[int, bool]], weighting: Literal["tokens", "uniform"]
) -> None:
    tokens, counted = [n for n, _ in members], [counts for _, counts in members]

    found = shares(tokens, counted, weighting)

    assert [share > 0 for share in found] == [counts and n > 0 for n, counts in members]
    assert sum(found) == (pytest.approx(1.0) if any(found) else 0.0)


@given(MEMBERS)
def test_shares_are_proportional_to_tokens(members: list[tuple[int, bool]]) -> None:
    found = shares([n for n, _ in members], [counts for _, counts in members])

    total = sum(n for n, counts in members if counts)
    assert [share * total for share in found] == pytest.approx([n if counts else 0 for n, counts in members])


def test_wrong_tokens() -> None:
    with pytest.raises(ValueError, match=r"negative tokens: \[3, -1\]"):
        shares([3, -1], [True, True])
    with pytest.raises(ValueError, match="shorter"):
        shares([3, 1], [True])


def test_a_mean_by_tokens() -> None:
    assert weighted_mean([2.0, 4.0], [300, 100]) == 2.5


def test_a_mean_leaves_out_what_is_not_known() -> None:
    assert weighted_mean([2.0, None, math.nan, math.inf, 4.0, 100.0], [1, 7, 7, 7, 1, 0]) == 3.0


@pytest.mark.parametrize(("values", "tokens"), [([], []), ([None, math.nan], [5, 5]), ([1.0], [0])])
def test_a_mean_of_nothing(values: list[float | None], tokens: list[int]) -> None:
    assert weighted_mean(values, tokens) is None


@given(st.lists(st.tuples(st.floats(-1e300, 1e300), st.integers(1, 10**12)), min_size=1, max_size=8))
@example([(5e-324, 1), (5e-324, 1)])
def test_a_mean_lies_between_its_values(reports: list[tuple[float, int]]) -> None:
    values = [value for value, _ in reports]

    mean = weighted_mean(values, [n for _, n in reports])

    assert mean is not None
    assert min(values) <= mean <= max(values)
