import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.metadata import WIDTH, Row, Standing, judge, majority

OK, BEHIND, NON_FINITE, DIVERGED, FOREIGN = Standing

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**63 - 1)
ROWS = st.builds(
    Row,
    outer_step=COUNT,
    tokens=COUNT,
    weight_tokens=COUNT,
    finite=st.booleans(),
    state_hash=INT64,
    slot=COUNT,
    incarnation=COUNT,
    step_us=COUNT,
    config_digest=INT64,
    layout_digest=INT64,
    id_base=COUNT,
    loss=st.floats(),
    grad_norm=st.floats(),
    inner_steps=COUNT,
    retired=COUNT,
)
FEW = st.integers(0, 2)
CROWDS = st.lists(
    st.builds(
        dataclasses.replace,
        ROWS,
        outer_step=FEW,
        state_hash=FEW,
        config_digest=st.integers(0, 1),
        layout_digest=st.integers(0, 1),
    ),
    min_size=1,
    max_size=6,
).map(lambda rows: [dataclasses.replace(row, slot=slot) for slot, row in enumerate(rows)])


def member(
    slot: int, *, outer_step: int = 7, state: int = -5, finite: bool = True, config: int = 1, layout: int = -2
) -> Row:
    return Row(
        outer_step=outer_step,
        tokens=1000,
        weight_tokens=2000,
        finite=finite,
        state_hash=state,
        slot=slot,
        incarnation=0,
        step_us=250_000,
        config_digest=config,
        layout_digest=layout,
        id_base=0,
        loss=2.5,
        grad_norm=1.25,
        inner_steps=10,
        retired=0,
    )


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@given(ROWS)
def test_a_row_survives_its_journey(row: Row) -> None:
    ints = row.to_ints()

    assert len(ints) == WIDTH
    assert all(type(value) is int and -(2**63) <= value < 2**63 for value in ints)
    back = Row.from_ints(ints)
    for field in dataclasses.fields(Row):
        sent, got = getattr(row, field.name), getattr(back, field.name)
        assert type(got) is type(sent)
        assert same(sent, got), field.name


def test_a_whole_number_for_a_mean_travels_as_a_mean() -> None:
    assert Row.from_ints(dataclasses.replace(member(0), loss=3).to_ints()).loss == 3.0


def test_a_row_of_another_width() -> None:
    with pytest.raises(ValueError, match=f"has {WIDTH} integers, not 3"):
        Row.from_ints([1, 2, 3])


def test_all_alike_are_ok() -> None:
    assert judge([member(2), member(0), member(1)]) == [OK, OK, OK]
    assert judge([]) == []


def test_who_is_older_is_behind_however_many() -> None:
    rows = [member(0, outer_step=6, state=1), member(1, outer_step=6, state=1), member(2)]

    assert judge(rows) == [BEHIND, BEHIND, OK]


def test_who_has_another_anchor_is_diverged() -> None:
    assert judge([member(0, state=9), member(1), member(2)]) == [DIVERGED, OK, OK]


def test_of_two_anchors_the_lowest_slot_is_right() -> None:
    assert judge([member(3), member(1, state=9)]) == [DIVERGED, OK]
    assert judge([member(3), member(1, state=9), member(2), member(4, state=9)]) == [DIVERGED, OK, DIVERGED, OK]


def test_a_bad_number_is_no_other_anchor() -> None:
    rows = [member(0, finite=False), member(1, finite=False), member(2, state=9)]

    assert judge(rows) == [NON_FINITE, NON_FINITE, DIVERGED]


@pytest.mark.parametrize("other", [member(0, outer_step=9, config=2), member(0, outer_step=9, layout=2)])
def test_another_config_or_model_is_foreign_whatever_its_step(other: Row) -> None:
    rows = [other, member(1), member(2, outer_step=6), member(3)]

    assert judge(rows) == [FOREIGN, OK, BEHIND, OK]


def test_of_two_configs_that_of_the_lowest_slot_holds() -> None:
    assert judge([member(1, config=2), member(0)]) == [FOREIGN, OK]


def test_config_and_layout_count_together() -> None:
    rows = [member(0, config=1, layout=8), member(1, config=2, layout=1), member(2, config=3, layout=1)]

    assert judge(rows) == [OK, FOREIGN, FOREIGN]


@given(CROWDS, st.randoms())
def test_everybody_judges_alike_in_whatever_order(rows: list[Row], rng) -> None:
    shuffled = list(rows)
    rng.shuffle(shuffled)

    by_slot = {row.slot: standing for row, standing in zip(shuffled, judge(shuffled), strict=True)}
    assert [by_slot[row.slot] for row in rows] == judge(rows)


@given(CROWDS)
def test_who_is_ok_agrees_and_somebody_has_the_state(rows: list[Row]) -> None:
    standings = judge(rows)

    fit = [row for row, standing in zip(rows, standings, strict=True) if standing in (OK, NON_FINITE)]
    assert len({(r.outer_step, r.state_hash, r.config_digest, r.layout_digest) for r in fit}) == 1
    at_home = [row for row, standing in zip(rows, standings, strict=True) if standing is not FOREIGN]
    assert fit[0].outer_step == max(row.outer_step for row in at_home)
    assert all(row.finite for row, standing in zip(rows, standings, strict=True) if standing is OK)


@pytest.mark.parametrize(
    ("values", "slots", "expected"),
    [
        (["a", "b", "b"], [0, 1, 2], "b"),
        (["b", "a"], [5, 4], "a"),
        (["c", "a", "b", "c", "b"], [3, 0, 2, 4, 1], "b"),
    ],
)
def test_a_majority(values: list[str], slots: list[int], expected: str) -> None:
    assert majority(values, slots) == expected


def test_a_majority_of_nobody() -> None:
    with pytest.raises(ValueError, match="empty"):
        majority([], [])
