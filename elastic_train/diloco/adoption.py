"""Taking over a peer's state: the whole of it into a replica that has none, or the outer state of one that is ahead.

All ranks take their own part from the same rank of one peer, and either all of them use it or none does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.engine import NoPeerState, Sync, SyncKind
from elastic_train.diloco.flight import Contribution
from elastic_train.diloco.interval import Interval
from elastic_train.diloco.ledger import Ledger, parts_of
from elastic_train.diloco.peers import NOBODY, Peers, PeerState
from elastic_train.diloco.publication import INNER, OUTER, Publication, whole_hash
from elastic_train.diloco.trainee import SyncJournal, Trainee
from elastic_train.peer_ckpt.client import TransferFailed
from elastic_train.peer_ckpt.shards import combine, tensor_bytes
from elastic_train.peer_ckpt.snapshot import Snapshot

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


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
    ) -> None:
        """
        Args:
            timeout_s: bound on one transfer, and on the search for a peer that gives its state.
        """
        self._control = control
        self._peers = peers
        self._ledger = ledger
        self._interval = interval
        self._publication = publication
        self._trainee = trainee
        self._journal = journal
        self._timeout_s = timeout_s
        self._pause = threading.Event()

    def look(self, at_least: int, among: Sequence[int] | None, avoid: Collection[PeerState] = ()) -> PeerState | None:
        """Rank 0's word on the newest peer, if one is at that outer step; waits a moment if there is none."""
        self._trainee.alive()
        row = NOBODY.to_ints()
        if self._control.rank == 0:
            found = self._peers.newest(at_least, among, avoid)
            if found is not None:
                row = found.to_ints()
            else:
                self._pause.wait(_LOOK_S)
        source = PeerState.from_ints(self._control.word(row).heard())
        return source if source.outer_step >= 0 else None

    def heal_from_any(self, at_least: int, among: Sequence[int] | None) -> Sync | None:
        """Take the whole state of the newest peer; None if none gave it in time.

        Raises:
            NoPeerState: what is in place is not what the donor has.
        """
        end = time.monotonic() + self._timeout_s
        failed: set[PeerState] = set()
        while True:
            source = self.look(at_least, among, failed)
            if source is not None:
                if (healed := self._heal(source)) is not None:
                    return healed
                failed.add(source)
            if self._control.word([int(time.monotonic() > end)]).heard()[0]:
                return None

    def catch_up(self, source: PeerState, voted: tuple[int, int, Contribution] | None) -> Sync | None:
        """Take the outer state of a peer that is ahead, and carry over what this replica has trained since its own.

        Args:
            voted: outer step, hash and contribution of the last candidate that this replica voted for. If it is in
                the peer's history, that contribution is in the peer's state already.

        Returns:
            None if the state did not arrive whole on all ranks.
        """
        snapshot = self._pull(source, [OUTER])
        if snapshot is None:
            return None
        interval = self._interval
        history = {int(step): state for step, state in snapshot.header["history"].items()}
        included = voted[2] if voted is not None and history.get(voted[0]) == voted[1] else None
        count = len(self._ledger.fragments)
        # What a fragment has learned is of use only if it syncs once more before the run ends.
        to_come = {step % count for step in range(source.outer_step, interval.schedule.outer_steps)}
        own = {included.fragment} if included is not None else set()
        self._put_in_place(snapshot, carried=to_come - own)
        self._trainee.follow(snapshot, included=included is not None)
        before = interval.unsettled
        if included is not None:
            interval.settle(included.fragment, included.trained)
        if not to_come:
            interval.settle_all()
        interval.begin(source.outer_step)
        settled = before - interval.unsettled
        self._journal.caught_up(source.outer_step, settled, source.slot)
        return Sync(kind=SyncKind.CAUGHT_UP, outer_step=source.outer_step, tokens=settled)

    def _heal(self, source: PeerState) -> Sync | None:
        """Take everything from a peer; None if it did not arrive whole on all ranks."""
        self._journal.heal_started(source.slot, source.outer_step)
        began = time.monotonic()
        snapshot = self._pull(source, [INNER, OUTER])
        if snapshot is None:
            return None
        self._put_in_place(snapshot, carried=())
        self._trainee.take(snapshot)
        whole = whole_hash(self._ledger.rank_hash, self._trainee.moments())
        if whole != snapshot.header["whole_hash"]:
            raise NoPeerState("the state in place differs from the donor's: it was damaged on the way")
        self._interval.settle_all()
        self._interval.begin(source.outer_step)
        size = tensor_bytes(snapshot.sections)
        self._journal.heal_finished(source.slot, source.outer_step, size, time.monotonic() - began, whole)
        return Sync(kind=SyncKind.HEALED, outer_step=source.outer_step)

    def _pull(self, source: PeerState, sections: Sequence[str]) -> Snapshot | None:
        """Each rank's part of a peer's state, proved to be the one that it names."""
        snapshot, rank_hash = None, 0
        try:
            snapshot = self._peers.fetch(source, sections, self._timeout_s, self._trainee.alive)
            rank_hash = combine([part.hash() for part in parts_of(snapshot, len(self._ledger.fragments))])
        except (TransferFailed, KeyError) as error:
            logger.info("the state of replica %d could not be fetched: %s", source.slot, error)
        rows = self._control.gather([int(snapshot is not None), rank_hash])
        whole = all(row[0] for row in rows) and combine([row[1] for row in rows]) == source.state_hash
        return snapshot if whole else None

    def _put_in_place(self, snapshot: Snapshot, *, carried: Collection[int]) -> None:
        # What this rank shows its own peers lies where the new state goes.
        for section in (INNER, OUTER):
            self._publication.retire(section)
        self._ledger.adopt(snapshot, carried=carried)
