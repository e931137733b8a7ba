"""Our own outer sync: no inner step is lost, replicas count by what they trained, and nobody waits for a transfer.

One sync is: announce, quorum, metadata, data (``flight``); agreement inside the replica, vote and, if need be, doubt
(``agreement``); outer step and publication (here). Whatever fails before the agreement leaves everything as it was,
and the same contribution is brought to the next quorum. ``docs/diloco.md`` has the algorithm and every failure.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torchft.process_group import ProcessGroup

from elastic_train.config import DilocoConfig
from elastic_train.diloco.agreement import Agreement, Landed, Landing
from elastic_train.diloco.compress import make_codec
from elastic_train.diloco.control import ControlGroup, ReplicaBroken
from elastic_train.diloco.doubt import Docket
from elastic_train.diloco.engine import (
    Diverged,
    NonFinite,
    NoPeerState,
    OuterSync,
    Sync,
    SyncFailed,
    SyncKind,
    Trained,
)
from elastic_train.diloco.flat import FlatFragment, OuterState, combine
from elastic_train.diloco.flight import Contribution, Flight, Flown, Guarded, Pilot
from elastic_train.diloco.interval import Interval
from elastic_train.diloco.metadata import Row, Standing
from elastic_train.diloco.outer import OuterOptimizer
from elastic_train.diloco.pace import quotas
from elastic_train.diloco.peers import Peers, PeerState, PeerWatch, status_of
from elastic_train.diloco.publication import INNER, OUTER, Publication, whole_hash
from elastic_train.diloco.quorum import QuorumCount, QuorumSeat
from elastic_train.diloco.reduce import Feedback, Reducer
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.diloco.trainee import SyncJournal, Trainee
from elastic_train.diloco.weights import weighted_mean
from elastic_train.diloco.wire import Wire
from elastic_train.peer_ckpt.client import PeerClient, TransferFailed
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import tensor_bytes
from elastic_train.peer_ckpt.snapshot import Snapshot

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_WATCH_S = 1.0
_ANXIOUS_WATCH_S = 0.2
"""After a failed attempt, in which a peer may have got ahead."""
_HISTORY = 8
_NOBODY = (0, 0, -1, 0)
"""A peer's state as integers, where there is none."""
_WAIT, _GO, _CATCH_UP, _GIVE_UP = range(4)
_FENCES = 2
"""Heals in place, one after the other, before the replica restarts."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose engine it is."""

    slot: int
    incarnation: int
    host: str
    """Name under which peers reach this rank."""
    registry: str
    token: str
    config_digest: int
    transfer_timeout_s: float
    """Bound on fetching a whole state."""


@dataclass(frozen=True, kw_only=True)
class _Ballot:
    """A candidate that this replica voted for."""

    outer_step: int
    candidate: int
    contribution: Contribution


