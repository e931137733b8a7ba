"""What one rank can learn from its peers outside of a quorum: who is ahead, what became of an attempt, their state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.diloco.doubt import Answer
from elastic_train.peer_ckpt.client import Donor, Fetched, PeerClient, TransferFailed
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.roll import Member

logger = logging.getLogger(__name__)

MAX_DONORS = 8
_PATIENCE_S = 5.0

Progress = Callable[[int, int, Mapping[int, int]], None]
"""Called with the bytes that this rank has received and those of all, and how many came from each slot."""


@dataclass(frozen=True, kw_only=True)
class PeerState:
    """A peer and the state that it holds, as rank 0 of it says."""

    slot: int
    incarnation: int
    outer_step: int
    state_hash: int
    """Over all its ranks, signed 64 bit."""

    @property
    def member(self) -> Member:
        return self.slot, self.incarnation

    def to_ints(self) -> list[int]:
        return [self.slot, self.incarnation, self.outer_step, self.state_hash]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> PeerState:
        slot, incarnation, outer_step, state_hash = values
        return cls(slot=slot, incarnation=incarnation, outer_step=outer_step, state_hash=state_hash)


NOBODY = PeerState(slot=0, incarnation=0, outer_step=-1, state_hash=0)
"""What stands for a peer where there is none."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A state, and the replicas that give it."""

    outer_step: int
    state_hash: int
    """Over all ranks of a replica, signed 64 bit."""
    donors: tuple[Member, ...]
    """The best first, at most ``MAX_DONORS``."""

    @classmethod
    def of(cls, state: PeerState) -> Offer:
        """The state of one peer, from itself."""
        return cls(outer_step=state.outer_step, state_hash=state.state_hash, donors=(state.member,))

    def to_ints(self) -> list[int]:
        """Always as many."""
        row = [self.outer_step, self.state_hash, len(self.donors)]
        row += [number for donor in self.donors for number in donor]
        return row + [0] * (len(NO_OFFER) - len(row))

    @classmethod
    def from_ints(cls, row: Sequence[int]) -> Offer | None:
        """From what ``to_ints`` gave, or ``NO_OFFER``."""
        outer_step, state_hash, count, *members = row
        donors = tuple(zip(members[: 2 * count : 2], members[1 : 2 * count : 2], strict=True))
        return cls(outer_step=outer_step, state_hash=state_hash, donors=donors) if donors else None


NO_OFFER = [0] * (3 + 2 * MAX_DONORS)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """How states are fetched."""

    timeout_s: float = 300.0
    """Bound on a whole one."""
    idle_s: float = 10.0
    """Silence after which a donor is given up."""
    donors: int = 2
    """At once."""
    streams: int = 2
    """Connections to each."""


