from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.peer_ckpt.roll import PeerEntry, Roll

SLOTS = st.integers(0, 2)
INCARNATIONS = st.integers(0, 3)
NEWS = st.lists(st.tuples(st.booleans(), SLOTS, INCARNATIONS), max_size=8)


def entry(incarnation: int) -> PeerEntry:
    return PeerEntry(incarnation=incarnation, addresses=(f"http://a:{incarnation}", f"http://b:{incarnation}"))


def after(news: list[tuple[bool, int, int]], roll: Roll | None = None) -> Roll:
    roll = roll or Roll()
    for is_end, slot, incarnation in news:
        roll = roll.with_end(slot, incarnation) if is_end else roll.with_peer(slot, entry(incarnation))
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


@given(NEWS)
def test_a_roll_can_be_sent(news: list[tuple[bool, int, int]]) -> None:
    assert Roll.from_json(after(news).to_json()) == after(news)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"peers": {}},
        {"peers": [], "ended": {}},
        {"peers": {"x": {"incarnation": 0, "addresses": []}}, "ended": {}},
        {"peers": {"0": {"incarnation": 0}}, "ended": {}},
        {"peers": {"0": 3}, "ended": {}},
        {"peers": {}, "ended": {"0": None}},
    ],
)
def test_what_is_no_roll_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="this is no roll"):
        Roll.from_json(value)
