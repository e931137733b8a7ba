from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.clock import ManualClock
from elastic_train.lighthouse.donors import LEASE_S, HeldState, Holder, Leases, Wish, choose
from elastic_train.lighthouse.registry import IncarnationEnded, Registry
from elastic_train.peer_ckpt.roll import Member, PeerEntry

HOSTS = st.sampled_from(["a", "b"])
STATES = st.builds(HeldState, outer_step=st.integers(0, 3), state_hash=st.integers(-1, 1))
WISHES = st.builds(
    Wish,
    slot=st.integers(0, 5),
    incarnation=st.just(0),
    host=HOSTS,
    at_least=st.integers(0, 4),
    at_most=st.none() | st.integers(0, 4),
    count=st.integers(1, 3),
    among=st.none() | st.frozensets(st.integers(0, 5)),
    avoid=st.frozensets(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=3),
)


def holder(slot: int, *held: HeldState, incarnation: int = 0, host: str = "a", load: int = 0) -> Holder:
    return Holder(slot=slot, incarnation=incarnation, host=host, held=held, load=load)


def state(outer_step: int, state_hash: int = 7) -> HeldState:
    return HeldState(outer_step=outer_step, state_hash=state_hash)


def wish(slot: int = 9, *, host: str = "z", at_least: int = 0, count: int = 8, incarnation: int = 0) -> Wish:
    return Wish(slot=slot, incarnation=incarnation, host=host, at_least=at_least, count=count)


HOLDERS = st.lists(
    st.builds(
        Holder,
        slot=st.integers(0, 5),
        incarnation=st.integers(0, 1),
        host=HOSTS,
        held=st.lists(STATES, max_size=2, unique_by=lambda held: held.outer_step).map(tuple),
        load=st.integers(0, 2),
    ),
    unique_by=lambda held: held.slot,
)


def chosen(made: Wish, *holders: Holder) -> list[int]:
    choice = choose(made, holders)
    return [] if choice is None else [donor.slot for donor in choice.donors]


def test_the_newest_outer_step_is_given() -> None:
    holders = holder(0, state(3), state(4)), holder(1, state(4), state(5)), holder(2, state(5))
    assert chosen(wish(), *holders) == [1, 2]
    assert chosen(wish(at_least=6), *holders) == []


def test_who_lost_a_donor_gets_another_with_the_same_outer_step() -> None:
    holders = holder(0, state(3), state(4)), holder(1, state(4), state(5)), holder(2, state(5))
    assert chosen(replace(wish(at_least=4), at_most=4), *holders) == [0, 1]
    assert chosen(replace(wish(at_least=4), at_most=4, avoid=frozenset({(0, 0)})), *holders) == [1]


def test_only_what_most_hold_is_given() -> None:
    assert chosen(wish(), holder(0, state(3, 1)), holder(1, state(3, 2)), holder(2, state(3, 2))) == [1, 2]
    assert chosen(wish(), holder(0, state(3, 1)), holder(1, state(3, -2))) == [1]


def test_neither_the_joiner_nor_who_failed_it_nor_another_slot_is_chosen() -> None:
    holders = [holder(slot, state(1)) for slot in range(4)]
    assert chosen(wish(2), *holders) == [3, 0, 1]
    assert chosen(replace(wish(2), avoid=frozenset({(3, 0), (0, 1)})), *holders) == [0, 1]
    assert chosen(replace(wish(2), among=frozenset({1, 2})), *holders) == [1]


def test_load_comes_before_the_host_and_the_host_before_the_slot() -> None:
    assert chosen(
        wish(2, host="b"),
        holder(0, state(1), host="b", load=1),
        holder(1, state(1), host="b"),
        holder(3, state(1)),
        holder(4, state(1), host="b"),
    ) == [4, 1, 3, 0]


def test_no_more_are_named_than_can_be_used() -> None:
    assert chosen(wish(count=2), *(holder(slot, state(1)) for slot in range(4))) == [0, 1]


