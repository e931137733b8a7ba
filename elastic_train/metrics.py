"""What a run amounts to, folded from its log: states, recoveries, where the time went.

Live view, status and summary all show this one fold, so they cannot disagree, and whatever they show can be
computed again later from the run folder. The log is merged from several processes: events of different
replicas arrive slightly out of order, and a dead incarnation's last words may arrive after its successor's
first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from elastic_train.events import Record
from elastic_train.lifecycle import ReplicaState

BUCKETS = ("train", "wait", "sync", "heal", "down")
"""Where time goes: inner steps, waiting for others, the outer sync, fetching a state, not being there."""

_BUCKET_OF_STATE: Mapping[ReplicaState, str] = {
    ReplicaState.PENDING: "down",
    ReplicaState.STARTING: "down",
    ReplicaState.JOINING: "wait",
    ReplicaState.HEALING: "heal",
    ReplicaState.RUNNING: "train",
    ReplicaState.DRAINING: "train",
    ReplicaState.BACKOFF: "down",
    ReplicaState.SUCCEEDED: "wait",
    ReplicaState.STOPPED: "down",
    ReplicaState.FAILED: "down",
}

# A survivor's commit may be read a little before the joiner's that makes it interesting, never many outer
# steps before.
_RECENT_SYNCS = 16


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One replica's part in an outer step."""

    outer_step: int
    inner_step: int
    t: float
    participants: tuple[int, ...]
    tokens: int
    wait_s: float
    reduce_s: float


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """The members that agreed to work together."""

    quorum_id: int
    participants: tuple[int, ...]
    t: float


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that was injected on purpose."""

    t: float
    replica: int | None
    incarnation: int | None
    rank: int | None
    kind: str
    point: str
    spec: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A durable snapshot."""

    t: float
    outer_step: int
    path: str


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """A replica as it stands now; the figures of training are those of its present incarnation."""

    slot: int
    state: ReplicaState = ReplicaState.PENDING
    incarnation: int = 0
    pids: tuple[int, ...] = ()
    step: int = 0
    outer_step: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    tps: float | None = None
    tokens: int = 0
    """Trained by this incarnation, committed or not."""
    last_sync: Sync | None = None


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One failure and the way back. Times are unix seconds, None for what did not happen (yet)."""

    replica: int
    incarnation: int
    """The new one, which takes the failed one's place."""
    cause: str
    detail: str
    """The signal's name or the error's last line."""
    rank: int | None = None
    step: int | None = None
    """The inner step at which it failed."""
    fault: str = ""
    """The injected fault that caused it, if one did."""
    stacks: str = ""
    """Folder in the run folder that tells where its threads stood, if it says so."""
    level: str = ""
    """What was decided: the level of escalation."""
    standby: bool = False
    """Whether its processes were those of a warm standby."""
    donors: tuple[int, ...] = ()
    source: str = ""
    """Where the state came from: the donors ("peers"), or "memory" of its host, which one of them confirmed."""
    t_fault: float | None = None
    t_detected: float
    t_procs: float | None = None
    t_ready: float | None = None
    t_healed: float | None = None
    t_joined: float | None = None
    t_first_step: float | None = None
    t_failed_again: float | None = None
    bytes: int | None = None
    heal_s: float | None = None
    join_outer_step: int | None = None
    """The outer step that it first took part in."""
    survivor_wait_s: float | None = None
    """The longest that another replica waited for the quorum of that outer step."""
    outage_wait_s: float | None = None
    """The longest that another replica waited for the quorum of an outer step without it."""

    @property
    def t_origin(self) -> float:
        """When it died: the injected fault, else what the detection reckons, else the detection."""
        return self.t_detected if self.t_fault is None else self.t_fault

    def phases(self) -> dict[str, float]:
        """Seconds from the death to each milestone that was reached, in the order in which they happened."""
        reached = {
            "detected": self.t_detected,
            "processes up": self.t_procs,
            "trainers built": self.t_ready,
            "state received": self.t_healed,
            "member of a quorum": self.t_joined,
            "first step": self.t_first_step,
        }
        seconds = {name: t - self.t_origin for name, t in reached.items() if t is not None}
        return dict(sorted(seconds.items(), key=lambda item: item[1]))

    @property
    def recovered_s(self) -> float | None:
        """Seconds from the death to the end of the first inner step of the new incarnation."""
        return None if self.t_first_step is None else self.t_first_step - self.t_origin


