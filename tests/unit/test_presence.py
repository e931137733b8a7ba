"""How a replica is found, over real connections to the registry and to its ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.doubt import Answer, Docket, Word
from elastic_train.diloco.peers import Offer, Peers, PeerState, Transfers
from elastic_train.diloco.presence import Identity, Presence
from elastic_train.diloco.publication import INNER, OUTER
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.peer_ckpt.client import PeerClient
from elastic_train.peer_ckpt.directory import Directory, RegistrationRefused
from elastic_train.peer_ckpt.snapshot import Snapshot
from tests.controls import Alone, each, together

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
SLOT, INCARNATION = 2, 5


class Journal:
    """Keeps what was served."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def served(self, outer_step: int, state_hash: int) -> None:
        self.told.append((outer_step, state_hash))


class World:
    """A registry, and one replica's ranks before it."""

    def __init__(self) -> None:
        self.registry = RegistryServer(HOST, 0, TOKEN)
        self.docket = Docket()
        self.journal = Journal()
        self.made: list[Presence] = []

    def presence(self, control: ControlGroup | None = None, *, incarnation: int = INCARNATION) -> Presence:
        identity = Identity(
            slot=SLOT,
            incarnation=incarnation,
            host=HOST,
            registry=self.registry.url,
            token=TOKEN,
            config_digest=0,
            transfers=Transfers(timeout_s=TIMEOUT_S),
            watchdog_s=TIMEOUT_S,
        )
        journal: Any = self.journal
        made = Presence(identity, control or Alone(), self.directory(), self.docket, journal)
        self.made.append(made)
        return made

    def directory(self) -> Directory:
        return Directory(self.registry.url, TOKEN)

    def peers(self, *, rank: int = 0) -> Peers:
        """As another replica has them."""
        return Peers(0, rank, self.directory(), PeerClient(TOKEN))

    def close(self) -> None:
        for presence in self.made:
            presence.close()
        self.registry.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_until_it_has_a_state_nobody_can_take_one(world: World) -> None:
    presence = world.presence()
    presence.register()
    peers = world.peers()
    assert peers.lives_on_at(SLOT, INCARNATION, -1) == -1
    assert peers.newest(0) is None

    presence.show(0, -77)

    assert peers.newest(0) == PeerState(slot=SLOT, incarnation=INCARNATION, outer_step=0, state_hash=-77)


def test_what_is_shown_last_holds(world: World) -> None:
    presence = world.presence()
    presence.register()

    presence.show(3, 30)
    presence.show(4, 40)

    assert world.peers().newest(0) == PeerState(slot=SLOT, incarnation=INCARNATION, outer_step=4, state_hash=40)


def test_nobody_knows_of_it_before_it_registers(world: World) -> None:
    presence = world.presence()
    presence.show(3, 30)
    assert world.peers().newest(0) is None

    presence.register()

    assert world.peers().newest(0) is not None


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_are_found_in_their_order(world: World, ranks: int) -> None:
    controls = together(ranks)
    presences = [world.presence(control) for control in controls]

    each(ranks, lambda rank: presences[rank].register())

    entry = world.directory().peers()[SLOT]
    assert entry.incarnation == INCARNATION
    assert entry.addresses == tuple(presence.server.address for presence in presences)
    assert len(set(entry.addresses)) == ranks


def test_each_rank_gives_its_own_part(world: World) -> None:
    controls = together(2)
    presences = [world.presence(control) for control in controls]
    each(2, lambda rank: presences[rank].register())
    for rank, presence in enumerate(presences):
        presence.server.publish(Snapshot({"outer_step": 4}, {OUTER: {"anchor": torch.full((2,), float(rank))}}))
    offer = Offer(outer_step=4, state_hash=0, donors=((SLOT, INCARNATION),))

    parts = [world.peers(rank=rank).fetch(offer, [OUTER], [OUTER], alive=lambda: None) for rank in range(2)]

    assert [part.snapshot.sections[OUTER]["anchor"].tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0]]


def test_an_answer_about_an_attempt_comes_with_the_status(world: World) -> None:
    presence = world.presence()
    presence.register()
    world.docket.open("ab.7")
    world.docket.doubt("ab.7")

    assert world.peers().ask(SLOT, INCARNATION, "ab.7", frozenset({3})) == Answer(word=Word.DOUBT)

    # Whoever asked was promised that nothing comes from the dead any more.
    assert not world.docket.accept("ab.7", 3, 1)
    assert world.docket.accept("ab.7", 4, -99)
    assert world.peers().ask(SLOT, INCARNATION, "ab.7", frozenset()) == Answer(word=Word.COMMITTED, candidate=-99)


def test_a_joiner_that_took_all_is_told_of(world: World) -> None:
    presence = world.presence()
    presence.register()
    header = {"outer_step": 4, "whole_hash": -123}
    presence.server.publish(Snapshot(header, {INNER: {"m": torch.zeros(2)}, OUTER: {"anchor": torch.zeros(2)}}))
    peers, offer = world.peers(), Offer(outer_step=4, state_hash=0, donors=((SLOT, INCARNATION),))

    fetched = peers.fetch(offer, [INNER, OUTER], [OUTER], alive=lambda: None)
    assert world.journal.told == []
    peers.taken(fetched)

    assert world.journal.told == [(4, -123)]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_which_state_the_replica_holds(world: World, rank: int) -> None:
    presence = world.presence(together(2)[rank])
    presence._directory.register(SLOT, INCARNATION, ["http://here:1", "http://here:2"])

    presence.holds({"outer_step": 4, "state_hash": -9})

    assert world.peers().offer(0, [SLOT]) == (
        Offer(outer_step=4, state_hash=-9, donors=((SLOT, INCARNATION),)) if rank == 0 else None
    )


def test_who_was_replaced_cannot_register(world: World) -> None:
    world.presence(incarnation=INCARNATION + 1).register()

    with pytest.raises(RegistrationRefused):
        world.presence().register()


def test_a_registry_that_is_away_is_asked_again(world: World) -> None:
    presence = world.presence()
    port = int(world.registry.url.rpartition(":")[2])
    world.registry.close()
    assert not presence.register()
    world.registry = RegistryServer(HOST, port, TOKEN)
    assert presence.register()
    assert SLOT in world.directory().peers()


def test_a_replica_that_left_gives_its_state_and_goes_on_no_more(world: World) -> None:
    presence = world.presence()
    presence.register()
    presence.show(3, 30)
    peers = world.peers()
    assert peers.lives_on_at(SLOT, INCARNATION, 3) == 3

    presence.leave()

    assert peers.lives_on_at(SLOT, INCARNATION, 3) is None
    assert peers.newest(0) == PeerState(slot=SLOT, incarnation=INCARNATION, outer_step=3, state_hash=30)


def test_a_replica_that_was_closed_does_not_answer(world: World) -> None:
    presence = world.presence()
    presence.register()
    presence.show(3, 30)

    presence.close()

    assert world.peers().newest(0) is None