@given(WISHES, HOLDERS, st.randoms(use_true_random=False))
def test_a_choice_is_as_wished_and_no_matter_of_order(made: Wish, holders: list[Holder], random: Random) -> None:
    choice = choose(made, holders)
    random.shuffle(holders)
    assert choose(made, holders) == choice
    able = [held for held in holders if made.may_take_from(held)]
    steps = [held.outer_step for one in able for held in one.held if made.takes(held)]
    if choice is None:
        assert steps == []
        return
    assert choice.state.outer_step == max(steps)
    assert 1 <= len(choice.donors) <= made.count
    assert all(donor in able and choice.state in donor.held for donor in choice.donors)
    left_out = [held for held in able if choice.state in held.held and held not in choice.donors]
    assert max(donor.load for donor in choice.donors) <= min((held.load for held in left_out), default=99)
    assert left_out == [] or len(choice.donors) == made.count


def test_a_lease_lasts_until_its_joiner_is_done_or_asks_again() -> None:
    leases = Leases()
    leases.give((5, 0), [(0, 0), (1, 0)], now=0.0)
    leases.give((6, 0), [(1, 0)], now=0.0)
    assert leases.load(nobody_is_dead, now=1.0) == {(0, 0): 1, (1, 0): 2}
    # One that helps those that it has already.
    leases.give((5, 0), [(2, 0)], now=1.0)
    assert leases.load(nobody_is_dead, now=1.0) == {(0, 0): 1, (1, 0): 2, (2, 0): 1}
    leases.end((5, 0))
    assert leases.load(nobody_is_dead, now=1.0) == {(1, 0): 1}
    leases.end((6, 0))
    leases.end((6, 0))
    assert leases.load(nobody_is_dead, now=1.0) == {}


def test_a_lease_ends_with_either_side() -> None:
    leases = Leases()
    leases.give((5, 0), [(0, 0), (1, 0)], now=0.0)
    leases.give((6, 0), [(1, 0)], now=0.0)
    assert leases.load(lambda slot, incarnation: slot == 0, now=0.0) == {(1, 0): 2}
    assert leases.load(lambda slot, incarnation: slot == 5, now=0.0) == {(1, 0): 1}


def test_a_joiner_that_says_nothing_is_forgotten() -> None:
    leases = Leases()
    leases.give((5, 0), [(0, 0)], now=0.0)
    leases.give((6, 0), [(0, 0)], now=1.0)
    assert leases.load(nobody_is_dead, now=LEASE_S) == {(0, 0): 1}
    assert leases.load(nobody_is_dead, now=2 * LEASE_S) == {}


def nobody_is_dead(slot: int, incarnation: int) -> bool:
    return False


def entry(incarnation: int = 0) -> PeerEntry:
    return PeerEntry(incarnation=incarnation, addresses=(f"http://a:{incarnation}",))


def registry_of(slots: int, clock: ManualClock | None = None) -> Registry:
    registry = Registry(clock)
    for slot in range(slots):
        registry.register(slot, entry())
        registry.held(slot, 0, state(1), host="a", load=0)
    return registry


def members(registry: Registry, made: Wish) -> list[Member]:
    return [(donor.slot, donor.incarnation) for donor in registry.donors(made).donors]


@given(donors=st.integers(1, 6), joiners=st.integers(1, 12), count=st.integers(1, 3))
def test_several_joiners_are_spread(donors: int, joiners: int, count: int) -> None:
    registry, load = registry_of(donors), Counter[int]()
    for joiner in range(donors, donors + joiners):
        load.update(slot for slot, _ in members(registry, wish(joiner, count=count)))
        loads = [load[slot] for slot in range(donors)]
        assert max(loads) - min(loads) <= 1


def test_what_a_donor_reports_counts_too() -> None:
    registry = registry_of(2)
    registry.held(0, 0, state(1), host="a", load=2)
    asked = [members(registry, wish(joiner, count=1)) for joiner in range(5, 8)]
    assert asked == [[(1, 0)], [(1, 0)], [(0, 0)]]


