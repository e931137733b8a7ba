"""How a replica takes over a peer's state; the transfer itself is the matter of ``test_peers``."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.diloco.adoption import Adoption
from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.engine import NoPeerState, Sync, SyncKind, Trained
from elastic_train.diloco.flat import flatten
from elastic_train.diloco.flight import Contribution
from elastic_train.diloco.interval import Interval
from elastic_train.diloco.ledger import Ledger
from elastic_train.diloco.peers import Offer
from elastic_train.diloco.publication import INNER, OUTER, Publication
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.diloco.trainee import Source
from elastic_train.peer_ckpt.client import Donor, Fetched, TransferFailed, Unwanted
from elastic_train.peer_ckpt.remains import Remains
from elastic_train.peer_ckpt.roll import Member
from elastic_train.peer_ckpt.shards import combine, hash_tensors, load_tensors, tensor_bytes
from elastic_train.peer_ckpt.shared_memory import SharedMemory
from elastic_train.peer_ckpt.snapshot import Snapshot
from tests.controls import Alone, each, together
from tests.rows import ROW

TIMEOUT_S = 30.0
SIZES = (3, 2)
LEARNED = 0.5
SCHEDULE = OuterSchedule(steps=12, sync_every=4, fragments=len(SIZES))
LAST = SCHEDULE.outer_steps
DONOR = 1
OWN_TOKENS = 30


class Journal:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.sources: list[Source] = []

    def heal_started(self, donors: Sequence[int], outer_step: int) -> None:
        self.told.append(("heal_started", *donors, outer_step))

    def transferred(self, received: int, total: int, donors: Mapping[int, int]) -> None:
        assert received <= total == sum(donors.values())

    def heal_finished(
        self,
        primary: int,
        donors: Mapping[int, int],
        outer_step: int,
        duration_s: float,
        rank_hash: int,
        source: Source = Source.PEERS,
    ) -> None:
        assert list(donors) == [primary]
        self.sources.append(source)
        self.told.append(("heal_finished", primary, outer_step, sum(donors.values()), rank_hash))

    def caught_up(self, outer_step: int, tokens: int, donor: int) -> None:
        self.told.append(("caught_up", outer_step, tokens, donor))


class Rank:
    """A trainee; also whoever publishes, so that it keeps what it shows."""

    def __init__(self, value: float) -> None:
        self.moment = torch.full((4,), value)
        self.counter = value
        self.followed: list[bool] = []
        self.taken: list[Snapshot] = []
        self.lives = 0
        self.after_take: Callable[[], None] = lambda: None
        self.shown: list[Snapshot] = []

    def at_point(self, point: str) -> None: ...

    def alive(self) -> None:
        self.lives += 1

    def waiting(self) -> None: ...

    def moments(self) -> dict[str, torch.Tensor]:
        return {"exp_avg": self.moment}

    def counters(self) -> dict[str, Any]:
        return {"counter": self.counter}

    def take(self, snapshot: Snapshot) -> None:
        load_tensors(self.moments().items(), snapshot.sections[INNER])
        self.counter = snapshot.header["extra"]["counter"]
        self.taken.append(snapshot)
        self.after_take()

    def follow(self, snapshot: Snapshot, *, included: bool) -> None:
        self.followed.append(included)

    def publish(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)


class Market:
    """The peers of a rank: states to be had, or not, in the order in which they are preferred."""

    def __init__(self) -> None:
        self.offers: dict[Offer, Snapshot | Exception] = {}
        self.fetched: list[int] = []
        self.took: list[int] = []
        self.primary: Member | None = None
        self.now: dict[Member, tuple[int, int]] = {}
        """Outer step and hash that peers answer with when they are asked themselves."""
        self.released_count = 0
        self.looks: list[tuple[int, Sequence[int] | None]] = []

    def offer(
        self, at_least: int, among: Collection[int] | None = None, avoid: Collection[Member] = ()
    ) -> Offer | None:
        self.looks.append((at_least, list(among) if among is not None else None))
        fit = [
            offer
            for offer in self.offers
            if offer.outer_step >= at_least and (among is None or offer.donors[0][0] in among)
        ]
        return next((offer for offer in fit if offer.donors[0] not in avoid), None)

    def fetch(
        self,
        offer: Offer,
        sections: Sequence[str],
        shared: Sequence[str],
        *,
        alive: Callable[[], None],
        on_progress: Callable[[int, int, Mapping[int, int]], None],
    ) -> Fetched:
        assert shared == [OUTER]
        alive()
        (slot, incarnation), *_ = offer.donors
        self.fetched.append(slot)
        found = self.offers[offer]
        if isinstance(found, Exception):
            raise found
        snapshot = Snapshot(found.header, {section: found.sections[section] for section in sections})
        size = tensor_bytes(snapshot.sections)
        on_progress(size, size, {slot: size})
        slot, incarnation = self.primary or (slot, incarnation)
        donor = Donor(slot=slot, incarnation=incarnation, address="")
        return Fetched(snapshot=snapshot, primary=donor, donors={donor: size}, refetched=0)

    def confirms(self, offer: Offer) -> Member | None:
        asked = (member for member in offer.donors if self.now.get(member) == (offer.outer_step, offer.state_hash))
        return next(asked, None)

    def released(self) -> None:
        self.released_count += 1

    def taken(self, fetched: Fetched) -> None:
        self.took.append(fetched.primary.slot)


class Replica:
    """One rank of a replica that has trained a little since its anchor."""

    def __init__(
        self,
        control: ControlGroup | None = None,
        *,
        first: float = 0.0,
        timeout_s: float = TIMEOUT_S,
        remains: Remains | None = None,
    ) -> None:
        self.control = control or Alone()
        self.parameters = [nn.Parameter(torch.arange(float(size)) + first) for size in SIZES]
        modules = [nn.ParameterList([parameter]) for parameter in self.parameters]
        self.fragments = flatten(modules, device=torch.device("cpu"), pin_memory=False)
        self.ledger = Ledger(self.fragments, self.control)
        self.interval = Interval(SCHEDULE)
        self.rank, self.journal, self.market = Rank(first), Journal(), Market()
        trainee: Any = self.rank
        self.publication = Publication(trainee, self.fragments, trainee)
        peers: Any = self.market
        journal: Any = self.journal
        self.adoption = Adoption(
            control=self.control,
            peers=peers,
            ledger=self.ledger,
            interval=self.interval,
            publication=self.publication,
            trainee=trainee,
            journal=journal,
            timeout_s=timeout_s,
            remains=remains,
        )
        for parameter in self.parameters:
            parameter.data += LEARNED
        self.trains(OWN_TOKENS)

    def trains(self, tokens: int) -> None:
        self.interval.add(Trained(tokens=tokens, seconds=1.0))

    def shows(self, outer_step: int) -> Snapshot:
        self.publication.publish(self.ledger.header(outer_step))
        self.publication.settle()
        return self.rank.shown[-1]

    def is_offered(self, snapshot: Snapshot | Exception, source: Offer) -> None:
        self.market.offers[source] = snapshot

    def catch_up(self, source: Offer, voted: tuple[int, int, Contribution] | None = None) -> Sync | None:
        return self.adoption.catch_up(source, voted)

    def everything(self) -> tuple[Any, ...]:
        """What must be the same where nothing was taken over."""
        return (
            [parameter.tolist() for parameter in self.parameters],
            [fragment.committed.hash() for fragment in self.fragments],
            self.ledger.header(0),
            self.rank.moment.tolist(),
            self.rank.counter,
            (self.rank.followed, self.rank.taken),
            (self.interval.outer_step, self.interval.done, self.interval.unsettled),
            [(shown.is_retired(INNER), shown.is_retired(OUTER)) for shown in self.rank.shown],
        )


def donor_at(outer_step: int, *, slot: int = DONOR, first: float = 100.0) -> tuple[Offer, Snapshot]:
    """A peer of one rank and what it shows; each fragment has an outer step behind it."""
    replica = Replica(first=first)
    for index, fragment in enumerate(replica.fragments):
        fragment.candidate.anchor.copy_(fragment.committed.anchor + 10 * (index + 1))
        fragment.candidate.momentum.fill_(index + 1.0)
        part = fragment.candidate.hash()
        state_hash = combine([replica.ledger.rank_hash_with(index, part)])
        at = outer_step - len(SIZES) + 1 + index
        replica.ledger.commit(at, index, part=part, state_hash=state_hash, members=[(slot, 0)])
    state = Offer(outer_step=outer_step, state_hash=replica.ledger.state_hash, donors=((slot, 0),))
    return state, replica.shows(outer_step)


def learned(replica: Replica) -> list[float]:
    """What the parameters of each fragment are above their anchor."""
    differences = []
    for parameter, fragment in zip(replica.parameters, replica.fragments, strict=True):
        values = set((parameter.detach() - fragment.committed.anchor).tolist())
        assert len(values) == 1
        differences.append(values.pop())
    return differences


def holds(replica: Replica, snapshot: Snapshot) -> bool:
    """Whether the outer state is that of the snapshot."""
    outer = snapshot.sections[OUTER]
    return replica.ledger.is_sound() and all(
        torch.equal(fragment.committed.anchor, outer[f"{index}.anchor"])
        and torch.equal(fragment.committed.momentum, outer[f"{index}.momentum"])
        for index, fragment in enumerate(replica.fragments)
    )


def contribution(replica: Replica, fragment: int) -> Contribution:
    """All that the replica has trained so far."""
    return Contribution(
        fragment=fragment, row=ROW, trained=replica.interval.tokens, progress=torch.zeros(1, 4, dtype=torch.int64)
    )


# -- catching up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer_step", "carried", "settled"),
    [
        (LAST - 3, [LEARNED, LEARNED], 0),
        (LAST - 2, [LEARNED, LEARNED], 0),
        # Of two fragments only one syncs once more: the other would keep for ever what only this replica has.
        (LAST - 1, [LEARNED if index == (LAST - 1) % 2 else 0.0 for index in range(2)], 0),
        (LAST, [0.0, 0.0], OWN_TOKENS),
    ],
)
def test_own_progress_is_carried_into_what_still_syncs(outer_step: int, carried: list[float], settled: int) -> None:
    replica = Replica()
    source, snapshot = donor_at(outer_step)
    replica.is_offered(snapshot, source)

    sync = replica.catch_up(source)

    left = OWN_TOKENS - settled
    assert sync == Sync(kind=SyncKind.CAUGHT_UP, outer_step=outer_step, tokens=settled, carried=left)
    assert holds(replica, snapshot)
    assert learned(replica) == carried
    assert replica.interval.unsettled == left
    assert (replica.interval.outer_step, replica.interval.done) == (outer_step, 0)
    assert replica.ledger.state_hash == source.state_hash
    assert replica.rank.followed == [False]
    assert replica.journal.told == [("caught_up", outer_step, settled, DONOR)]
    # The inner optimizer's own state stays.
    assert replica.rank.moment.tolist() == [0.0] * 4
    assert replica.rank.taken == []


@pytest.mark.parametrize("fragment", [0, 1])
def test_what_the_peer_has_already_is_not_carried(fragment: int) -> None:
    replica = Replica()
    source, snapshot = donor_at(LAST - 2)
    replica.is_offered(snapshot, source)
    step, state_hash = list(snapshot.header["history"].items())[fragment]
    voted = int(step), state_hash, contribution(replica, fragment)
    # Trained beside the sync, so no part of what was brought to it.
    replica.trains(4)

    sync = replica.catch_up(source, voted)

    assert sync is not None
    assert (sync.tokens, sync.carried) == (OWN_TOKENS, 4)
    assert holds(replica, snapshot)
    assert learned(replica) == [0.0 if index == fragment else LEARNED for index in range(2)]
    assert replica.interval.unsettled == 4
    # The other fragment's next sync has all of it still to come.
    assert [replica.interval.unsettled_of(index) for index in range(2)] == [
        4 if index == fragment else OWN_TOKENS + 4 for index in range(2)
    ]
    assert replica.rank.followed == [True]
    assert replica.journal.told == [("caught_up", LAST - 2, OWN_TOKENS, DONOR)]


@pytest.mark.parametrize("other", ["hash", "step"])
def test_a_candidate_that_came_to_nothing_is_in_nobodys_state(other: str) -> None:
    replica = Replica()
    source, snapshot = donor_at(LAST - 2)
    replica.is_offered(snapshot, source)
    step, state_hash = next(iter(snapshot.header["history"].items()))
    voted = (int(step), state_hash + 1) if other == "hash" else (int(step) - 5, state_hash)

    sync = replica.catch_up(source, (*voted, contribution(replica, 0)))

    assert sync == Sync(kind=SyncKind.CAUGHT_UP, outer_step=LAST - 2, tokens=0, carried=OWN_TOKENS)
    assert learned(replica) == [LEARNED, LEARNED]
    assert replica.interval.unsettled == OWN_TOKENS
    assert replica.rank.followed == [False]


def test_at_the_end_of_the_run_all_is_settled_although_one_fragment_had_it() -> None:
    replica = Replica()
    source, snapshot = donor_at(LAST)
    replica.is_offered(snapshot, source)
    step, state_hash = next(iter(snapshot.header["history"].items()))
    voted = int(step), state_hash, contribution(replica, 0)
    replica.trains(4)

    sync = replica.catch_up(source, voted)

    assert sync is not None
    assert sync.tokens == OWN_TOKENS + 4
    assert learned(replica) == [0.0, 0.0]
    assert [replica.interval.unsettled_of(index) for index in range(2)] == [0, 0]


def test_what_it_shows_is_withdrawn_before_a_peers_state_lies_there() -> None:
    replica = Replica()
    own = replica.shows(0)
    source, snapshot = donor_at(LAST - 2)
    replica.is_offered(snapshot, source)

    replica.catch_up(source)

    assert own.is_retired(INNER)
    assert own.is_retired(OUTER)


# -- what is refused ---------------------------------------------------------------------------------------------------


def damaged(snapshot: Snapshot, name: str) -> Snapshot:
    """With one bit of an outer tensor flipped."""
    outer = {key: tensor.clone() for key, tensor in snapshot.sections[OUTER].items()}
    outer[name].view(torch.int32)[0] ^= 1
    return Snapshot(snapshot.header, {**snapshot.sections, OUTER: outer})


def lacking(snapshot: Snapshot) -> Snapshot:
    """With a fragment less."""
    outer = {key: tensor for key, tensor in snapshot.sections[OUTER].items() if not key.startswith("1.")}
    return Snapshot(snapshot.header, {**snapshot.sections, OUTER: outer})


REFUSED: dict[str, Callable[[Snapshot], Snapshot | Exception]] = {
    "anchor": lambda snapshot: damaged(snapshot, "0.anchor"),
    "momentum": lambda snapshot: damaged(snapshot, "1.momentum"),
    "lacking": lacking,
    "gone": lambda snapshot: TransferFailed("the donor is gone"),
}


@pytest.mark.parametrize("way", ["catch_up", "heal"])
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_is_not_the_one_named_on_one_rank_is_refused_on_all(way: str, kind: str, rank: int) -> None:
    controls = together(2)
    parts = [donor_at(LAST - 2, first=first)[1] for first in (100.0, 200.0)]
    state_hash = combine([part.header["rank_hash"] for part in parts])
    source = Offer(outer_step=LAST - 2, state_hash=state_hash, donors=((DONOR, 0),))

    def refuses(mine: int) -> bool:
        replica = Replica(controls[mine], timeout_s=0.0)
        replica.shows(0)
        replica.is_offered(REFUSED[kind](parts[mine]) if mine == rank else parts[mine], source)
        before = replica.everything()
        taken = replica.catch_up(source) if way == "catch_up" else replica.adoption.heal_from_any(0, None)
        assert replica.market.fetched
        assert not [told for told in replica.journal.told if told[0] != "heal_started"]
        return taken is None and replica.everything() == before

    assert each(2, refuses) == [True, True]


def test_the_same_state_whole_on_all_ranks_is_taken_by_all() -> None:
    controls = together(2)
    parts = [donor_at(LAST - 2, first=first)[1] for first in (100.0, 200.0)]
    hashes = [part.header["rank_hash"] for part in parts]
    source = Offer(outer_step=LAST - 2, state_hash=combine(hashes), donors=((DONOR, 0),))

    def takes(mine: int) -> bool:
        replica = Replica(controls[mine])
        replica.is_offered(parts[mine], source)
        # Rank 0 finds the donor, and the others hear of it.
        taken = replica.adoption.heal_from_any(0, None)
        assert bool(replica.market.looks) is (mine == 0)
        return taken is not None and holds(replica, parts[mine])

    assert each(2, takes) == [True, True]


def test_parts_of_two_states_are_no_state() -> None:
    controls = together(2)
    parts = [donor_at(LAST - 2, first=first)[1] for first in (100.0, 200.0)]
    hashes = [part.header["rank_hash"] for part in parts]
    source = Offer(outer_step=LAST - 2, state_hash=combine(hashes), donors=((DONOR, 0),))

    def swapped(mine: int) -> Sync | None:
        replica = Replica(controls[mine])
        replica.is_offered(parts[1 - mine], source)
        return replica.catch_up(source)

    assert each(2, swapped) == [None, None]


# -- healing -----------------------------------------------------------------------------------------------------------


def test_a_heal_takes_everything_and_forgets_its_own() -> None:
    replica = Replica()
    own = replica.shows(0)
    source, snapshot = donor_at(LAST - 2)
    replica.is_offered(snapshot, source)

    sync = replica.adoption.heal_from_any(0, None)

    assert sync == Sync(kind=SyncKind.HEALED, outer_step=LAST - 2)
    assert holds(replica, snapshot)
    assert learned(replica) == [0.0, 0.0]
    assert torch.equal(replica.rank.moment, snapshot.sections[INNER]["exp_avg"])
    assert replica.rank.counter == 100.0
    assert [replica.interval.unsettled_of(index) for index in range(2)] == [0, 0]
    assert (replica.interval.outer_step, replica.interval.done, replica.interval.unsettled) == (LAST - 2, 0, 0)
    size = 2 * 4 * sum(SIZES) + 4 * 4
    assert replica.journal.told == [
        ("heal_started", DONOR, LAST - 2),
        ("heal_finished", DONOR, LAST - 2, size, snapshot.header["whole_hash"]),
    ]
    assert own.is_retired(INNER)
    assert own.is_retired(OUTER)


@pytest.mark.parametrize("kind", REFUSED)
def test_after_one_donor_failed_another_is_asked(kind: str) -> None:
    replica = Replica()
    bad, bad_snapshot = donor_at(LAST - 2, slot=3)
    good, good_snapshot = donor_at(LAST - 2, slot=4, first=300.0)
    replica.is_offered(REFUSED[kind](bad_snapshot), bad)
    replica.is_offered(good_snapshot, good)

    sync = replica.adoption.heal_from_any(0, None)

    assert sync == Sync(kind=SyncKind.HEALED, outer_step=LAST - 2)
    assert replica.market.fetched == [3, 4]
    assert holds(replica, good_snapshot)
    assert [told[:2] for told in replica.journal.told] == [
        ("heal_started", 3),
        ("heal_started", 4),
        ("heal_finished", 4),
    ]


@pytest.mark.parametrize("offered", [False, True])
def test_the_search_for_a_donor_has_a_bound(offered: bool) -> None:
    replica = Replica(timeout_s=0.0)
    before = replica.everything()
    if offered:
        replica.is_offered(TransferFailed("gone"), donor_at(LAST - 2)[0])

    assert replica.adoption.heal_from_any(0, None) is None

    assert replica.everything() == before
    assert bool(replica.market.fetched) is offered
    assert replica.rank.lives >= 1


def test_the_search_for_a_donor_goes_on_until_one_is_there() -> None:
    replica = Replica()
    source, snapshot = donor_at(LAST - 2)
    # It lets itself be seen at the third look.
    looks = replica.market.looks

    def appears(at_least: int, among: Collection[int] | None = None, avoid: Collection[Member] = ()) -> Any:
        if len(looks) == 2:
            replica.is_offered(snapshot, source)
        return Market.offer(replica.market, at_least, among, avoid)

    replica.market.offer = appears  # type: ignore[method-assign]

    assert replica.adoption.heal_from_any(0, None) is not None
    assert looks == [(0, None)] * 3


def test_only_a_donor_that_fits_is_asked() -> None:
    replica = Replica(timeout_s=0.0)
    for slot, outer_step in ((1, LAST - 2), (3, LAST - 3)):
        source, snapshot = donor_at(outer_step, slot=slot)
        replica.is_offered(snapshot, source)

    assert replica.adoption.heal_from_any(LAST - 2, [3]) is None
    assert replica.adoption.look(LAST - 3, [3]) is not None
    assert replica.market.fetched == []
    assert replica.adoption.heal_from_any(LAST - 2, [1, 3]) is not None
    assert replica.market.fetched == [1]


def test_a_state_that_differs_once_it_is_in_place_is_no_state() -> None:
    replica = Replica()
    source, snapshot = donor_at(LAST - 2)
    replica.is_offered(snapshot, source)

    def flip() -> None:
        replica.rank.moment.view(torch.int32)[0] ^= 1

    replica.rank.after_take = flip

    with pytest.raises(NoPeerState, match="differs from the donor's"):
        replica.adoption.heal_from_any(0, None)

    assert [told[0] for told in replica.journal.told] == ["heal_started"]


def test_moments_that_were_damaged_on_the_way_are_found() -> None:
    replica = Replica()
    source, snapshot = donor_at(LAST - 2)
    inner = {name: tensor.clone() for name, tensor in snapshot.sections[INNER].items()}
    inner["exp_avg"].view(torch.int32)[2] ^= 1
    replica.is_offered(Snapshot(snapshot.header, {**snapshot.sections, INNER: inner}), source)

    with pytest.raises(NoPeerState, match="differs from the donor's"):
        replica.adoption.heal_from_any(0, None)


@pytest.mark.parametrize("same", [True, False])
def test_moments_come_from_one_replica_for_all_ranks(same: bool) -> None:
    controls = together(2)
    parts = [donor_at(LAST - 2, first=first)[1] for first in (100.0, 200.0)]
    hashes = [part.header["rank_hash"] for part in parts]
    source = Offer(outer_step=LAST - 2, state_hash=combine(hashes), donors=((DONOR, 0), (4, 0)))

    def takes(mine: int) -> bool:
        replica = Replica(controls[mine], timeout_s=0.0)
        replica.is_offered(parts[mine], source)
        replica.market.primary = (DONOR, 0) if same or mine == 0 else (4, 0)
        return replica.adoption.heal_from_any(0, None) is not None

    assert each(2, takes) == [same, same]


def test_who_has_only_moved_on_is_asked_again_at_once() -> None:
    replica = Replica()
    older, _ = donor_at(LAST - 3)
    newer, snapshot = donor_at(LAST - 2)
    replica.is_offered(Unwanted("it has gone on", LAST - 2), older)

    def offers(at_least: int, among: Collection[int] | None = None, avoid: Collection[Member] = ()) -> Offer | None:
        assert not avoid
        return older if not replica.market.fetched else newer

    replica.market.offer = offers  # type: ignore[method-assign]
    replica.is_offered(snapshot, newer)

    assert replica.adoption.heal_from_any(0, None) == Sync(kind=SyncKind.HEALED, outer_step=LAST - 2)


# -- what an earlier incarnation has left ------------------------------------------------------------------------------


class Left:
    """What the ranks of an earlier incarnation left in memory, a donor's state on each."""

    def __init__(self, ranks: int) -> None:
        self.files = [os.memfd_create("rank", os.MFD_CLOEXEC) for _ in range(ranks)]
        self.memories = [SharedMemory(self.path(rank), room=64 << 20) for rank in range(ranks)]
        self.donors = [donor_at(LAST - 2, first=100.0 * (rank + 1)) for rank in range(ranks)]
        self.parts = [self._moved(rank, snapshot) for rank, (_, snapshot) in enumerate(self.donors)]
        hashes = [part.header["rank_hash"] for part in self.parts]
        self.offer = Offer(outer_step=LAST - 2, state_hash=combine(hashes), donors=((DONOR, 0), (4, 0)))

    def _moved(self, rank: int, snapshot: Snapshot) -> Snapshot:
        memory = self.memories[rank]
        return Snapshot(
            snapshot.header,
            {
                section: {
                    name: memory.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)
                    for name, tensor in tensors.items()
                }
                for section, tensors in snapshot.sections.items()
            },
        )

    def path(self, rank: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self.files[rank]}"

    def keep(self, *ranks: int) -> None:
        """Let those ranks have shown it before they died, under the hash of the whole replica's state."""
        for rank in ranks:
            part = self.parts[rank]
            header = {**part.header, "state_hash": self.offer.state_hash}
            self.memories[rank].keep(Snapshot(header, part.sections))

    def held(self, rank: int) -> int:
        return os.fstat(self.files[rank]).st_blocks

    def close(self) -> None:
        for file in self.files:
            os.close(file)