class _Ledger:
    """One replica's time: every second is in exactly one bucket."""

    def __init__(self, start: float) -> None:
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._bucket = "down"
        self._cursor = start
        self._movable = 0.0

    def switch(self, t: float, bucket: str) -> None:
        """From `t` on, time goes into `bucket`."""
        self._advance(t)
        if bucket != self._bucket:
            self._bucket = bucket
            self._movable = 0.0

    def move(self, t: float, seconds: float, bucket: str) -> None:
        """Gives up to `seconds` of the stretch that runs until `t` to another bucket than the present one."""
        self._advance(t)
        seconds = min(max(0.0, seconds), self._movable)
        self._movable -= seconds
        self._seconds[self._bucket] -= seconds
        self._seconds[bucket] += seconds

    def totals(self, now: float) -> dict[str, float]:
        totals = dict(self._seconds)
        totals[self._bucket] += max(0.0, now - self._cursor)
        return totals

    def is_in(self, bucket: str) -> bool:
        return self._bucket == bucket

    def _advance(self, t: float) -> None:
        elapsed = max(0.0, t - self._cursor)
        self._cursor += elapsed
        self._movable += elapsed
        self._seconds[self._bucket] += elapsed


@dataclass
class _MeanAt:
    """The mean of a value over the replicas at one step: the lowest or the highest that was seen."""

    sign: int
    step: int | None = None
    total: float = 0.0
    count: int = 0

    def add(self, step: int, value: float) -> None:
        if self.step is None or self.sign * (step - self.step) > 0:
            self.step, self.total, self.count = step, 0.0, 0
        if step == self.step:
            self.total += value
            self.count += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Slot:
    view: ReplicaView
    ledger: _Ledger
    fault: Fault | None = None
    """An injected fault whose consequence was not seen yet."""
    retry_s: float = 0.0
    """Spent in failed attempts of the outer sync that is still to be committed."""
    trains: bool = False
    """Whether the present incarnation has made a step: a joiner trains on while it waits for its quorum."""

    @property
    def bucket(self) -> str:
        """Where its time goes now."""
        joining_in_training = self.trains and self.view.state is ReplicaState.JOINING
        return "train" if joining_in_training else _BUCKET_OF_STATE[self.view.state]


