"""Our own outer sync: no inner step is lost, replicas count by what they trained, and nobody waits for a transfer.

One sync is: announce, quorum, metadata, data (``flight``); agreement inside the replica, vote and, if need be, doubt
(``agreement``); outer step and publication (here). Whatever fails before the agreement leaves everything as it was,
and the same contribution is brought to the next quorum. ``docs/diloco.md`` has the algorithm and every failure.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import xxhash
from torchft.process_group import ProcessGroup

from elastic_train.config import DilocoConfig
from elastic_train.diloco.adoption import Adoption
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
from elastic_train.diloco.flat import FlatFragment
from elastic_train.diloco.flight import Contribution, Flight, Flown, Guarded, NonFiniteMean, Pilot
from elastic_train.diloco.interval import Interval
from elastic_train.diloco.ledger import Ledger
from elastic_train.diloco.lookout import ANXIOUS_S, CALM_S, Lookout
from elastic_train.diloco.metadata import Row, Standing, float_bits, float_of
from elastic_train.diloco.outer import OuterOptimizer
from elastic_train.diloco.pace import quotas
from elastic_train.diloco.peers import Offer, Peers, PeerState
from elastic_train.diloco.presence import Identity, Presence
from elastic_train.diloco.publication import Publication
from elastic_train.diloco.quorum import QuorumSeat
from elastic_train.diloco.reduce import Feedback, Reducer
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.diloco.trainee import SyncJournal, Trainee
from elastic_train.diloco.weights import weighted_mean
from elastic_train.diloco.wire import Wire
from elastic_train.peer_ckpt.client import PeerClient
from elastic_train.peer_ckpt.directory import Directory, RegistryUnreachable
from elastic_train.peer_ckpt.remains import Remains
from elastic_train.peer_ckpt.shards import combine, hash_text
from elastic_train.peer_ckpt.shared_memory import SharedMemory

_END_S = 15.0
"""From the end of a process to when its peers know of it, at most."""
_FENCES = 2
"""Heals in place, one after the other, before the replica restarts."""


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
        memory: SharedMemory | None = None,
        remains: Remains | None = None,
    ) -> None:
        """
        Args:
            fragments: of this rank's parameters, in the order in which they sync.
            group: the reconfigurable group that ``make_seat``'s manager configures.
            wire_device: where tensors must be for ``group``.
            make_seat: makes the manager; from then on the replica heartbeats, and others wait for it.
            memory: where ``fragments`` lie and copies are made, for the next incarnation to find; None: in ordinary
                memory.
            remains: what the incarnation before has left there.
        """
        self._identity = identity
        self._config = config
        self._control = control
        self._make_seat = make_seat
        self._trainee = trainee
        self._journal = journal
        self._interval = Interval(schedule)
        self._ledger = Ledger(fragments, control)
        self._wire = Wire(group, wire_device, config.timeout_s, on_operation=trainee.alive)
        self._feedback = [Feedback() if config.compression != "none" else None for _ in fragments]
        directory, docket = Directory(identity.registry, identity.token, tls=identity.tls), Docket()
        self._peers = Peers(
            identity.slot,
            control.rank,
            directory,
            PeerClient(identity.token, channel_device=identity.channel_device, tls=identity.tls),
            transfers=identity.transfers,
            incarnation=identity.incarnation,
            host=identity.host,
        )
        self._presence = Presence(identity, control, directory, docket, journal, memory)
        self._publication = Publication(
            self._presence.server,
            fragments,
            trainee,
            snapshots=identity.snapshots,
            memory=memory,
            on_shown=self._presence.holds,
        )
        self._lookout = Lookout(control, lambda: self._peers.newest(self.outer_step + 1), trainee.waiting)
        self._adoption = Adoption(
            control=control,
            peers=self._peers,
            ledger=self._ledger,
            interval=self._interval,
            publication=self._publication,
            trainee=trainee,
            journal=journal,
            timeout_s=identity.transfers.timeout_s,
            remains=remains,
        )
        self._agreement = Agreement(
            slot=identity.slot,
            control=control,
            wire=self._wire,
            docket=docket,
            peers=self._peers,
            at_point=trainee.at_point,
            alive=trainee.alive,
            doubt_bound_s=max(2 * config.timeout_s, identity.watchdog_s + _END_S),
            combine=combine,
        )
        self._layout_digest = combine([row[0] for row in control.gather([_digest(fragments)])])
        self._seat: QuorumSeat | None = None
        self._pilot: Pilot | None = None
        self._pause = threading.Event()
        self._early = False
        """A request for a quorum is pending in mid-interval: the interval ends with the step in which it fires."""
        self._ahead: PeerState | None = None
        self._contribution: Contribution | None = None
        """What is brought to the sync that is under way."""
        self._voted: tuple[int, int, Contribution] | None = None
        """Outer step and hash of the last candidate that this replica voted for, and what it brought."""
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
    def steps_to_sync(self) -> int:
        return max(0, self._interval.quota - self._interval.done)

    @property
    def tokens(self) -> int:
        """Trained by this replica in this incarnation."""
        return self._interval.tokens

    def open_membership(self) -> None:
        self._seat = self._make_seat()
        self._pilot = Pilot(
            quorum=self._seat,
            count=self._ledger.count,
            wire=self._wire,
            reducer=Reducer(self._wire, make_codec(self._config.compression)),
            outer=OuterOptimizer(
                lr=self._config.outer_lr,
                momentum=self._config.outer_momentum,
                nesterov=self._config.outer_nesterov,
                weight_decay=self._config.outer_weight_decay,
            ),
            fragments=self._ledger.fragments,
            weighting=self._config.weighting,
            bucket_bytes=self._config.bucket_mb << 20,
            at_point=self._trainee.at_point,
            guard=self._guard,
            on_quorum=self._enters,
        )

    def enter(self) -> None:
        self._be_found()
        self.settled()

    def join(self) -> Sync:
        self._be_found()
        healed = self._healed(0, None)
        if healed is None:
            raise NoPeerState(f"no peer gave its state within {self._identity.transfers.timeout_s:g} s")
        if self.outer_step < self._interval.schedule.outer_steps:
            self.open_membership()
        return self._coming_back(healed)

    def before_optimizer(self) -> None:
        self._publication.finish()

    def step_ended(self, trained: Trained) -> None:
        interval = self._interval
        interval.add(trained)
        if self._early and self._flight is None:
            fired, self._ahead = self._lookout.glance(self._place, self.outer_step)
            if fired and self._ahead is None:
                interval.end_after(self._overlap_of(self.outer_step))
                self._take_off()
        elif self._flight is None and interval.done == interval.quota - self._overlap_of(self.outer_step):
            self._take_off()

    def sync(self) -> Sync:
        # At the end of a run syncs follow each other without an inner step: what the last one left may still be copied.
        self._publication.finish()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._recall() and (caught_up := self._catch_up(Offer.of(ahead))) is not None:
            return self._coming_back(caught_up)
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
                    sync = self._after_left_out(flown, landed)
                case Landing.MISMATCH:
                    sync = self._after_mismatch(landed)
                case _:
                    sync = self._after_abort(flown)
            if sync is not None:
                return self._coming_back(sync)
            self._judge_anew()
            guarded, cause = self._why(flown, landed)
            attempt += not guarded
            self._journal.retried(self.outer_step + 1, max(attempt, 1), cause, time.monotonic() - arrived)
            # Syncs fail for everybody at once. If all gave up at once, nobody would be left with the run's state.
            place = flown.formed.rank if flown.formed is not None else 0
            if self._control.any(attempt > self._config.max_retries + place):
                raise SyncFailed(f"{attempt} attempts at outer step {self.outer_step + 1} failed, the last: {cause}")
            if guarded and (sync := self._after_guarded()) is not None:
                return self._coming_back(sync)

    def settled(self) -> None:
        if self._seat is not None and self.outer_step == self._interval.schedule.outer_steps:
            # A peer that makes the last sync again must not wait for this replica: it takes the state.
            self._seat.shutdown()
            self._seat = None
        self._publication.publish(self._ledger.header(self.outer_step))
        self._presence.show(self.outer_step, self._ledger.state_hash)

    def anchor_hash(self, gather: Callable[[int], list[int]]) -> str:
        return hash_text(self._ledger.state_hash)

    def anchor(self) -> dict[str, torch.Tensor]:
        return {str(index): fragment.committed.anchor for index, fragment in enumerate(self._ledger.fragments)}

    def momentum(self) -> dict[str, torch.Tensor]:
        return {str(index): fragment.committed.momentum for index, fragment in enumerate(self._ledger.fragments)}

    def rewind(self) -> None:
        self._come_down()
        snapshot = self._publication.newest
        self._contribution = self._voted = None
        for fragment in self._ledger.fragments:
            fragment.write_parameters()
        self._trainee.take(snapshot)
        self._interval.settle_all()
        self._interval.begin(self.outer_step)

    def _come_down(self) -> None:
        """Give up an attempt beside the inner steps. Peers that are in it already hear that this replica does not vote,
        instead of waiting for it."""
        if self._flight is None or self._recall():
            return
        flight, self._flight = self._flight, None
        flown = flight.land(self._trainee.alive)
        flown.complete = False
        self._wire.abort()
        self._land(flown)

    def leave(self) -> None:
        self._lookout.stop()
        if self._seat is not None:
            self._seat.shutdown()
            self._seat = None
        self._presence.leave()

    def close(self) -> None:
        self._lookout.stop()
        self._presence.close()
        if self._seat is not None:
            self._seat.shutdown()

    def _be_found(self) -> None:
        """Register, as soon as there is a registry: it may be away for a while."""
        end = time.monotonic() + self._config.quorum_timeout_s
        while not self._presence.register():
            self._trainee.alive()
            if self._control.any(time.monotonic() > end):
                raise RegistryUnreachable("the registry did not answer within diloco.quorum_timeout_s")
            self._pause.wait(ANXIOUS_S)

    # -- one attempt -----------------------------------------------------------------------------------------------

    @property
    def _place(self) -> QuorumSeat:
        assert self._seat is not None, "the engine is a member from open_membership on"
        return self._seat

    def _overlap_of(self, outer_step: int) -> int:
        """Inner steps beside the sync of the interval after ``outer_step``: none in the last one, for no later sync
        would take them in."""
        schedule = self._interval.schedule
        return 0 if schedule.start(outer_step + 1) == schedule.steps else self._config.overlap_steps

    def _take_off(self) -> None:
        """Begin an attempt that goes on beside the inner steps, if any are to come."""
        if self._interval.full:
            return
        self._contribution = mine = self._capture(store=True)
        self._place.announce(self.outer_step)
        self._flight = Flight(self._place, self._wire, lambda: self._attempt(mine))

    def _capture(self, *, store: bool) -> Contribution:
        """What this replica has to bring now, with one row for all its ranks."""
        interval = self._interval
        fragment = self._ledger.fragments[interval.fragment]
        stored = self._store(fragment) if store else None
        ranks = self._control.gather([int(fragment.is_finite()), _bits(interval.loss), _bits(interval.grad_norm)])
        row = Row(
            outer_step=self.outer_step,
            tokens=interval.unsettled,
            weight_tokens=interval.unsettled_of(interval.fragment),
            finite=all(rank[0] for rank in ranks),
            state_hash=self._ledger.state_hash,
            slot=self._identity.slot,
            incarnation=self._identity.incarnation,
            step_us=round(interval.step_s * 1e6),
            config_digest=self._identity.config_digest,
            layout_digest=self._layout_digest,
            id_base=0,
            loss=_mean([rank[1] for rank in ranks]),
            grad_norm=_mean([rank[2] for rank in ranks]),
            inner_steps=interval.done,
            retired=len(self._peers.retired),
        )
        # Times differ between ranks; rank 0 speaks for all.
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
        fragment = self._ledger.fragments[mine.fragment]
        sound = fragment.is_finite() if mine.stored is None else bool(torch.isfinite(mine.stored.sum()))
        self._contribution = replace(mine, row=replace(mine.row, finite=self._control.all(sound)))

    def _store(self, fragment: FlatFragment) -> torch.Tensor:
        """The pseudo-gradient as it is now, in a buffer that is made once: one fragment is in flight at a time."""
        if self._stored is None or self._stored.numel() < fragment.numel:
            largest = max(fragment.numel for fragment in self._ledger.fragments)
            self._stored = torch.empty(largest, dtype=torch.float32, device=self._wire.device)
        stored = self._stored[: fragment.numel]
        fragment.pseudo_gradient(stored)
        return stored

    def _attempt(self, mine: Contribution) -> Flown:
        assert self._pilot is not None
        self._publication.retire_candidate_of(self._ledger.fragments[mine.fragment])
        return self._pilot.fly(mine, self._feedback[mine.fragment])

    def _fly(self, began: float, *, anxious: bool) -> Flown | Sync:
        """An attempt up to its candidate; or what became of this replica while it waited for the quorum."""
        arrived, early, self._early = time.monotonic(), self._early, False
        if self._contribution is None:
            self._contribution = self._capture(store=False)
        if self._flight is None:
            self._place.announce(self.outer_step)
        if (caught_up := self._wait_for_quorum(began, anxious=anxious)) is not None:
            return self._coming_back(caught_up)
        self._trainee.alive()
        there_at = time.monotonic()
        flight, self._flight = self._flight, None
        if flight is not None:
            flown = flight.land(self._trainee.alive)
        elif self._place.wait(self._config.timeout_s):
            flown = self._attempt(self._contribution)
        else:
            raise ReplicaBroken("a quorum came for rank 0 of this replica, and not for this rank")
        flown.wait_s, flown.there_at = 0.0 if early else there_at - arrived, there_at
        return flown

    def _wait_for_quorum(self, began: float, *, anxious: bool) -> Sync | None:
        """None: it is there. Else this replica has caught up with a peer that was ahead meanwhile."""
        self._lookout.start(ANXIOUS_S if anxious else CALM_S)
        end = began + self._config.quorum_timeout_s
        try:
            while True:
                self._trainee.at_point("quorum")
                ahead = self._lookout.wait(self._place, self.outer_step, end)
                if ahead is None:
                    return None
                if self._recall():
                    if (caught_up := self._catch_up(Offer.of(ahead))) is not None:
                        return caught_up
                    self._contribution = self._capture(store=False)
                    # What it has found is not to be had any more.
                    self._lookout.start(ANXIOUS_S)
        finally:
            self._lookout.stop()

    def _recall(self) -> bool:
        """Take back an attempt that still waits for its quorum, on all ranks or on none; its request stays."""
        flight, mine = self._flight, self._contribution
        recalled = flight is None or flight.recall()
        if self._control.all(recalled):
            self._flight = self._contribution = None
            return True
        if flight is not None and recalled:
            assert mine is not None
            self._flight = Flight(self._place, self._wire, lambda: self._attempt(mine))
        return False

    def _guard(self, rows: list[Row]) -> None:
        """No commit without a member of the last one that lives on here or further on: two would go their own ways."""
        present = {row.slot for row in rows}
        if self._control.rank != 0:
            return
        for slot, incarnation in self._ledger.members:
            if slot in present or self._peers.is_dead(slot, incarnation):
                continue
            there = self._peers.lives_on_at(slot, incarnation, self.outer_step)
            if there is not None:
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
        part = self._ledger.rank_hash_with(mine.fragment, flown.candidate)
        landed = self._agreement.land(flown, part)
        if landed.doubt is not None:
            self._journal.doubt(self.outer_step + 1, landed.doubt, landed.doubt_s)
        if landed.voted:
            self._voted = (self.outer_step + 1, landed.candidate, mine)
        if landed.landing is not Landing.COMMITTED and (feedback := self._feedback[mine.fragment]) is not None:
            feedback.abort()
        self._place.rebuild_group(broken=not (landed.unbroken and landed.landing is Landing.COMMITTED))
        return landed

    def _commit(self, flown: Flown, landed: Landed) -> Sync:
        """The candidate becomes the anchor, and the parameters become it."""
        mine, interval = self._contribution, self._interval
        assert mine is not None
        self._contribution = self._voted = None
        counted = flown.counted
        outer_step = self.outer_step + 1
        self._ledger.commit(
            outer_step,
            mine.fragment,
            part=flown.candidate,
            state_hash=landed.candidate,
            members=[(row.slot, row.incarnation) for row in counted],
        )
        retired = self._retire(min(row.retired for row in counted))
        kept = self._config.merge_alpha if mine.stored is not None else 0.0
        self._ledger.fragments[mine.fragment].write_parameters(kept)
        if (feedback := self._feedback[mine.fragment]) is not None:
            feedback.commit()
        self._fences = self._mismatches = 0
        interval.settle(mine.fragment, mine.trained)
        interval.begin(outer_step, self._next_quota(counted))
        tokens = [row.tokens for row in counted]
        return Sync(
            kind=SyncKind.COMMITTED,
            outer_step=outer_step,
            participants=tuple(sorted(row.slot for row in counted)),
            progress=flown.progress,
            retired=retired,
            tokens=mine.row.tokens,
            wait_s=flown.wait_s,
            reduce_s=time.monotonic() - flown.there_at,
            bytes=sum(row[0] for row in self._control.gather([self._wire.take_bytes()])),
            loss=weighted_mean([row.loss for row in counted], tokens),
            grad_norm=weighted_mean([row.grad_norm for row in counted], tokens),
        )

    def _retire(self, known: int) -> tuple[int, ...]:
        """Slots that are given up from this commit on: of the list of the retired, as many as all members know."""
        new = range(len(self._ledger.retired), known)
        speaks = self._control.rank == 0
        slots = [self._control.word([self._peers.retired[i] if speaks else 0]).heard()[0] for i in new]
        self._ledger.retired += tuple(slots)
        return tuple(slots)

    def _next_quota(self, counted: Sequence[Row]) -> int | None:
        """Inner steps until the next sync, if they are not the same for all."""
        length = self._interval.schedule.quota(self.outer_step + 1)
        if self._config.interval == "steps" or length == 0:
            return None
        shares = quotas([row.step_us / 1e6 for row in counted], length)
        mine = next(i for i, row in enumerate(counted) if row.slot == self._identity.slot)
        return max(shares[mine], self._overlap_of(self.outer_step + 1) + 1)

    def _why(self, flown: Flown, landed: Landed) -> tuple[bool, str]:
        """Whether the guard stopped an attempt that failed, the same on all ranks; and what stopped it, in words."""
        guarded = self._control.word([int(isinstance(flown.error, Guarded))]).heard()[0]
        if flown.error is not None:
            return bool(guarded), str(flown.error)
        return bool(guarded), landed.why

    # -- a state from a peer ---------------------------------------------------------------------------------------

    def _after_left_out(self, flown: Flown, landed: Landed) -> Sync | None:
        """The others average without this replica, and it needs the state of one of them."""
        counted = [row.slot for row in flown.counted]
        match flown.standing:
            case Standing.BEHIND:
                # If the vote passed, the others are about to publish what came of it, and what they had is gone.
                next_one = flown.newest + int(landed.unbroken)
                offer = self._adoption.look(next_one, counted) or self._adoption.look(flown.newest, counted)
                return self._catch_up(offer) if offer is not None else None
            case Standing.NON_FINITE:
                if not counted:
                    raise NonFinite(
                        f"no replica's parameters are finite at step {self.next_step - 1}: the training has diverged; "
                        "lower optimizer.lr or lengthen lr_scheduler.warmup_steps"
                    )
                return self._fence("non_finite", NonFinite, flown.newest, counted)
            case _:
                return self._fence("diverged", Diverged, flown.newest, counted)

    def _after_guarded(self) -> Sync | None:
        """Whom the guard waits for may have left further on, and come to no quorum any more. Waits a moment if not."""
        offer = self._adoption.look(self.outer_step + 1, None)
        return self._catch_up(offer) if offer is not None else None

    def _after_abort(self, flown: Flown) -> Sync | None:
        """What was averaged may not be finite because an anchor that somebody subtracts from is not."""
        if not self._control.any(isinstance(flown.error, NonFiniteMean)) or self._control.all(self._ledger.is_sound()):
            return None
        return self._fence("diverged", Diverged, self.outer_step, None)

    def _after_mismatch(self, landed: Landed) -> Sync | None:
        """The same data gave different candidates: the memory of one of them is not what was agreed on."""
        if not self._control.all(self._ledger.is_sound()):
            return self._fence("diverged", Diverged, self.outer_step, None)
        self._mismatches += 1
        if self._mismatches > 1 and landed.in_minority:
            raise Diverged(f"the candidate for outer step {self.outer_step + 1} differs from that of most replicas")
        return None

    def _fence(self, cause: str, error: type[Exception], at_least: int, among: Sequence[int] | None) -> Sync:
        """This replica's state is unfit: it takes a peer's, in place."""
        self._journal.fenced(cause, self.outer_step)
        self._fences += 1
        healed = self._healed(at_least, among) if self._fences <= _FENCES else None
        if healed is None:
            text = f"this replica's state is {cause.replace('_', '-')} and no peer's state mended it"
            self._journal.heal_failed(cause, text)
            raise error(text)
        return healed

    def _healed(self, at_least: int, among: Sequence[int] | None) -> Sync | None:
        """After the whole state of the newest peer was taken over; None if none gave it in time."""
        healed = self._adoption.heal_from_any(at_least, among)
        if healed is not None:
            self._contribution = self._voted = None
            self._join_is_due = True
            for feedback in self._feedback:
                if feedback is not None:
                    feedback.reset()
        return healed

    def _catch_up(self, offer: Offer) -> Sync | None:
        """After the outer state of those that are ahead was taken over; None if it could not be had."""
        caught_up = self._adoption.catch_up(offer, self._voted)
        if caught_up is not None:
            self._contribution = self._voted = None
        return caught_up

    def _coming_back(self, sync: Sync) -> Sync:
        """With a peer's state in place, ask for a quorum at once and go on training: the interval ends with the step
        in which it comes."""
        if self.outer_step < self._interval.schedule.outer_steps:
            # Those whose state it is may have formed groups without this replica.
            self._place.rebuild_group(broken=True)
            self._place.announce(self.outer_step)
            self._early = True
            self._lookout.start(CALM_S)
        return sync


def _digest(fragments: Sequence[FlatFragment]) -> int:
    """Of names, shapes and order of what a rank exchanges; signed 64 bit."""
    text = repr([fragment.layout for fragment in fragments])
    return int.from_bytes(xxhash.xxh3_64(text.encode()).digest(), "big", signed=True)


def _bits(value: float | None) -> int:
    """As ranks tell each other a value that there may not be."""
    return float_bits(math.nan if value is None else value)


def _mean(bits: Sequence[int]) -> float:
    """The mean over the ranks that have a finite value (see ``_bits``); NaN if none has."""
    known = [value for value in map(float_of, bits) if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan
