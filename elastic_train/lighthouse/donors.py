"""Which replicas a joiner fetches its state from, and how many joiners each of them serves.

Only the registry hears of everybody who joins, so only it can spread them. It decides on what it was told: which state
a replica holds, how many transfers go on at it, and to whom it was itself given as a donor a moment ago.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elastic_train.peer_ckpt.roll import Member

LEASE_S = 60.0
"""Seconds after which a joiner that has not said that it is done no longer counts. A transfer that takes longer still
counts by what its donors report."""


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """A state that can be had from a replica."""

    outer_step: int
    state_hash: int
    """Over all its ranks, signed 64 bit."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A replica that serves its last states."""

    slot: int
    incarnation: int
    host: str
    held: tuple[HeldState, ...]
    """In the order in which it told of them."""
    load: int
    """Joiners that it serves."""

    @property
    def member(self) -> Member:
        return self.slot, self.incarnation


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a joiner asks for."""

    slot: int
    incarnation: int
    host: str
    at_least: int
    """Least outer step that is of use to it."""
    at_most: int | None = None
    """Greatest one; None: any. Who has lost a donor in the middle of a transfer needs the same outer step again,
    though there may be a newer one by now."""
    count: int
    """Most donors that it can use at once."""
    among: frozenset[int] | None = None
    """Slots that may be chosen; None: all."""
    avoid: frozenset[Member] = frozenset()
    """Who has failed it."""

    @property
    def member(self) -> Member:
        return self.slot, self.incarnation

    @property
    def replaces(self) -> bool:
        """Whether the donors are to help those that the joiner has already."""
        return self.at_most is not None

    def may_take_from(self, holder: Holder) -> bool:
        """Whether that replica is another one, and not excluded."""
        return (
            holder.slot != self.slot
            and (self.among is None or holder.slot in self.among)
            and holder.member not in self.avoid
        )

    def takes(self, state: HeldState) -> bool:
        """Whether its outer step is of use."""
        return self.at_least <= state.outer_step and (self.at_most is None or state.outer_step <= self.at_most)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One state, and who is to give it."""

    state: HeldState
    donors: tuple[Holder, ...]
    """At least one, the best first."""


def choose(wish: Wish, holders: Iterable[Holder]) -> Choice | None:
    """The donors for a joiner: all with the same state, of the newest outer step that can be had.

    Where holders of that outer step differ, the state that most of them have is taken, on a tie the one with the
    smaller hash. Of those who have it, the least loaded come first, then those on the joiner's host, then the next
    slots after the joiner's, so that several who ask at once are spread.

    Args:
        holders: living replicas, one a slot.

    Returns:
        None if nobody has what is wished for.
    """
    able = [holder for holder in holders if wish.may_take_from(holder)]
    votes = Counter(state for holder in able for state in holder.held if wish.takes(state))
    if not votes:
        return None
    state = min(votes, key=lambda state: (-state.outer_step, -votes[state], state.state_hash))
    having = sorted(
        (holder for holder in able if state in holder.held),
        key=lambda holder: (holder.load, holder.host != wish.host, holder.slot < wish.slot, holder.slot),
    )
    return Choice(state=state, donors=tuple(having[: wish.count]))


@dataclass(frozen=True, kw_only=True)
class _Lease:
    donors: frozenset[Member]
    given: float


class Leases:
    """Who was told to fetch from whom, and has not ended that yet. Times are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._given: dict[Member, _Lease] = {}

    def give(self, joiner: Member, donors: Iterable[Member], now: float) -> None:
        """The joiner is about to fetch from these, too."""
        before = self._given.get(joiner)
        known = frozenset() if before is None else before.donors
        self._given[joiner] = _Lease(donors=known.union(donors), given=now)

    def end(self, joiner: Member) -> None:
        """The joiner is done; one that has no lease is as welcome."""
        self._given.pop(joiner, None)

    def load(self, is_dead: Callable[[int, int], bool], now: float) -> Mapping[Member, int]:
        """How many joiners each donor was given to; those that are gone are forgotten.

        Args:
            is_dead: whether no process of a slot's incarnation is left.
        """
        self._given = {
            joiner: lease
            for joiner, lease in self._given.items()
            if now - lease.given < LEASE_S and not is_dead(*joiner)
        }
        return Counter(donor for lease in self._given.values() for donor in lease.donors if not is_dead(*donor))