class RunFold:
    """The state of a run after the events and metrics records that were applied to it.

    An event costs the same however long the run is. Views and recoveries are values: one that was handed out
    does not change later.
    """

    def __init__(self) -> None:
        self.status = "starting"
        """starting, running, then what run_finished says: succeeded, failed or interrupted."""
        self.cause = ""
        """Why the run ended, where run_finished says it."""
        self.name = ""
        self.run_dir = ""
        self.steps: int | None = None
        """The planned inner steps of the run."""
        self.procs_per_replica = 1
        self.inner_step = 0
        self.outer_step = 0
        self.quorum: Quorum | None = None
        self.faults: list[Fault] = []
        self.retired: dict[int, str] = {}
        self.checkpoint: Checkpoint | None = None
        self.sync_retries = 0
        self.tokens_committed = 0
        self.started_t: float | None = None
        self.ended_t: float | None = None

        self._last_t = 0.0
        self._slots: dict[int, _Slot] = {}
        self._recoveries: dict[tuple[int, int], Recovery] = {}
        self._absent: set[tuple[int, int]] = set()
        self._tokens: dict[int, int] = {}
        self._waits: dict[int, dict[int, float]] = {}
        self._joins: dict[int, list[tuple[int, int]]] = {}
        self._first_loss = _MeanAt(sign=-1)
        self._last_loss = _MeanAt(sign=+1)
        self._final_loss: float | None = None

    # What it shows

    @property
    def replicas(self) -> dict[int, ReplicaView]:
        """By slot, in the order of the slots."""
        return {number: self._slots[number].view for number in sorted(self._slots)}

    @property
    def recoveries(self) -> list[Recovery]:
        """One for every failure, in the order in which they were detected."""
        return list(self._recoveries.values())

    @property
    def first_loss(self) -> float | None:
        """The mean over the replicas at the first logged step."""
        return self._first_loss.mean

    @property
    def last_loss(self) -> float | None:
        """What run_finished says, until then the mean over the replicas at the last logged step."""
        return self._last_loss.mean if self._final_loss is None else self._final_loss

    def recovery(self, replica: int, incarnation: int) -> Recovery | None:
        """The recovery that `incarnation` of `replica` is, if it replaced a failed one."""
        return self._recoveries.get((replica, incarnation))

    def wall_s(self, now: float | None = None) -> float:
        """Seconds from the first event to the end of the run, else to `now` or the last event, whichever is
        later.
        """
        return 0.0 if self.started_t is None else self._until(now) - self.started_t

    def buckets(self, replica: int, now: float | None = None) -> dict[str, float]:
        """Where the time of one replica went; the values add up to `wall_s(now)`."""
        return self._slots[replica].ledger.totals(self._until(now))

    def efficiency(self, now: float | None = None) -> float | None:
        """The share of all replicas' time that went into inner steps; None before there is any time."""
        totals = [self.buckets(replica, now) for replica in self._slots]
        spent = sum(sum(total.values()) for total in totals)
        return sum(total["train"] for total in totals) / spent if spent > 0 else None

    # What it reads

    @classmethod
    def of(cls, events: Iterable[Record]) -> Self:
        """The state after a whole log, without metrics."""
        fold = cls()
        for event in events:
            fold.apply(event)
        return fold

    def apply(self, event: Record) -> None:
        """Takes one event; names that mean nothing to the fold only move its time forward."""
        t = self._observe(event["t"])
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(t, event)

    def apply_metrics(self, record: Record) -> None:
        """Takes one record of metrics.jsonl."""
        self._observe(record["t"])
        slot, current = self._speaker(record)
        step = record["step"]
        self.inner_step = max(self.inner_step, step)
        loss = _number(record, "loss")
        if loss is not None:
            self._first_loss.add(step, loss)
            self._last_loss.add(step, loss)
        if current:
            slot.view = replace(
                slot.view,
                step=step,
                outer_step=max(record.get("outer_step", 0), slot.view.outer_step),
                loss=loss,
                grad_norm=_number(record, "grad_norm"),
                tps=_number(record, "tps"),
                tokens=record.get("tokens", slot.view.tokens),
            )

    def _on_run_started(self, t: float, event: Record) -> None:
        self.status = "running"
        self.name = event.get("name", "")
        self.run_dir = event.get("run_dir", "")
        self.steps = event.get("steps")
        self.procs_per_replica = event.get("procs_per_replica", 1)
        for replica in range(event["replicas"]):
            self._slot(replica)

    def _on_run_restored(self, t: float, event: Record) -> None:
        self.outer_step = event["outer_step"]
        self.inner_step = event.get("inner_step", self.inner_step)
        if self._last_loss.step is not None and self._last_loss.step > self.inner_step:
            self._last_loss = _MeanAt(sign=+1)
        for outer_step in [k for k in self._tokens if k > self.outer_step]:
            self.tokens_committed -= self._tokens.pop(outer_step)
        if self.checkpoint is not None:
            self.checkpoint = Checkpoint(t=t, outer_step=self.outer_step, path=event["path"])
        for superseded in (self._waits, self._joins):
            for outer_step in [k for k in superseded if k > self.outer_step]:
                del superseded[outer_step]

    def _on_run_finished(self, t: float, event: Record) -> None:
        self.status = event["status"]
        self.cause = event.get("cause", "")
        self.inner_step = event.get("inner_step", self.inner_step)
        self.outer_step = event.get("outer_step", self.outer_step)
        self._final_loss = _number(event, "loss")
        self.ended_t = self._last_t

    def _on_replica_state(self, t: float, event: Record) -> None:
        slot, current = self._speaker(event)
        if current:
            state = ReplicaState(event["to"])
            slot.view = replace(slot.view, state=state)
            slot.ledger.switch(t, slot.bucket)

    def _on_procs_started(self, t: float, event: Record) -> None:
        slot, current = self._speaker(event)
        if current:
            slot.view = replace(slot.view, pids=tuple(event.get("pids", ())))
        self._update(self._life(event), standby=bool(event.get("standby")))
        self._reached(event, "t_procs", t)

    def _on_replica_ready(self, t: float, event: Record) -> None:
        self._reached(event, "t_ready", t)

    def _on_quorum_changed(self, t: float, event: Record) -> None:
        if self.quorum is None or event["quorum_id"] > self.quorum.quorum_id:
            self.quorum = Quorum(quorum_id=event["quorum_id"], participants=tuple(event["participants"]), t=t)

    def _on_sync_committed(self, t: float, event: Record) -> None:
        slot, current = self._speaker(event)
        sync = Sync(
            outer_step=event["outer_step"],
            inner_step=event["inner_step"],
            t=t,
            participants=tuple(event["participants"]),
            tokens=event.get("tokens", 0),
            wait_s=event.get("wait_s", 0.0),
            reduce_s=event.get("reduce_s", 0.0),
        )
        self.outer_step = max(self.outer_step, sync.outer_step)
        self.inner_step = max(self.inner_step, sync.inner_step)
        self._commit_tokens(sync.outer_step, sync.tokens)
        if not current:
            return
        last_sync = slot.view.last_sync
        if slot.fault is not None and last_sync is not None and last_sync.t > slot.fault.t:
            # Two commits after it: the incarnation survived the fault, and what it dies of later is something
            # else.
            slot.fault = None
        slot.view = replace(slot.view, outer_step=sync.outer_step, step=sync.inner_step, last_sync=sync)
        if slot.ledger.is_in("train"):
            slot.ledger.move(t, sync.wait_s, "wait")
            slot.ledger.move(t, sync.reduce_s, "sync")
        self._note_wait(slot.view, sync, sync.wait_s + slot.retry_s)
        slot.retry_s = 0.0

    def _on_sync_retried(self, t: float, event: Record) -> None:
        self.sync_retries += 1
        slot, current = self._speaker(event)
        lost_s = event.get("duration_s", 0.0)
        if current and slot.ledger.is_in("train"):
            slot.ledger.move(t, lost_s, "wait")
            slot.retry_s += lost_s

    def _on_caught_up(self, t: float, event: Record) -> None:
        slot, current = self._speaker(event)
        self._commit_tokens(event["outer_step"], event.get("tokens", 0))
        if current:
            slot.view = replace(slot.view, outer_step=event["outer_step"])

    def _on_fault_injected(self, t: float, event: Record) -> None:
        fault = Fault(
            t=t,
            replica=event.get("replica"),
            incarnation=event.get("incarnation"),
            rank=event.get("rank"),
            kind=event["kind"],
            point=event.get("point", "step"),
            spec=event.get("spec", ""),
        )
        self.faults.append(fault)
        if fault.replica is None:
            return
        replica, incarnation = self._life(event)
        recovery = self._recoveries.get((replica, incarnation + 1))
        if recovery is None:
            self._slot(replica).fault = replace(fault, incarnation=incarnation)
        elif not recovery.fault and t <= recovery.t_detected:
            self._update((replica, incarnation + 1), t_fault=t, fault=_name_of(fault))

    def _on_failure_detected(self, t: float, event: Record) -> None:
        slot, current = self._speaker(event)
        replica = slot.view.slot
        failed = event.get("incarnation", slot.view.incarnation)
        fault = slot.fault if slot.fault is not None and slot.fault.incarnation == failed else None
        if fault is not None:
            slot.fault = None
        t_fault = fault.t if fault is not None else t - event["detect_s"] if "detect_s" in event else None
        if current:
            slot.ledger.move(t, 0.0 if t_fault is None else t - t_fault, "down")
            slot.ledger.switch(t, "down")
            slot.retry_s = 0.0
        if (replica, failed + 1) in self._recoveries:
            return
        before = self._recoveries.get((replica, failed))
        if before is not None and before.t_first_step is None:
            self._update((replica, failed), t_failed_again=t)
        self._absent.discard((replica, failed))

        self._recoveries[replica, failed + 1] = Recovery(
            replica=replica,
            incarnation=failed + 1,
            cause=event["cause"],
            detail=event.get("signal") or _last_line(event.get("error", "")),
            rank=event.get("rank"),
            step=event.get("step"),
            fault="" if fault is None else _name_of(fault),
            stacks=event.get("stacks", ""),
            t_fault=t_fault,
            t_detected=t,
        )
        self._absent.add((replica, failed + 1))

    def _on_restart_scheduled(self, t: float, event: Record) -> None:
        # It speaks of the incarnation to come, which is not the present one before it starts.
        replica, incarnation = event["replica"], event.get("incarnation", 0)
        if event["level"] == "restore":
            self._hand_over(replica, incarnation)
        self._update((replica, incarnation), level=event["level"])

    def _hand_over(self, replica: int, incarnation: int) -> None:
        """An incarnation takes the place of one that was on its way back and did not fail: the recovery is its own."""
        before, after = (replica, incarnation - 1), (replica, incarnation)
        recovery = self._recoveries.get(before)
        if recovery is None or recovery.t_first_step is not None or after in self._recoveries:
            return
        del self._recoveries[before]
        self._recoveries[after] = replace(recovery, incarnation=incarnation)
        if before in self._absent:
            self._absent.discard(before)
            self._absent.add(after)

    def _on_replica_retired(self, t: float, event: Record) -> None:
        self.retired[event["replica"]] = event.get("cause", "")
        self._absent = {key for key in self._absent if key[0] != event["replica"]}

    def _on_donor_selected(self, t: float, event: Record) -> None:
        self._update(self._life(event), donors=_distinct(event["donors"]))

    def _on_heal_finished(self, t: float, event: Record) -> None:
        slot, current = self._speaker(event)
        if current:
            slot.view = replace(slot.view, outer_step=event["outer_step"])
        self._update(
            self._life(event),
            donors=_distinct(event["donors"]),
            source=event.get("source", ""),
            bytes=event.get("bytes"),
            heal_s=event.get("duration_s"),
        )
        self._reached(event, "t_healed", t)

    def _on_joined(self, t: float, event: Record) -> None:
        self._advance_step(event)
        self._reached(event, "t_joined", t)

    def _on_first_step(self, t: float, event: Record) -> None:
        slot, current = self._advance_step(event)
        if current:
            slot.trains = True
            slot.ledger.switch(t, slot.bucket)
        self._reached(event, "t_first_step", t)

    def _on_checkpoint_saved(self, t: float, event: Record) -> None:
        self.checkpoint = Checkpoint(t=t, outer_step=event["outer_step"], path=event["path"])

    # How it does it

    def _observe(self, t: float) -> float:
        """Moves the fold's time forward; returns the time to account `t` under, never after the run's end."""
        if self.started_t is None:
            self.started_t = self._last_t = t
        if self.ended_t is not None:
            return min(t, self.ended_t)
        self._last_t = max(self._last_t, t)
        return t

    def _until(self, now: float | None) -> float:
        if self.ended_t is not None:
            return self.ended_t
        return self._last_t if now is None else max(self._last_t, now)

    def _slot(self, replica: int) -> _Slot:
        if replica not in self._slots:
            start = self._last_t if self.started_t is None else self.started_t
            self._slots[replica] = _Slot(ReplicaView(slot=replica), _Ledger(start))
        return self._slots[replica]

    def _speaker(self, record: Record) -> tuple[_Slot, bool]:
        """The slot that a record speaks of, and whether it comes from the newest incarnation known."""
        slot = self._slot(record["replica"])
        known = slot.view.incarnation
        incarnation = record.get("incarnation", known)
        if incarnation > known:
            view = slot.view
            slot.view = ReplicaView(slot=view.slot, incarnation=incarnation, state=view.state, last_sync=view.last_sync)
            slot.retry_s = 0.0
            slot.trains = False
        return slot, incarnation >= known

    def _advance_step(self, event: Record) -> tuple[_Slot, bool]:
        slot, current = self._speaker(event)
        step = event["inner_step"]
        self.inner_step = max(self.inner_step, step)
        if current:
            slot.view = replace(slot.view, step=max(slot.view.step, step))
        return slot, current

    def _life(self, event: Record) -> tuple[int, int]:
        """The replica and the incarnation that an event speaks of."""
        slot, _ = self._speaker(event)
        return slot.view.slot, event.get("incarnation", slot.view.incarnation)

    def _reached(self, event: Record, milestone: str, t: float) -> None:
        """Notes the first time that a recovery reached a milestone."""
        life = self._life(event)
        recovery = self._recoveries.get(life)
        if recovery is not None and getattr(recovery, milestone) is None:
            self._update(life, **{milestone: t})

    def _update(self, life: tuple[int, int], **changes: Any) -> None:
        recovery = self._recoveries.get(life)
        if recovery is not None:
            self._recoveries[life] = replace(recovery, **changes)

    def _commit_tokens(self, outer_step: int, tokens: int) -> None:
        self._tokens[outer_step] = self._tokens.get(outer_step, 0) + tokens
        self.tokens_committed += tokens

    def _note_wait(self, view: ReplicaView, sync: Sync, wait_s: float) -> None:
        """Charges a replica's wait at an outer step to the recoveries that were going on."""
        key = (view.slot, view.incarnation)
        if key in self._absent:
            self._absent.discard(key)
            self._update(key, join_outer_step=sync.outer_step)
            self._joins.setdefault(sync.outer_step, []).append(key)
        else:
            for absent in self._absent:
                recovery = self._recoveries[absent]
                if absent[0] not in sync.participants and sync.t >= recovery.t_origin:
                    self._update(absent, outage_wait_s=max(wait_s, recovery.outage_wait_s or 0.0))
        self._waits.setdefault(sync.outer_step, {})[view.slot] = wait_s
        self._charge_joins(sync.outer_step)
        for old in [k for k in self._waits if k < self.outer_step - _RECENT_SYNCS]:
            del self._waits[old]
            self._joins.pop(old, None)

    def _charge_joins(self, outer_step: int) -> None:
        joins = self._joins.get(outer_step, [])
        joiners = {replica for replica, _ in joins}
        waits = [wait_s for slot, wait_s in self._waits[outer_step].items() if slot not in joiners]
        for key in joins:
            self._update(key, survivor_wait_s=max(waits, default=None))


def _number(record: Record, name: str) -> float | None:
    """A figure of a record: None if it is not there, NaN if it was no number that JSON can hold."""
    if name not in record:
        return None
    value = record[name]
    return math.nan if value is None else float(value)


def _distinct(donors: Iterable[int]) -> tuple[int, ...]:
    """Every rank of a joiner has a donor, and most often they all have the same."""
    return tuple(dict.fromkeys(donors))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _name_of(fault: Fault) -> str:
    return fault.spec or f"{fault.replica}.{fault.rank}/{fault.point}:{fault.kind}"
