"""What a rank learns from its peers, over real connections to their servers and to the registry."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.doubt import Answer, Docket, Word
from elastic_train.diloco.peers import NO_OFFER, Offer, Peers, PeerState, Transfers, status_of
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.peer_ckpt.client import Fetched, PeerClient, TransferFailed
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.snapshot import Snapshot

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
TRANSFERS = Transfers(timeout_s=TIMEOUT_S)
ME = 2


def snapshot(outer_step: int, value: float = 0.0) -> Snapshot:
    return Snapshot({"outer_step": outer_step}, {"outer": {"anchor": torch.full((4,), value)}, "inner": {}})


class Replica:
    """A peer of one rank, as its server shows it."""

    def __init__(self, slot: int, incarnation: int, outer_step: int) -> None:
        self.slot, self.incarnation, self.outer_step = slot, incarnation, outer_step
        self.docket = Docket()
        self.left = False
        self.nonsense: dict[str, Any] = {}
        self.state_hash = -(100 + slot)
        self.served: list[tuple[int, str]] = []
        self.server = PeerServer(HOST, TOKEN, self.status, self.on_served)

    def on_served(self, header: Mapping[str, Any], joiner: str) -> None:
        self.served.append((header["outer_step"], joiner))

    def status(self, attempt: str, dead: frozenset[int]) -> Mapping[str, Any]:
        answer = self.docket.answer(attempt, dead)
        told = status_of(
            slot=self.slot,
            incarnation=self.incarnation,
            outer_step=self.outer_step,
            state_hash=self.state_hash,
            left=self.left,
            answer=answer,
        )
        return {**told, **self.nonsense}


class World:
    """A registry and the replicas that it knows."""

    def __init__(self) -> None:
        self.registry = RegistryServer(HOST, 0, TOKEN)
        self.directory = Directory(self.registry.url, TOKEN)
        self.replicas: list[Replica] = []

    def add(self, slot: int, outer_step: int = 0, *, incarnation: int = 0) -> Replica:
        replica = Replica(slot, incarnation, outer_step)
        self.replicas.append(replica)
        self.directory.register(slot, incarnation, [replica.server.address])
        return replica

    def peers(self, slot: int = ME, *, rank: int = 0, transfers: Transfers = TRANSFERS) -> Peers:
        directory = Directory(self.registry.url, TOKEN)
        return Peers(slot, rank, directory, PeerClient(TOKEN), transfers=transfers, host=HOST)

    def close(self) -> None:
        for replica in self.replicas:
            replica.server.close()
        self.registry.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def newest(peers: Peers, at_least: int = 0, among: Sequence[int] | None = None) -> tuple[int, int] | None:
    found = peers.newest(at_least, among)
    return (found.slot, found.outer_step) if found is not None else None


@given(
    st.builds(
        PeerState,
        **dict.fromkeys(["slot", "incarnation", "outer_step"], st.integers(0, 9)),
        state_hash=st.integers(-(2**63), 2**63 - 1),
    )
)
def test_a_peers_state_survives_its_journey(state: PeerState) -> None:
    assert PeerState.from_ints(state.to_ints()) == state


def test_a_state_is_confirmed_by_a_donor_that_has_it_now(world: World) -> None:
    donors = [world.add(slot, 4, incarnation=2) for slot in (0, 3)]
    for donor in donors:
        donor.state_hash = 7
    peers = world.peers()
    offer = Offer(outer_step=4, state_hash=7, donors=((0, 2), (3, 2)))
    assert peers.confirms(offer) == (0, 2)

    # The registry's word is older than what the first one says.
    donors[0].outer_step = 5
    assert peers.confirms(offer) == (3, 2)
    donors[1].state_hash = 8
    assert peers.confirms(offer) is None
    # Others have it, but they are not who was offered.
    world.add(4, 4, incarnation=1).state_hash = 7
    assert peers.confirms(offer) is None
    assert peers.confirms(Offer(outer_step=4, state_hash=7, donors=((4, 0), (9, 0)))) is None
    assert peers.confirms(Offer(outer_step=4, state_hash=7, donors=((4, 1),))) == (4, 1)


def test_a_donor_that_is_gone_confirms_nothing(world: World) -> None:
    donor = world.add(0, 4)
    peers = world.peers()
    offer = Offer(outer_step=4, state_hash=donor.state_hash, donors=((0, 0),))
    assert peers.confirms(offer) == (0, 0)
    donor.server.close()
    assert peers.confirms(offer) is None


def test_the_newest_peer_is_found_with_all_that_it_says(world: World) -> None:
    world.add(0, 4)
    world.add(3, 6, incarnation=2)
    world.add(4, 5)

    assert world.peers().newest(0) == PeerState(slot=3, incarnation=2, outer_step=6, state_hash=-103)


def test_a_replica_is_not_its_own_peer(world: World) -> None:
    world.add(ME, 9)
    assert newest(world.peers()) is None
    world.add(0, 1)
    assert newest(world.peers()) == (0, 1)


def test_an_older_one_than_asked_for_is_none(world: World) -> None:
    world.add(0, 4)

    assert newest(world.peers(), at_least=4) == (0, 4)
    assert newest(world.peers(), at_least=5) is None


def test_a_peer_without_a_state_is_none(world: World) -> None:
    world.add(0, -1)

    assert newest(world.peers()) is None


def test_only_those_asked_for_are_looked_at(world: World) -> None:
    world.add(0, 4)
    world.add(1, 6)
    world.add(3, 5)

    assert newest(world.peers(), among=[0, 3]) == (3, 5)
    assert newest(world.peers(), among=[ME, 7]) is None
    assert newest(world.peers(), among=[]) is None


@pytest.mark.parametrize(("asker", "asked"), [(0, 1), (1, 3), (2, 3), (3, 4), (4, 1), (9, 1)])
def test_askers_spread_over_equals(world: World, asker: int, asked: int) -> None:
    world.add(0, 4)
    for slot in (4, 1, 3):
        world.add(slot, 5)

    assert newest(world.peers(asker)) == (asked, 5)


def test_a_peer_that_does_not_answer_is_passed_over(world: World) -> None:
    world.add(0, 9).server.close()
    world.add(1, 4)

    assert newest(world.peers()) == (1, 4)


def test_where_one_incarnation_lives_on(world: World) -> None:
    replica = world.add(0, 4, incarnation=1)
    peers = world.peers()

    assert [peers.lives_on_at(0, 1, at_least) for at_least in (3, 4, 5)] == [4, 4, None]
    assert peers.lives_on_at(0, 0, 4) is None
    assert peers.lives_on_at(0, 2, 4) is None
    assert peers.lives_on_at(1, 1, 4) is None
    # Another one has the port by now, and the registry does not know it yet.
    replica.incarnation = 2
    assert peers.lives_on_at(0, 1, 4) is None
    replica.server.close()
    assert peers.lives_on_at(0, 1, 4) is None


def test_one_that_left_lives_on_only_for_those_that_lack_its_last_commit(world: World) -> None:
    replica = world.add(0, 4)
    replica.left = True

    assert [world.peers().lives_on_at(0, 0, at_least) for at_least in (3, 4)] == [4, None]
    assert newest(world.peers()) == (0, 4)


def test_a_peer_answers_about_an_attempt_and_hears_who_is_dead(world: World) -> None:
    replica = world.add(0, 4, incarnation=1)
    replica.docket.open("7f.5")
    replica.docket.doubt("7f.5")
    peers = world.peers()

    assert peers.ask(0, 1, "7f.5", frozenset({3, 12})) == Answer(word=Word.DOUBT)
    assert not replica.docket.accept("7f.5", 12, 1)
    assert replica.docket.accept("7f.5", 4, -99)
    assert peers.ask(0, 1, "7f.5", frozenset()) == Answer(word=Word.COMMITTED, candidate=-99)
    assert peers.ask(0, 1, "other", frozenset()) == Answer(word=Word.UNKNOWN)


def test_another_incarnations_answer_is_none(world: World) -> None:
    world.add(0, 4, incarnation=1)
    replaced = world.add(0, 4, incarnation=2)
    replaced.docket.open("7f.5")
    replaced.docket.novote("7f.5")
    peers = world.peers()

    assert peers.ask(0, 1, "7f.5", frozenset()) is None
    assert peers.ask(0, 2, "7f.5", frozenset()) == Answer(word=Word.NOVOTE)
    assert peers.ask(1, 0, "7f.5", frozenset()) is None
    replaced.server.close()
    assert peers.ask(0, 2, "7f.5", frozenset()) is None


@pytest.mark.parametrize("nonsense", [{"word": "perhaps"}, {"word": None}, {"candidate": "1"}, {"candidate": 2**63}])
def test_an_answer_that_means_nothing_is_none(world: World, nonsense: dict[str, Any]) -> None:
    world.add(0, 4).nonsense = nonsense

    assert world.peers().ask(0, 0, "7f.5", frozenset()) is None


def test_who_is_dead_is_what_the_registry_says(world: World) -> None:
    world.add(0, incarnation=1).server.close()
    peers = world.peers()
    assert not peers.is_dead(0, 1)

    world.directory.ended(0, 1)

    assert peers.is_dead(0, 1)
    assert not peers.is_dead(0, 2)


# -- what is offered ---------------------------------------------------------------------------------------------------


def test_an_offer_survives_its_journey() -> None:
    offer = Offer(outer_step=5, state_hash=-9, donors=((1, 0), (3, 2)))

    assert len(offer.to_ints()) == len(NO_OFFER)
    assert Offer.from_ints(offer.to_ints()) == offer
    assert Offer.from_ints(NO_OFFER) is None


def test_the_registry_says_who_gives_the_newest_state(world: World) -> None:
    for slot, outer_step in ((0, 6), (1, 7), (3, 7), (4, 7)):
        world.add(slot, outer_step)
        world.directory.held(slot, 0, outer_step=outer_step, state_hash=outer_step, host=HOST, load=int(slot == 3))

    offer = world.peers().offer(0)

    # The busy one is the last choice.
    assert offer == Offer(outer_step=7, state_hash=7, donors=((4, 0), (1, 0)))
    assert world.peers().offer(0, [0]) == Offer(outer_step=6, state_hash=6, donors=((0, 0),))
    assert world.peers().offer(8) is None


@pytest.mark.parametrize("away", [True, False])
def test_without_the_registrys_word_the_peers_are_asked(world: World, away: bool) -> None:
    for slot, outer_step in ((0, 6), (1, 7), (3, 7)):
        world.add(slot, outer_step).state_hash = outer_step
    world.replicas[2].state_hash = 8
    peers = world.peers()
    peers.newest(0)
    if away:
        world.registry.close()

    # One state from those that have it: another hash is another state.
    assert peers.offer(0) == Offer(outer_step=7, state_hash=8, donors=((3, 0),))
    assert peers.offer(0, [0, 1]) == Offer(outer_step=7, state_hash=7, donors=((1, 0),))


@pytest.mark.parametrize("told", [True, False])
def test_after_a_failure_donors_are_offered_one_at_a_time(world: World, told: bool) -> None:
    for slot in (0, 1, 3):
        world.add(slot, 7).state_hash = 7
        if told:
            world.directory.held(slot, 0, outer_step=7, state_hash=7, host=HOST)
    peers = world.peers()

    assert peers.offer(0, None, {(3, 0)}) == Offer(outer_step=7, state_hash=7, donors=((0, 0),))
    assert peers.offer(0, None, {(0, 0), (3, 0)}) == Offer(outer_step=7, state_hash=7, donors=((1, 0),))
    assert peers.offer(0, None, {(0, 0), (1, 0), (3, 0)}) is None


# -- fetching ----------------------------------------------------------------------------------------------------------


def offer_of(*replicas: Replica, outer_step: int = 5) -> Offer:
    donors = tuple((replica.slot, replica.incarnation) for replica in replicas)
    return Offer(outer_step=outer_step, state_hash=-100, donors=donors)


def fetch(peers: Peers, offer: Offer) -> Fetched:
    return peers.fetch(offer, ["outer"], ["outer"], alive=lambda: None)


def test_each_rank_takes_the_part_of_the_same_rank(world: World) -> None:
    parts = [Replica(0, 1, 5) for _ in range(2)]
    world.replicas += parts
    for value, part in enumerate(parts):
        part.server.publish(snapshot(5, value))
    world.directory.register(0, 1, [part.server.address for part in parts])
    signs: list[None] = []

    fetched = [
        world.peers(rank=rank).fetch(
            offer_of(parts[0]), ["outer", "inner"], ["outer"], alive=lambda: signs.append(None)
        )
        for rank in range(2)
    ]

    assert [part.snapshot.sections["outer"]["anchor"][0] for part in fetched] == [0.0, 1.0]
    assert set(fetched[0].snapshot.sections) == {"outer", "inner"}
    assert signs


def test_progress_is_told_by_slot(world: World) -> None:
    replica = world.add(0, 5)
    replica.server.publish(snapshot(5))
    told: list[tuple[int, int, Mapping[int, int]]] = []

    world.peers().fetch(
        offer_of(replica), ["outer"], ["outer"], alive=lambda: None, on_progress=lambda *news: told.append(news)
    )

    assert told[-1] == (16, 16, {0: 16})


def test_who_is_lost_is_replaced_by_another_with_the_same_state(world: World) -> None:
    gone, other, newer = world.add(0, 5), world.add(1, 5), world.add(3, 5)
    other.state_hash = newer.state_hash = gone.state_hash = -100
    other.server.publish(snapshot(5, 7.0))
    gone.server.close()

    fetched = fetch(world.peers(), offer_of(gone))

    assert fetched.snapshot.sections["outer"]["anchor"].tolist() == [7.0] * 4
    assert [donor.slot for donor in fetched.donors] == [1]


def test_another_state_is_no_replacement(world: World) -> None:
    gone, other = world.add(0, 5), world.add(1, 5)
    other.state_hash = -101
    other.server.publish(snapshot(5, 7.0))
    gone.server.close()

    with pytest.raises(TransferFailed):
        fetch(world.peers(), offer_of(gone))


def test_a_newer_one_is_refused_at_once(world: World) -> None:
    replica = world.add(0, 5)
    replica.server.publish(snapshot(6))

    with pytest.raises(TransferFailed):
        fetch(world.peers(), offer_of(replica))


@pytest.mark.parametrize("published", [None, 4])
def test_it_does_not_wait_for_ever(world: World, published: int | None) -> None:
    replica = world.add(0, 5)
    if published is not None:
        replica.server.publish(snapshot(published))

    with pytest.raises(TransferFailed):
        fetch(world.peers(transfers=Transfers(timeout_s=0.1, idle_s=0.1)), offer_of(replica))


def test_another_incarnation_is_not_what_was_named(world: World) -> None:
    offer = offer_of(world.add(0, 5, incarnation=1))
    world.add(0, 5, incarnation=2).server.publish(snapshot(5))

    with pytest.raises(TransferFailed, match=r"replicas \[0\] are not what they were"):
        fetch(world.peers(), offer)


def test_the_donor_hears_that_its_state_is_in_place(world: World) -> None:
    replica = world.add(0, 5)
    replica.server.publish(snapshot(5))
    peers = world.peers()
    fetched = peers.fetch(offer_of(replica), ["outer", "inner"], ["outer"], alive=lambda: None)
    assert replica.served == []

    peers.taken(fetched)

    assert replica.served == [(5, f"{ME}.0")]


# -- watching ----------------------------------------------------------------------------------------------------------