class Peers:
    """The peers of one rank. May be used from several threads."""

    def __init__(
        self,
        slot: int,
        rank: int,
        directory: Directory,
        client: PeerClient,
        *,
        transfers: Transfers = Transfers(),
        incarnation: int = 0,
        host: str = "",
    ) -> None:
        """
        Args:
            host: where this rank runs: donors on the same host are preferred.
        """
        self._slot = slot
        self._rank = rank
        self._incarnation = incarnation
        self._host = host
        self._directory = directory
        self._client = client
        self._transfers = transfers

    def newest(self, at_least: int, among: Collection[int] | None = None) -> PeerState | None:
        """A peer (one of the slots ``among``, if given) whose outer step is the newest, and ``at_least`` that.

        Among equals it is the next slot after ours, so that several who ask at once are spread over them.
        """
        found = self._standings(at_least, among)
        return found[0] if found else None

    def offer(
        self, at_least: int, among: Collection[int] | None = None, avoid: Collection[Member] = ()
    ) -> Offer | None:
        """The newest state that is to be had, ``at_least`` of that outer step, from the slots ``among``, if given.

        The registry chooses who gives it, as it knows who is busy. Where it is away, or has not heard of such a state
        yet, the peers themselves are asked.

        Args:
            avoid: who has failed this replica. If there are any, one donor is offered at a time: of several, one that
                gives wrong bytes could make the others look wrong.
        """
        count = 1 if avoid else self._transfers.donors
        return self._chosen(at_least, None, among, avoid, count) or self._found(at_least, among, avoid, count)

    def lives_on_at(self, slot: int, incarnation: int, at_least: int) -> int | None:
        """The outer step of that incarnation, if it is ``at_least`` that and goes on from there.

        Returns:
            None: it is further back, or has left with just that state and commits nothing after it; or it does not
            answer, for which it gets time: who is only slow must not be taken for gone.
        """
        entry = self._directory.peers().get(slot)
        if entry is None or entry.incarnation != incarnation:
            return None
        status = self._client.status(entry.addresses[0], timeout_s=_PATIENCE_S)
        if status is None or status["incarnation"] != incarnation:
            return None
        # One that left further on has a commit that must not be made a second time, in another way.
        return int(status["outer_step"]) if status["outer_step"] >= at_least + int(status["left"]) else None

    def confirms(self, offer: Offer) -> Member | None:
        """A donor of the offer that says itself that this is its state now; None if none does."""
        known = self._directory.peers()
        for slot, incarnation in offer.donors:
            entry = known.get(slot)
            if slot == self._slot or entry is None or entry.incarnation != incarnation:
                continue
            status = self._client.status(entry.addresses[0], timeout_s=_PATIENCE_S)
            if status is None or status["incarnation"] != incarnation:
                continue
            if (status["outer_step"], status["state_hash"]) == (offer.outer_step, offer.state_hash):
                return slot, incarnation
        return None

    def ask(self, slot: int, incarnation: int, attempt: str, dead: frozenset[int]) -> Answer | None:
        """What that incarnation says about an attempt; None if it does not answer."""
        entry = self._directory.peers().get(slot)
        if entry is None:
            return None
        status = self._client.status(entry.addresses[0], attempt, dead)
        if status is None or status["incarnation"] != incarnation:
            return None
        try:
            return Answer.from_mapping(status)
        except ValueError as error:
            logger.warning("replica %d's answer about attempt %s means nothing: %s", slot, attempt, error)
            return None

    @property
    def retired(self) -> tuple[int, ...]:
        """Slots given up for good, in the order in which the registry tells all of them; as far as it was heard."""
        return self._directory.known.retired

    def is_dead(self, slot: int, incarnation: int) -> bool:
        """Whether certainly no process of that incarnation is left."""
        return self._directory.is_dead(slot, incarnation)

    def fetch(
        self,
        offer: Offer,
        sections: Sequence[str],
        shared: Sequence[str],
        *,
        alive: Callable[[], None],
        on_progress: Progress = lambda received, total, donors: None,
    ) -> Fetched:
        """This rank's part of the state that is offered.

        A peer's ranks commit within moments of each other, and publish a little later; until then they are asked
        again. Who is lost is replaced by another that has the same state.

        Args:
            shared: sections of which all donors have the same; the others come from one of them.

        Raises:
            TransferFailed: it is not to be had any more.
        """
        donors = self._located(offer.donors)
        if not donors:
            raise TransferFailed(f"replicas {[slot for slot, _ in offer.donors]} are not what they were")

        def others(lost: Collection[Donor]) -> list[Donor]:
            avoid = {(donor.slot, donor.incarnation) for donor in lost} | set(offer.donors)
            step, count = offer.outer_step, self._transfers.donors
            found = self._chosen(step, step, None, avoid, count) or self._found(step, None, avoid, count)
            same = found is not None and (found.outer_step, found.state_hash) == (step, offer.state_hash)
            return self._located(found.donors) if found is not None and same else []

        return self._client.fetch(
            donors,
            sections,
            want=offer.outer_step,
            timeout_s=self._transfers.timeout_s,
            shared=shared,
            joiner=f"{self._slot}.{self._incarnation}",
            streams=self._transfers.streams,
            idle_s=self._transfers.idle_s,
            replace=others,
            on_progress=lambda received, total, given: on_progress(received, total, by_slot(given)),
            alive=alive,
        )

    def taken(self, fetched: Fetched) -> None:
        """What was fetched is in place: the donors are free again, and the one that gave what only it has hears it."""
        self._client.taken(fetched.primary, fetched.snapshot.header["outer_step"], f"{self._slot}.{self._incarnation}")
        self.released()

    def released(self) -> None:
        """The donors that the registry chose are not needed any more."""
        if self._rank == 0:
            self._directory.taken(self._slot, self._incarnation)

    def _located(self, members: Sequence[Member]) -> list[Donor]:
        """Where this rank's counterparts in those replicas can be asked, as far as they are still what they were."""
        known = self._directory.peers()
        return [
            Donor(slot=slot, incarnation=incarnation, address=known[slot].addresses[self._rank])
            for slot, incarnation in members
            if slot in known and known[slot].incarnation == incarnation and self._rank < len(known[slot].addresses)
        ]

    def _chosen(
        self, at_least: int, at_most: int | None, among: Collection[int] | None, avoid: Collection[Member], count: int
    ) -> Offer | None:
        """By the registry."""
        answer = self._directory.donors(
            self._slot,
            self._incarnation,
            self._host,
            at_least=at_least,
            at_most=at_most,
            count=count,
            among=among,
            avoid=avoid,
        )
        if answer is None or not answer.donors:
            return None
        return Offer(
            outer_step=answer.outer_step,
            state_hash=answer.state_hash,
            donors=tuple((donor.slot, donor.incarnation) for donor in answer.donors),
        )

    def _found(
        self, at_least: int, among: Collection[int] | None, avoid: Collection[Member], count: int
    ) -> Offer | None:
        """By asking the peers."""
        standings = [state for state in self._standings(at_least, among) if state.member not in avoid]
        if not standings:
            return None
        first = standings[0]
        same = [state for state in standings if state.state_hash == first.state_hash]
        return Offer(
            outer_step=first.outer_step,
            state_hash=first.state_hash,
            donors=tuple(state.member for state in same[:count]),
        )

    def _standings(self, at_least: int, among: Collection[int] | None) -> list[PeerState]:
        """The peers at the newest outer step, if it is ``at_least`` that; from the next slot after ours on."""
        found: list[PeerState] = []
        for slot, entry in self._directory.peers().items():
            if slot == self._slot or (among is not None and slot not in among):
                continue
            status = self._client.status(entry.addresses[0])
            if status is not None and status["outer_step"] >= at_least:
                found.append(
                    PeerState(
                        slot=slot,
                        incarnation=status["incarnation"],
                        outer_step=status["outer_step"],
                        state_hash=status["state_hash"],
                    )
                )
        best = max((state.outer_step for state in found), default=0)
        newest = [state for state in found if state.outer_step == best]
        return sorted(newest, key=lambda state: (state.slot <= self._slot, state.slot))


def by_slot(given: Mapping[Donor, int]) -> dict[int, int]:
    """Bytes by the slot that gave them."""
    slots: dict[int, int] = {}
    for donor, size in given.items():
        slots[donor.slot] = slots.get(donor.slot, 0) + size
    return slots


def status_of(
    *, slot: int, incarnation: int, outer_step: int, state_hash: int, left: bool, answer: Answer
) -> Mapping[str, Any]:
    """What a replica says of itself, as ``Peers`` reads it. An outer step below 0: it has no state. One that has left
    gives its state, and commits nothing any more."""
    return {
        "slot": slot,
        "incarnation": incarnation,
        "outer_step": outer_step,
        "state_hash": state_hash,
        "left": left,
        **answer.as_mapping(),
    }
