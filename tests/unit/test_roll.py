import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.peer_ckpt.roll import PeerEntry, Roll

SLOTS = st.integers(0, 2)
INCARNATIONS = st.integers(0, 3)
RETIRED = st.lists(st.integers(0, 9), max_size=6, unique=True)
NEWS = st.lists(st.tuples(st.booleans(), SLOTS, INCARNATIONS), max_size=8)


def entry(incarnation: int) -> PeerEntry:
    return PeerEntry(incarnation=incarnation, addresses=(f"http://a:{incarnation}", f"http://b:{incarnation}"))


def after(news: list[tuple[bool, int, int]], roll: Roll | None = None) -> Roll:
    roll = roll or Roll()
    for is_end, slot, incarnation in news:
        roll = roll.with_end(slot, incarnation) if is_end else roll.with_peer(slot, entry(incarnation))
    return roll


def without(slots: list[int]) -> Roll:
    roll = Roll()
    for slot in slots:
        roll = roll.with_retired(slot)
    return roll


def dead(roll: Roll) -> set[tuple[int, int]]:
    return {(slot, incarnation) for slot in range(3) for incarnation in range(5) if roll.is_dead(slot, incarnation)}


def test_an_incarnation_is_dead_once_it_has_ended_or_a_newer_one_is_there() -> None:
    roll = Roll().with_peer(0, entry(1))
    assert dead(roll) == {(0, 0)}
    assert dead(roll.with_end(0, 1)) == {(0, 0), (0, 1)}
    assert dead(roll.with_peer(0, entry(3))) == {(0, 0), (0, 1), (0, 2)}


def test_an_end_takes_only_who_has_ended_off_the_roll() -> None:
    roll = Roll().with_peer(0, entry(1)).with_peer(1, entry(0))
    assert roll.with_end(0, 0).peers == roll.peers
    assert roll.with_end(0, 1).peers == {1: entry(0)}


def test_the_dead_do_not_come_back() -> None:
    roll = after([(False, 0, 2), (True, 0, 1)])
    assert roll.with_peer(0, entry(1)) == roll
    ended = roll.with_end(0, 2)
    assert ended.with_peer(0, entry(2)) == ended
    assert ended.with_end(0, 1) == ended


def test_who_registers_again_has_new_addresses() -> None:
    moved = PeerEntry(incarnation=1, addresses=("http://c:1",))
    assert Roll().with_peer(0, entry(1)).with_peer(0, moved).peers == {0: moved}


@given(NEWS, NEWS)
def test_news_never_bring_anybody_back_to_life(
    before: list[tuple[bool, int, int]], news: list[tuple[bool, int, int]]
) -> None:
    assert dead(after(before)) <= dead(after(news, after(before)))


@given(NEWS, NEWS)
def test_together_two_rolls_know_all_of_the_dead(
    left: list[tuple[bool, int, int]], right: list[tuple[bool, int, int]]
) -> None:
    both = after(left).merged(after(right))
    assert dead(both) >= dead(after(left)) | dead(after(right))
    assert all(not both.is_dead(slot, known.incarnation) for slot, known in both.peers.items())
    assert both.merged(both) == both
    assert dead(after(right).merged(after(left))) == dead(both)


@given(NEWS, RETIRED)
def test_a_roll_can_be_sent(news: list[tuple[bool, int, int]], retired: list[int]) -> None:
    roll = after(news, without(retired))
    assert Roll.from_json(json.loads(json.dumps(roll.to_json()))) == roll


def test_the_retired_stay_in_the_order_in_which_they_were_told() -> None:
    assert without([3, 1, 3, 2]).retired == (3, 1, 2)


@given(NEWS, RETIRED, st.integers(0, 6))
def test_the_longer_list_of_the_retired_counts(news: list[tuple[bool, int, int]], retired: list[int], cut: int) -> None:
    longer, shorter = without(retired), after(news, without(retired[:cut]))
    assert longer.merged(shorter).retired == shorter.merged(longer).retired == tuple(retired)


def test_an_order_that_is_known_is_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    assert without([3]).merged(without([1, 3])).retired == (3,)
    assert "(1, 3) were told to be retired, but (3,) are known to be" in caplog.text


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"peers": {}},
        {"peers": [], "ended": {}, "retired": []},
        {"peers": {"x": {"incarnation": 0, "addresses": []}}, "ended": {}, "retired": []},
        {"peers": {"0": {"incarnation": 0}}, "ended": {}, "retired": []},
        {"peers": {"0": 3}, "ended": {}, "retired": []},
        {"peers": {}, "ended": {"0": None}, "retired": []},
        {"peers": {}, "ended": {}},
        {"peers": {}, "ended": {}, "retired": 3},
        {"peers": {}, "ended": {}, "retired": [None]},
    ],
)
def test_what_is_no_roll_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="this is no roll"):
        Roll.from_json(value)