@pytest.fixture
def left() -> Iterator[Left]:
    made = Left(2)
    yield made
    made.close()


def heals(left: Left, rank: int, control: ControlGroup, now: Mapping[Member, tuple[int, int]]) -> Replica:
    """One rank of the next incarnation, after it has healed."""
    replica = Replica(control, remains=Remains(left.path(rank)))
    # Over the network comes a state with other moments.
    part = left.donors[rank][1]
    inner = {name: tensor + 1 for name, tensor in part.sections[INNER].items()}
    whole = combine([part.header["rank_hash"], hash_tensors(inner)])
    replica.is_offered(Snapshot({**part.header, "whole_hash": whole}, {**part.sections, INNER: inner}), left.offer)
    replica.market.now.update(now)
    assert replica.adoption.heal_from_any(0, None) == Sync(kind=SyncKind.HEALED, outer_step=LAST - 2)
    assert holds(replica, part)
    assert learned(replica) == [0.0, 0.0]
    assert replica.rank.counter == 100.0 * (rank + 1)
    return replica


def test_a_state_that_is_still_the_runs_is_taken_from_memory(left: Left) -> None:
    left.keep(0, 1)
    controls = together(2)
    # The first donor of the offer is gone; the second says it.
    now = {(4, 0): (LAST - 2, left.offer.state_hash)}

    replicas = each(2, lambda rank: heals(left, rank, controls[rank], now))

    for rank, replica in enumerate(replicas):
        assert replica.market.fetched == replica.market.took == []
        assert replica.market.released_count == 1
        assert torch.equal(replica.rank.moment, torch.full((4,), 100.0 * (rank + 1)))
        whole = left.parts[rank].header["whole_hash"]
        assert replica.journal.told[1:] == [("heal_finished", 4, LAST - 2, 0, whole)]
        assert replica.journal.sources == [Source.MEMORY]
        assert left.held(rank) == 0


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[1] ^= 1 << 9


