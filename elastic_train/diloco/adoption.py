"""Taking over a state: the whole of it into a replica that has none, or the outer state of those that are ahead.

Each rank takes its own part from the same rank of the donors, and either all of them use it or none does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.engine import NoPeerState, Sync, SyncKind
from elastic_train.diloco.flight import Contribution
from elastic_train.diloco.interval import Interval
from elastic_train.diloco.ledger import Ledger, parts_of
from elastic_train.diloco.peers import NO_OFFER, Offer, Peers, by_slot
from elastic_train.diloco.publication import INNER, OUTER, Publication, whole_hash
from elastic_train.diloco.trainee import Source, SyncJournal, Trainee
from elastic_train.peer_ckpt.client import Fetched, TransferFailed, Unwanted
from elastic_train.peer_ckpt.remains import Remains
from elastic_train.peer_ckpt.roll import Member
from elastic_train.peer_ckpt.shards import combine, hash_tensors
from elastic_train.peer_ckpt.snapshot import Snapshot

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_NOBODY = -1


class Adoption:
    """Takes over states for one rank. Every rank calls each method together."""

    def __init__(
        self,
        *,
        control: ControlGroup,
        peers: Peers,
        ledger: Ledger,
        interval: Interval,
        publication: Publication,
        trainee: Trainee,
        journal: SyncJournal,
        timeout_s: float,
        remains: Remains | None = None,
    ) -> None:
        """
        Args:
            timeout_s: bound on one transfer, and on the search for a peer that gives its state.
            remains: what an earlier incarnation of this rank has left. It is looked at once, in the first heal.
        """
        self._control = control
        self._peers = peers
        self._ledger = ledger
        self._interval = interval
        self._publication = publication
        self._trainee = trainee
        self._journal = journal
        self._timeout_s = timeout_s
        self._remains = remains
        self._has_looked = False
        """Whether the remains were looked at, on all ranks or on none."""
        self._pause = threading.Event()
        self._failed: set[Member] = set()
        """Donors whose state could not be used in the present search."""

    def look(self, at_least: int, among: Sequence[int] | None) -> Offer | None:
        """Rank 0's word on the newest state that is to be had, if it is of that outer step; waits a moment if not.

        Donors whose state could not be used are asked again only once all others have been.
        """
        self._trainee.alive()
        row = NO_OFFER
        if self._control.rank == 0:
            found = self._peers.offer(at_least, among, self._failed)
            if found is not None:
                row = found.to_ints()
            else:
                self._failed.clear()
                self._pause.wait(_LOOK_S)
        return Offer.from_ints(self._control.word(row).heard())

    def heal_from_any(self, at_least: int, among: Sequence[int] | None) -> Sync | None:
        """Take the newest whole state; None if nobody gave it in time.

        Raises:
            NoPeerState: what is in place is not what the donor has.
        """
        end = time.monotonic() + self._timeout_s
        self._failed.clear()
        while True:
            offer = self.look(at_least, among)
            if offer is not None and (healed := self._heal(offer)) is not None:
                return healed
            if self._control.word([int(time.monotonic() > end)]).heard()[0]:
                return None

    def catch_up(self, offer: Offer, voted: tuple[int, int, Contribution] | None) -> Sync | None:
        """Take the outer state of those that are ahead, and carry over what this replica has trained since its own.

        Args:
            voted: outer step, hash and contribution of the last candidate that this replica voted for. If it is in
                the history of what is offered, that contribution is in it already.

        Returns:
            None if the state did not arrive whole on all ranks.
        """
        fetched = self._pull(offer, [OUTER])
        if fetched is None:
            return None
        snapshot = fetched.snapshot
        interval = self._interval
        history = {int(step): state for step, state in snapshot.header["history"].items()}
        included = voted[2] if voted is not None and history.get(voted[0]) == voted[1] else None
        count = len(self._ledger.fragments)
        # What a fragment has learned is of use only if it syncs once more before the run ends.
        to_come = {step % count for step in range(offer.outer_step, interval.schedule.outer_steps)}
        own = {included.fragment} if included is not None else set()
        self._put_in_place(snapshot, carried=to_come - own)
        self._trainee.follow(snapshot, included=included is not None)
        before = interval.unsettled
        if included is not None:
            interval.settle(included.fragment, included.trained)
        if not to_come:
            interval.settle_all()
        interval.begin(offer.outer_step)
        settled = before - interval.unsettled
        self._journal.caught_up(offer.outer_step, settled, fetched.primary.slot)
        carried = interval.unsettled
        return Sync(kind=SyncKind.CAUGHT_UP, outer_step=offer.outer_step, tokens=settled, carried=carried)

    def _heal(self, offer: Offer) -> Sync | None:
        """Take everything; None if it did not arrive whole on all ranks."""
        self._journal.heal_started([slot for slot, _ in offer.donors], offer.outer_step)
        began = time.monotonic()
        found = self._remember(offer)
        if found is not None:
            whole = self._take(found.snapshot)
            self._give_back_remains()
            self._peers.released()
            self._journal.heal_finished(
                found.witness,
                {found.witness: 0},
                offer.outer_step,
                time.monotonic() - began,
                whole,
                Source.MEMORY,
            )
        else:
            # A transfer needs memory of its own.
            self._give_back_remains()
            fetched = self._pull(offer, [INNER, OUTER])
            if fetched is None:
                return None
            whole = self._take(fetched.snapshot)
            self._peers.taken(fetched)
            self._journal.heal_finished(
                fetched.primary.slot, by_slot(fetched.donors), offer.outer_step, time.monotonic() - began, whole
            )
        self._interval.settle_all()
        self._interval.begin(offer.outer_step)
        return Sync(kind=SyncKind.HEALED, outer_step=offer.outer_step)

    def _take(self, snapshot: Snapshot) -> int:
        """Put everything of a snapshot in place; the hash of what is there now.

        Raises:
            NoPeerState: that is not what the snapshot had.
        """
        self._put_in_place(snapshot, carried=())
        self._trainee.take(snapshot)
        whole = whole_hash(self._ledger.rank_hash, self._trainee.moments())
        if whole != snapshot.header["whole_hash"]:
            raise NoPeerState("the state in place differs from the donor's: it was damaged on the way")
        return whole

    # -- what an earlier incarnation has left ------------------------------------------------------------------------

    def _remember(self, offer: Offer) -> _Found | None:
        """The state that is offered, as this replica's own earlier incarnation left it on this host: if all ranks have
        their part, a donor says itself that it is still at that state, and all parts are what their hashes say."""
        if self._has_looked:
            return None
        self._has_looked = True
        snapshot = None
        if self._remains is not None:
            snapshot = self._remains.find(offer.outer_step, offer.state_hash)
        if not self._control.all(snapshot is not None):
            return None
        assert snapshot is not None
        self._trainee.alive()
        witness = self._peers.confirms(offer) if self._control.rank == 0 else None
        witness_slot = self._control.word([witness[0] if witness is not None else _NOBODY]).heard()[0]
        if witness_slot == _NOBODY:
            logger.info("no peer is at outer step %d any more, which this host's memory has", offer.outer_step)
            return None
        rank_hash = _proved(snapshot, len(self._ledger.fragments))
        self._trainee.alive()
        rows = self._control.gather([int(rank_hash is not None), rank_hash or 0])
        if not all(row[0] for row in rows) or combine([row[1] for row in rows]) != offer.state_hash:
            logger.warning("outer step %d in this host's memory is damaged on some rank", offer.outer_step)
            return None
        return _Found(snapshot=snapshot, witness=witness_slot)

    def _give_back_remains(self) -> None:
        if self._remains is not None:
            self._remains.give_back()
            self._remains = None

    # -- a transfer --------------------------------------------------------------------------------------------------

    def _pull(self, offer: Offer, sections: Sequence[str]) -> Fetched | None:
        """Each rank's part of the state that is offered, proved to be that; what only one donor has is of the same one
        on all ranks."""
        transfer = _Transfer(
            lambda: self._peers.fetch(
                offer, sections, [OUTER], alive=self._trainee.alive, on_progress=self._journal.transferred
            )
        )
        # Who is through waits for the others, for as long as their transfers may take.
        end = time.monotonic() + self._timeout_s
        while not self._control.all(transfer.ended(_LOOK_S)):
            if time.monotonic() < end:
                self._trainee.alive()
        fetched, rank_hash, primary, moved_on = None, 0, (-1, -1), False
        try:
            fetched = transfer.result()
            rank_hash = combine([part.hash() for part in parts_of(fetched.snapshot, len(self._ledger.fragments))])
            primary = (fetched.primary.slot, fetched.primary.incarnation) if INNER in sections else primary
        except (TransferFailed, KeyError, RuntimeError, ValueError, OSError) as error:
            moved_on = isinstance(error, Unwanted)
            logger.info("the state of outer step %d could not be fetched: %s", offer.outer_step, error)
        rows = self._control.gather([int(fetched is not None), int(moved_on), rank_hash, *primary])
        if all(row[0] for row in rows) and combine([row[2] for row in rows]) == offer.state_hash:
            if len({tuple(row[3:]) for row in rows}) == 1:
                return fetched
            logger.info("the ranks have moments of different replicas, and fetch them again")
        elif not any(row[1] for row in rows):
            self._failed.update(offer.donors)
        return None

    def _put_in_place(self, snapshot: Snapshot, *, carried: Collection[int]) -> None:
        # What this rank shows its own peers lies where the new state goes.
        for section in (INNER, OUTER):
            self._publication.retire(section)
        self._ledger.adopt(snapshot, carried=carried)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A state of this replica's own that is still the run's."""

    snapshot: Snapshot
    witness: int
    """Slot that says so."""


def _proved(snapshot: Snapshot, fragments: int) -> int | None:
    """The hash of this rank's outer state, if everything in the snapshot is what its header says; else None."""
    try:
        rank_hash = combine([part.hash() for part in parts_of(snapshot, fragments)])
        whole = combine([rank_hash, hash_tensors(snapshot.sections[INNER])])
    except KeyError:
        return None
    return rank_hash if whole == snapshot.header.get("whole_hash") else None


class _Transfer:
    """A fetch in a thread of its own."""

    def __init__(self, fetch: Callable[[], Fetched]) -> None:
        self._fetch = fetch
        self._fetched: Fetched | None = None
        self._error: Exception | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    def ended(self, timeout_s: float) -> bool:
        """Whether it is over, for better or worse; waits so long at most."""
        return self._ended.wait(timeout_s)

    def result(self) -> Fetched:
        """What was fetched, once it is over. Raises what went wrong."""
        if self._error is not None:
            raise self._error
        assert self._fetched is not None
        return self._fetched

    def _run(self) -> None:
        try:
            self._fetched = self._fetch()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