class ElasticEngine(OuterSync):
    """The outer sync of one rank on torchft's quorum and reconfigurable process group."""

    def __init__(
        self,
        identity: Identity,
        *,
        config: DilocoConfig,
        schedule: OuterSchedule,
        fragments: Sequence[FlatFragment],
        control: ControlGroup,
        group: ProcessGroup,
        wire_device: torch.device,
        make_seat: Callable[[], QuorumSeat],
        trainee: Trainee,
        journal: SyncJournal,
    ) -> None:
        """
        Args:
            fragments: of this rank's parameters, in the order in which they sync.
            group: the reconfigurable group that ``make_seat``'s manager configures.
            wire_device: where tensors must be for ``group``.
            make_seat: makes the manager; from then on the replica heartbeats, and others wait for it.
        """
        self._identity = identity
        self._config = config
        self._fragments = fragments
        self._control = control
        self._make_seat = make_seat
        self._trainee = trainee
        self._journal = journal
        self._interval = Interval(schedule)
        self._wire = Wire(group, wire_device, config.timeout_s, on_operation=trainee.alive)
        self._reducer = Reducer(self._wire, make_codec(config.compression))
        self._feedback = [Feedback() if config.compression != "none" else None for _ in fragments]
        self._docket = Docket()
        self._directory = Directory(identity.registry, identity.token)
        self._peers = Peers(identity.slot, control.rank, self._directory, PeerClient(identity.token))
        self._server = PeerServer(identity.host, identity.token, self._status, self._served)
        self._publication = Publication(self._server, fragments, trainee)
        self._agreement = Agreement(
            slot=identity.slot,
            control=control,
            wire=self._wire,
            docket=self._docket,
            peers=self._peers,
            at_point=trainee.at_point,
            alive=trainee.alive,
            doubt_bound_s=2 * config.timeout_s,
            combine=combine,
        )
        layout = _digest(repr([fragment.layout for fragment in fragments]))
        self._layout_digest = combine([row[0] for row in control.gather([layout])])
        self._hashes = [fragment.committed.hash() for fragment in fragments]
        self._state_hash = combine([row[0] for row in control.gather([combine(self._hashes)])])
        self._shown = (-1, 0)
        """Outer step and hash of the state that peers may ask for; below 0 while there is none."""
        self._history: dict[int, int] = {}
        """State hashes of the last outer steps."""
        self._last_yes: _Ballot | None = None
        self._members: list[tuple[int, int]] = []
        """Slot and incarnation of all who took part in the last commit."""
        self._seat: QuorumSeat | None = None
        self._pilot: Pilot | None = None
        self._pause = threading.Event()
        self._early = False
        """A request for a quorum is pending in mid-interval: the interval ends with the step in which it fires."""
        self._ahead: PeerState | None = None
        self._watch: PeerWatch | None = None
        self._count = QuorumCount()
        self._contribution: Contribution | None = None
        self._flight: Flight | None = None
        self._stored: torch.Tensor | None = None
        self._join_is_due = False
        self._fences = 0
        self._mismatches = 0

    # -- what the trainer sees -------------------------------------------------------------------------------------

    @property
    def outer_step(self) -> int:
        return self._interval.outer_step

    @property
    def next_step(self) -> int:
        return self._interval.next_step

    @property
    def due(self) -> bool:
        return self._interval.full or self._ahead is not None

    @property
    def tokens(self) -> int:
        """Trained by this replica in this incarnation."""
        return self._interval.tokens

    def open_membership(self) -> None:
        self._seat = self._make_seat()
        self._pilot = Pilot(
            quorum=self._seat,
            count=self._count,
            wire=self._wire,
            reducer=self._reducer,
            outer=OuterOptimizer(
                lr=self._config.outer_lr,
                momentum=self._config.outer_momentum,
                nesterov=self._config.outer_nesterov,
                weight_decay=self._config.outer_weight_decay,
            ),
            weighting=self._config.weighting,
            bucket_bytes=self._config.bucket_mb << 20,
            at_point=self._trainee.at_point,
            guard=self._guard,
            on_quorum=self._enters,
        )

    def enter(self) -> None:
        self._register()
        self.settled()

    def join(self) -> Sync:
        self._register()
        healed = self._heal_from_any(0, None)
        if healed is None:
            raise NoPeerState(f"no peer gave its state within {self._identity.transfer_timeout_s:g} s")
        if self.outer_step < self._interval.schedule.outer_steps:
            self.open_membership()
            self._announce_early()
        return healed

    def before_optimizer(self) -> None:
        self._publication.finish()

    def step_ended(self, trained: Trained) -> None:
        interval = self._interval
        interval.add(trained)
        if self._early and self._flight is None:
            found = self._watch.found if self._watch is not None else None
            row = [int(self._place.fired), *(found.to_ints() if found is not None else _NOBODY)]
            fired, *source = self._control.word(row).heard()
            ahead = PeerState.from_ints(source)
            if ahead.outer_step > self.outer_step:
                self._ahead = ahead
            elif fired:
                interval.end_after(self._overlap)
                self._take_off()
        elif self._flight is None and interval.done == interval.quota - self._overlap:
            self._take_off()

    def sync(self) -> Sync:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._recall() and (caught_up := self._catch_up(ahead)) is not None:
            return caught_up
        began, attempt = time.monotonic(), 0
        while True:
            arrived = time.monotonic()
            flown = self._fly(began, anxious=attempt > 0)
            if isinstance(flown, Sync):
                return flown
            landed = self._land(flown)
            match landed.landing:
                case Landing.COMMITTED:
                    return self._commit(flown, landed)
                case Landing.LEFT_OUT:
                    sync = self._after_left_out(flown)
                case Landing.MISMATCH:
                    sync = self._after_mismatch(landed)
                case _:
                    sync = None
            if sync is not None:
                return sync
            self._judge_anew()
            guarded, cause = self._why(flown, landed)
            attempt += not guarded
            self._journal.retried(self.outer_step + 1, max(attempt, 1), cause, time.monotonic() - arrived)
            # Syncs fail for everybody at once. If all gave up at once, nobody would be left with the run's state.
            place = flown.formed.rank if flown.formed is not None else 0
            if any(row[0] for row in self._control.gather([int(attempt > self._config.max_retries + place)])):
                raise SyncFailed(f"{attempt} attempts at outer step {self.outer_step + 1} failed, the last: {cause}")
            if guarded:
                self._pause.wait(_ANXIOUS_WATCH_S)

    def settled(self) -> None:
        self._publication.publish(
            {
                "outer_step": self.outer_step,
                "rank_hash": combine(self._hashes),
                "state_hash": self._state_hash,
                "history": {str(step): state for step, state in self._history.items()},
                "members": self._members,
                "quorum_count": self._count.to_list(),
            }
        )
        self._shown = (self.outer_step, self._state_hash)

    def anchor_hash(self, gather: Callable[[int], list[int]]) -> str:
        return f"{self._state_hash & (2**64 - 1):016x}"

    def anchor(self) -> dict[str, torch.Tensor]:
        return {str(index): fragment.committed.anchor for index, fragment in enumerate(self._fragments)}

    def momentum(self) -> dict[str, torch.Tensor]:
        return {str(index): fragment.committed.momentum for index, fragment in enumerate(self._fragments)}

    def close(self) -> None:
        self._stop_watch()
        self._server.close()
        if self._seat is not None:
            self._seat.shutdown()

    # -- one attempt -----------------------------------------------------------------------------------------------

    @property
    def _place(self) -> QuorumSeat:
        assert self._seat is not None, "the engine is a member from open_membership on"
        return self._seat

    @property
    def _overlap(self) -> int:
        """Inner steps beside this interval's sync: none in the last one, for no later sync would take them in."""
        schedule = self._interval.schedule
        return 0 if schedule.start(self.outer_step + 1) == schedule.steps else self._config.overlap_steps

    def _take_off(self) -> None:
        """Begin an attempt that goes on beside the inner steps, if any are to come."""
        if self._interval.full:
            return
        self._contribution = mine = self._capture(store=True)
        self._place.announce(self.outer_step)
        self._flight = Flight(self._place, lambda: self._attempt(mine))

    def _capture(self, *, store: bool) -> Contribution:
        """What this replica has to bring now, with one row for all its ranks."""
        interval = self._interval
        fragment = self._fragments[interval.fragment]
        stored = self._store(fragment) if store else None
        finite = all(row[0] for row in self._control.gather([int(fragment.is_finite())]))
        row = Row(
            outer_step=self.outer_step,
            tokens=interval.unsettled,
            weight_tokens=interval.unsettled_of(interval.fragment),
            finite=finite,
            state_hash=self._state_hash,
            slot=self._identity.slot,
            incarnation=self._identity.incarnation,
            step_us=round(interval.step_s * 1e6),
            config_digest=self._identity.config_digest,
            layout_digest=self._layout_digest,
            id_base=0,
            loss=_or_nan(interval.loss),
            grad_norm=_or_nan(interval.grad_norm),
            inner_steps=interval.done,
        )
        # Times and means differ between ranks; rank 0 speaks for all.
        row = Row.from_ints(self._control.word(row.to_ints()).heard())
        return Contribution(
            fragment=interval.fragment,
            row=row,
            trained=interval.tokens,
            progress=self._trainee.progress(),
            stored=stored,
        )

    def _judge_anew(self) -> None:
        """After a failed attempt: what is brought again may not be finite any more."""
        mine = self._contribution
        if mine is None:
            return
        fragment = self._fragments[mine.fragment]
        sound = fragment.is_finite() if mine.stored is None else bool(torch.isfinite(mine.stored.sum()))
        finite = all(row[0] for row in self._control.gather([int(sound)]))
        self._contribution = replace(mine, row=replace(mine.row, finite=finite))

    def _store(self, fragment: FlatFragment) -> torch.Tensor:
        """The pseudo-gradient as it is now, in a buffer that is made once: one fragment is in flight at a time."""
        if self._stored is None or self._stored.numel() < fragment.numel:
            largest = max(fragment.numel for fragment in self._fragments)
            self._stored = torch.empty(largest, dtype=torch.float32, device=self._wire.device)
        stored = self._stored[: fragment.numel]
        fragment.pseudo_gradient(stored)
        return stored

    def _attempt(self, mine: Contribution) -> Flown:
        assert self._pilot is not None
        fragment = self._fragments[mine.fragment]
        self._publication.retire_candidate_of(fragment)
        return self._pilot.fly(mine, fragment, self._feedback[mine.fragment])

    def _fly(self, began: float, *, anxious: bool) -> Flown | Sync:
        """An attempt up to its candidate; or what became of this replica while it waited for the quorum."""
        arrived, early, self._early = time.monotonic(), self._early, False
        if self._contribution is None:
            self._contribution = self._capture(store=False)
        if self._flight is None:
            self._place.announce(self.outer_step)
        self._trainee.at_point("quorum")
        self._start_watch(_ANXIOUS_WATCH_S if anxious else _WATCH_S)
        try:
            while (ahead := self._wait_for_quorum(began)) is not None:
                if self._recall():
                    if (caught_up := self._catch_up(ahead)) is not None:
                        return caught_up
                    self._contribution = self._capture(store=False)
                    # What it has found is not to be had any more.
                    self._start_watch(_ANXIOUS_WATCH_S)
        finally:
            self._stop_watch()
        self._trainee.alive()
        there_at = time.monotonic()
        flight, self._flight = self._flight, None
        if flight is not None:
            flown = flight.land()
        elif self._place.wait(self._config.timeout_s):
            flown = self._attempt(self._contribution)
        else:
            raise ReplicaBroken("a quorum came for rank 0 of this replica, and not for this rank")
        flown.wait_s, flown.there_at = 0.0 if early else there_at - arrived, there_at
        return flown

    def _wait_for_quorum(self, began: float) -> PeerState | None:
        """Rank 0's word, once there is one: None if the quorum is there, else a peer that is ahead.

        Raises:
            SyncFailed: neither within ``diloco.quorum_timeout_s``.
        """
        while True:
            row = [_WAIT, *_NOBODY]
            if self._control.rank == 0:
                found = self._watch.found if self._watch is not None else None
                if self._place.wait(_LOOK_S):
                    row[0] = _GO
                elif found is not None and found.outer_step > self.outer_step:
                    row = [_CATCH_UP, *found.to_ints()]
                elif time.monotonic() - began > self._config.quorum_timeout_s:
                    row[0] = _GIVE_UP
            word, *source = self._control.word(row).heard()
            if word == _GIVE_UP:
                raise SyncFailed(f"no quorum within diloco.quorum_timeout_s = {self._config.quorum_timeout_s:g}")
            if word != _WAIT:
                return None if word == _GO else PeerState.from_ints(source)

    def _recall(self) -> bool:
        """Take back an attempt that still waits for its quorum, on all ranks or on none; its request stays."""
        flight, mine = self._flight, self._contribution
        recalled = flight is None or flight.recall()
        if all(row[0] for row in self._control.gather([int(recalled)])):
            self._flight = self._contribution = None
            return True
        if flight is not None and recalled:
            assert mine is not None
            self._flight = Flight(self._place, lambda: self._attempt(mine))
        return False

    def _guard(self, rows: list[Row]) -> None:
        """No commit without a member of the last one that lives on here or further on: two would go their own ways."""
        present = {row.slot for row in rows}
        if self._control.rank != 0:
            return
        for slot, incarnation in self._members:
            if slot in present or self._peers.is_dead(slot, incarnation):
                continue
            there = self._peers.outer_step_of(slot, incarnation)
            if there is not None and there >= self.outer_step:
                raise Guarded(f"replica {slot} is not in this quorum and lives on at outer step {there}")

    def _enters(self, number: int, rows: Sequence[Row]) -> None:
        """An attempt knows its quorum; called before any data, in the thread that flies it."""
        self._journal.quorum(number, [row.slot for row in rows])
        if self._join_is_due:
            self._join_is_due = False
            self._journal.joined(self.outer_step, self.next_step - 1)

    def _land(self, flown: Flown) -> Landed:
        mine = self._contribution
        assert mine is not None
        part = combine(_replaced(self._hashes, mine.fragment, flown.candidate))
        landed = self._agreement.land(flown, part)
        if landed.doubt is not None:
            self._journal.doubt(self.outer_step + 1, landed.doubt, landed.doubt_s)
        if landed.voted:
            self._last_yes = _Ballot(outer_step=self.outer_step + 1, candidate=landed.candidate, contribution=mine)
        if landed.landing is not Landing.COMMITTED and (feedback := self._feedback[mine.fragment]) is not None:
            feedback.abort()
        self._place.rebuild_group(broken=not landed.unbroken)
        return landed

    def _commit(self, flown: Flown, landed: Landed) -> Sync:
        """The candidate becomes the anchor, and the parameters become it."""
        mine, interval = self._contribution, self._interval
        assert mine is not None
        self._contribution = self._last_yes = None
        fragment, feedback = self._fragments[mine.fragment], self._feedback[mine.fragment]
        fragment.swap()
        fragment.write_parameters(self._config.merge_alpha if mine.stored is not None else 0.0)
        if feedback is not None:
            feedback.commit()
        self._hashes[mine.fragment] = flown.candidate
        outer_step = self.outer_step + 1
        self._remember(outer_step, landed.candidate)
        counted = [row for row, standing in zip(flown.rows, flown.standings, strict=True) if standing is Standing.OK]
        self._members = [(row.slot, row.incarnation) for row in counted]
        self._fences = self._mismatches = 0
        interval.settle(mine.fragment, mine.trained)
        interval.begin(outer_step, self._next_quota(counted))
        tokens = [row.tokens for row in counted]
        return Sync(
            kind=SyncKind.COMMITTED,
            outer_step=outer_step,
            participants=tuple(sorted(row.slot for row in counted)),
            progress=flown.progress,
            tokens=mine.row.tokens,
            wait_s=flown.wait_s,
            reduce_s=time.monotonic() - flown.there_at,
            bytes=sum(row[0] for row in self._control.gather([self._wire.take_bytes()])),
            loss=weighted_mean([row.loss for row in counted], tokens),
            grad_norm=weighted_mean([row.grad_norm for row in counted], tokens),
        )

    def _next_quota(self, counted: Sequence[Row]) -> int | None:
        """Inner steps until the next sync, if they are not the same for all."""
        length = self._interval.schedule.quota(self.outer_step + 1)
        if self._config.interval == "steps" or length == 0:
            return None
        shares = quotas([row.step_us / 1e6 for row in counted], length)
        mine = next(i for i, row in enumerate(counted) if row.slot == self._identity.slot)
        return max(shares[mine], self._config.overlap_steps + 1)

    def _why(self, flown: Flown, landed: Landed) -> tuple[bool, str]:
        """Whether the guard stopped an attempt that failed, the same on all ranks; and what stopped it, in words."""
        guarded = self._control.word([int(isinstance(flown.error, Guarded))]).heard()[0]
        if flown.error is not None:
            return bool(guarded), str(flown.error)
        return bool(guarded), landed.why

    # -- a state from a peer ---------------------------------------------------------------------------------------

    def _after_left_out(self, flown: Flown) -> Sync | None:
        """The others average without this replica, and it needs the state of one of them."""
        counted = [row.slot for row, s in zip(flown.rows, flown.standings, strict=True) if s is Standing.OK]
        match flown.standing:
            case Standing.BEHIND:
                source = self._look(flown.newest, counted)
                return self._catch_up(source) if source is not None else None
            case Standing.NON_FINITE:
                if not counted:
                    raise NonFinite(
                        f"no replica's parameters are finite at step {self.next_step - 1}: the training has diverged; "
                        "lower optimizer.lr or lengthen lr_scheduler.warmup_steps"
                    )
                return self._fence("non_finite", NonFinite, flown.newest, counted)
            case _:
                return self._fence("diverged", Diverged, flown.newest, counted)

    def _after_mismatch(self, landed: Landed) -> Sync | None:
        """The same data gave different candidates: the memory of one of them is not what was agreed on."""
        sound = all(f.committed.hash() == agreed for f, agreed in zip(self._fragments, self._hashes, strict=True))
        if not all(row[0] for row in self._control.gather([int(sound)])):
            return self._fence("diverged", Diverged, self.outer_step, None)
        self._mismatches += 1
        if self._mismatches > 1 and landed.in_minority:
            raise Diverged(f"the candidate for outer step {self.outer_step + 1} differs from that of most replicas")
        return None

    def _fence(self, cause: str, error: type[Exception], at_least: int, among: Sequence[int] | None) -> Sync:
        """This replica's state is unfit: it takes a peer's, in place."""
        self._journal.fenced(cause, self.outer_step)
        self._fences += 1
        healed = self._heal_from_any(at_least, among) if self._fences <= _FENCES else None
        if healed is None:
            raise error(f"this replica's state is {cause.replace('_', '-')} and no peer's state mended it")
        if self.outer_step < self._interval.schedule.outer_steps:
            self._announce_early()
        return healed

    def _heal_from_any(self, at_least: int, among: Sequence[int] | None) -> Sync | None:
        """Take the whole state of the newest peer; None if none gave it in time."""
        end = time.monotonic() + self._identity.transfer_timeout_s
        while True:
            source = self._look(at_least, among)
            if source is not None and (healed := self._heal(source)) is not None:
                return healed
            if self._control.word([int(time.monotonic() > end)]).heard()[0]:
                return None

    def _look(self, at_least: int, among: Sequence[int] | None) -> PeerState | None:
        """Rank 0's word on the newest peer, if one is at that outer step; waits a moment if there is none."""
        self._trainee.alive()
        row = list(_NOBODY)
        if self._control.rank == 0:
            found = self._peers.newest(at_least, among)
            if found is not None:
                row = found.to_ints()
            else:
                self._pause.wait(_ANXIOUS_WATCH_S)
        source = PeerState.from_ints(self._control.word(row).heard())
        return source if source.outer_step >= 0 else None

    def _heal(self, source: PeerState) -> Sync | None:
        """Take everything from a peer; None if it did not arrive whole on all ranks."""
        self._journal.heal_started(source.slot, source.outer_step)
        began = time.monotonic()
        snapshot = self._pull(source, [INNER, OUTER])
        if snapshot is None:
            return None
        self._adopt(source, snapshot, carried=())
        self._trainee.take(snapshot)
        whole = whole_hash(combine(self._hashes), self._trainee.moments())
        if whole != snapshot.header["whole_hash"]:
            raise NoPeerState("the state in place differs from the donor's: it was damaged on the way")
        self._interval.settle_all()
        self._interval.begin(source.outer_step)
        for feedback in self._feedback:
            if feedback is not None:
                feedback.reset()
        size = tensor_bytes(snapshot.sections)
        self._journal.heal_finished(source.slot, source.outer_step, size, time.monotonic() - began, whole)
        self._join_is_due = True
        return Sync(kind=SyncKind.HEALED, outer_step=source.outer_step)

    def _catch_up(self, source: PeerState) -> Sync | None:
        """Take the outer state of a peer that is ahead, and carry over what this replica has trained since its own."""
        snapshot = self._pull(source, [OUTER])
        if snapshot is None:
            return None
        interval, last = self._interval, self._last_yes
        history = {int(step): state for step, state in snapshot.header["history"].items()}
        mine = last.contribution if last is not None and history.get(last.outer_step) == last.candidate else None
        ends = source.outer_step >= interval.schedule.outer_steps
        own = mine.fragment if mine is not None else None
        carried = [index for index in range(len(self._fragments)) if index != own and not ends]
        self._adopt(source, snapshot, carried=carried)
        self._trainee.follow(snapshot, included=mine is not None)
        before = interval.unsettled
        if mine is not None:
            interval.settle(mine.fragment, mine.trained)
        if ends:
            interval.settle_all()
        interval.begin(source.outer_step)
        settled = before - interval.unsettled
        self._journal.caught_up(source.outer_step, settled, source.slot)
        if not ends:
            self._announce_early()
        return Sync(kind=SyncKind.CAUGHT_UP, outer_step=source.outer_step, tokens=settled)

    def _pull(self, source: PeerState, sections: Sequence[str]) -> Snapshot | None:
        """Each rank's part of a peer's state, proved to be the one that it names; None if any rank could not get it."""
        hashes: list[int] = []
        snapshot = None
        try:
            snapshot = self._peers.fetch(source, sections, self._identity.transfer_timeout_s, self._trainee.alive)
            hashes = [_part(snapshot, index).hash() for index in range(len(self._fragments))]
        except (TransferFailed, KeyError) as error:
            logger.info("the state of replica %d could not be fetched: %s", source.slot, error)
        rows = self._control.gather([int(bool(hashes)), combine(hashes)])
        if all(row[0] for row in rows) and combine([row[1] for row in rows]) == source.state_hash:
            self._hashes = hashes
            return snapshot
        return None

    def _adopt(self, source: PeerState, snapshot: Snapshot, *, carried: Collection[int]) -> None:
        """Put a peer's outer state in the place of this rank's; ``carried`` fragments keep what they have learned."""
        for section in (INNER, OUTER):
            self._publication.retire(section)
        for index, fragment in enumerate(self._fragments):
            part = _part(snapshot, index)
            fragment.load(part.anchor, part.momentum, carry=index in carried)
        header = snapshot.header
        self._history = {int(step): state for step, state in header["history"].items()}
        self._members = [(slot, incarnation) for slot, incarnation in header["members"]]
        self._count.follow(header["quorum_count"])
        self._state_hash = source.state_hash
        self._contribution = None
        self._last_yes = None

    # -- odds ------------------------------------------------------------------------------------------------------

    def _announce_early(self) -> None:
        """Ask for a quorum now and go on training: the interval ends with the step in which it fires."""
        self._place.announce(self.outer_step)
        self._early = True
        self._start_watch(_WATCH_S)

    def _start_watch(self, period_s: float) -> None:
        self._stop_watch()
        if self._control.rank == 0:
            self._watch = PeerWatch(lambda: self._peers.newest(self.outer_step + 1), period_s)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _remember(self, outer_step: int, state_hash: int) -> None:
        self._state_hash = state_hash
        self._history[outer_step] = state_hash
        self._history = dict(list(self._history.items())[-_HISTORY:])

    def _register(self) -> None:
        """Be found by peers: all ranks' addresses under the slot."""
        host, _, port = self._server.address.rpartition(":")
        ports = [row[0] for row in self._control.gather([int(port)])]
        if self._control.rank == 0:
            addresses = [f"{host}:{port}" for port in ports]
            self._directory.register(self._identity.slot, self._identity.incarnation, addresses)

    def _status(self, attempt: str, dead: frozenset[int]) -> Mapping[str, Any]:
        """What rank 0 says to a peer; called in a thread of the server."""
        outer_step, state_hash = self._shown
        return status_of(
            slot=self._identity.slot,
            incarnation=self._identity.incarnation,
            outer_step=outer_step,
            state_hash=state_hash,
            answer=self._docket.answer(attempt, dead),
        )

    def _served(self, snapshot: Snapshot, sections: Sequence[str]) -> None:
        """A peer took a state; called in a thread of the server."""
        if INNER in sections:
            self._journal.served(snapshot.header["outer_step"], snapshot.header["whole_hash"])


def _part(snapshot: Snapshot, index: int) -> OuterState:
    tensors = snapshot.sections[OUTER]
    return OuterState(anchor=tensors[f"{index}.anchor"], momentum=tensors[f"{index}.momentum"])


def _replaced(values: Sequence[int], index: int, value: int) -> list[int]:
    return [value if i == index else old for i, old in enumerate(values)]


def _digest(text: str) -> int:
    return int.from_bytes(xxhash.xxh3_64(text.encode()).digest(), "big", signed=True)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