@pytest.mark.parametrize(
    "why", ["nobody answers", "a peer is newer", "another state", "one rank has none", "an anchor", "a moment", "index"]
)
def test_any_doubt_about_it_means_the_network_for_all_ranks(left: Left, why: str) -> None:
    left.keep(*((0,) if why == "one rank has none" else (0, 1)))
    controls = together(2)
    now = {(DONOR, 0): (LAST - 2, left.offer.state_hash)}
    match why:
        case "nobody answers":
            now = {}
        case "a peer is newer":
            now = {(DONOR, 0): (LAST - 1, 5)}
        case "another state":
            now = {(DONOR, 0): (LAST - 2, left.offer.state_hash + 1)}
        case "an anchor":
            flip(left.parts[1].sections[OUTER]["1.anchor"])
        case "a moment":
            flip(left.parts[0].sections[INNER]["exp_avg"])
        case "index":
            os.pwrite(left.files[1], b"x", 30)

    def act(rank: int) -> tuple[bool, list[int], list[Source], int]:
        replica = heals(left, rank, controls[rank], now)
        moved = torch.equal(replica.rank.moment, torch.full((4,), 100.0 * (rank + 1) + 1))
        return moved, replica.market.fetched, replica.journal.sources, left.held(rank)

    assert each(2, act) == [(True, [DONOR], [Source.PEERS], 0)] * 2


def test_memory_is_looked_at_once_and_given_back_before_a_transfer(left: Left) -> None:
    left.keep(0)
    replica = Replica(remains=Remains(left.path(0)))
    offer, snapshot = donor_at(LAST - 2, first=100.0)
    replica.is_offered(TransferFailed("gone"), Offer(outer_step=LAST - 1, state_hash=1, donors=((3, 0),)))
    replica.is_offered(snapshot, offer)
    # In the second look it would fit.
    replica.market.now[DONOR, 0] = (LAST - 2, offer.state_hash)
    held: list[int] = []
    fetch = replica.market.fetch

    def watched(*arguments: Any, **settings: Any) -> Fetched:
        held.append(left.held(0))
        return fetch(*arguments, **settings)

    replica.market.fetch = watched  # type: ignore[method-assign]

    assert replica.adoption.heal_from_any(0, None) == Sync(kind=SyncKind.HEALED, outer_step=LAST - 2)

    assert replica.market.fetched == [3, DONOR]
    assert held == [0, 0]
    assert replica.journal.sources == [Source.PEERS]