def test_a_joiner_that_is_done_leaves_room() -> None:
    clock = ManualClock()
    registry = registry_of(2, clock)
    assert members(registry, wish(5, count=1)) == [(0, 0)]
    assert members(registry, wish(6, count=1)) == [(1, 0)]
    registry.taken(6, 0)
    assert members(registry, wish(7, count=1)) == [(1, 0)]
    # Its own lease does not drive it elsewhere.
    assert members(registry, wish(7, count=1)) == [(1, 0)]
    clock.advance(LEASE_S / 2)
    registry.register(7, entry())
    clock.advance(LEASE_S / 2)
    assert members(registry, wish(8, count=1)) == [(0, 0)]
    registry.ended(7, 0)
    registry.ended(8, 0)
    assert members(registry, wish(9, count=1)) == [(0, 0)]


def test_a_replica_gives_its_last_two_outer_steps() -> None:
    registry = registry_of(1)
    for outer_step in (2, 3):
        registry.held(0, 0, state(outer_step), host="a", load=0)
    found = {k: registry.donors(replace(wish(at_least=k), at_most=k)).outer_step for k in (1, 2, 3)}
    assert found == {1: -1, 2: 2, 3: 3}
    registry.held(0, 0, state(3, 8), host="a", load=0)
    answer = registry.donors(wish())
    assert (answer.outer_step, answer.state_hash) == (3, 8)
    assert registry.donors(replace(wish(), at_most=2)).outer_step == 2


def test_a_new_incarnation_has_nothing_of_the_old() -> None:
    registry = registry_of(2)
    registry.register(0, entry(1))
    assert members(registry, wish()) == [(1, 0)]
    registry.held(0, 1, state(1), host="a", load=0)
    assert members(registry, wish()) == [(0, 1), (1, 0)]
    with pytest.raises(IncarnationEnded, match="incarnation 0 of replica 0 has ended"):
        registry.held(0, 0, state(9), host="a", load=0)
    with pytest.raises(IncarnationEnded):
        registry.donors(wish(0, incarnation=0))


def test_who_cannot_be_asked_is_no_donor() -> None:
    registry = Registry()
    registry.held(0, 3, state(1), host="a", load=0)
    assert members(registry, wish()) == []
    registry.register(0, entry(3))
    answer = registry.donors(wish())
    assert [donor.addresses for donor in answer.donors] == [("http://a:3",)]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["register", "held", "ended", "donors", "taken"]), st.integers(0, 3), st.integers(0, 2)),
    max_size=30,
)


@given(ACTIONS)
def test_a_donor_is_never_dead_nor_the_joiner(actions: list[tuple[str, int, int]]) -> None:
    registry, twin = Registry(ManualClock()), Registry(ManualClock())
    for number, (what, slot, incarnation) in enumerate(actions):
        answers = [act(one, what, slot, incarnation, outer_step=number // 4) for one in (registry, twin)]
        assert answers[0] == answers[1]
        for donor_slot, donor_incarnation in answers[0]:
            assert donor_slot != slot
            assert not registry.roll.is_dead(donor_slot, donor_incarnation)
            assert registry.roll.peers[donor_slot].incarnation == donor_incarnation


def act(registry: Registry, what: str, slot: int, incarnation: int, outer_step: int) -> list[Member]:
    try:
        match what:
            case "register":
                registry.register(slot, entry(incarnation))
            case "held":
                registry.held(slot, incarnation, state(outer_step), host="a", load=0)
            case "ended":
                registry.ended(slot, incarnation)
            case "donors":
                return members(registry, wish(slot, incarnation=incarnation, count=2))
            case _:
                registry.taken(slot, incarnation)
    except IncarnationEnded:
        assert registry.roll.is_dead(slot, incarnation)
    return []
