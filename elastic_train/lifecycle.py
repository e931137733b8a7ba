"""The states of a replica and the one table that says how they follow each other.

Whoever drives a replica names what happened (a trigger); only this table says what that makes of it. A
trigger that the table does not have for a state is a defect of the driver and raises, so that a race shows
where it happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class ReplicaState(StrEnum):
    """Where a replica stands. The values are what the event log shows."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    JOINING = "JOINING"
    HEALING = "HEALING"
    RUNNING = "RUNNING"
    DRAINING = "DRAINING"
    BACKOFF = "BACKOFF"
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def is_end(self) -> bool:
        """True for the states that a replica never leaves."""
        return self in END_STATES


END_STATES = frozenset({ReplicaState.SUCCEEDED, ReplicaState.STOPPED, ReplicaState.FAILED})


class Trigger(StrEnum):
    """What happened to a replica."""

    ALLOCATED = "ALLOCATED"
    READY = "READY"
    RELEASED = "RELEASED"
    HEAL_STARTED = "HEAL_STARTED"
    HEAL_FINISHED = "HEAL_FINISHED"
    JOINED = "JOINED"
    FAILED = "FAILED"
    RESTART = "RESTART"
    REALLOCATE = "REALLOCATE"
    RESTORE = "RESTORE"
    FINISHED = "FINISHED"
    PEERS_FINISHED = "PEERS_FINISHED"
    DRAIN = "DRAIN"
    DRAINED = "DRAINED"
    RETIRE = "RETIRE"
    STOP = "STOP"


class IllegalTransition(RuntimeError):
    """A trigger came in a state that has no place for it."""

    def __init__(self, state: ReplicaState, trigger: Trigger) -> None:
        super().__init__(f"a replica in state {state} cannot take {trigger}")
        self.state = state
        self.trigger = trigger

    def __reduce__(self) -> tuple[type[IllegalTransition], tuple[ReplicaState, Trigger]]:
        return type(self), (self.state, self.trigger)


def _build_table() -> Mapping[tuple[ReplicaState, Trigger], ReplicaState]:
    s, t = ReplicaState, Trigger
    table = {
        (s.PENDING, t.ALLOCATED): s.STARTING,
        (s.STARTING, t.READY): s.JOINING,
        (s.JOINING, t.RELEASED): s.RUNNING,
        (s.JOINING, t.HEAL_STARTED): s.HEALING,
        (s.HEALING, t.HEAL_FINISHED): s.JOINING,
        (s.JOINING, t.JOINED): s.RUNNING,
        (s.HEALING, t.JOINED): s.RUNNING,
        (s.RUNNING, t.HEAL_STARTED): s.HEALING,
        **{(state, t.FINISHED): s.SUCCEEDED for state in (s.JOINING, s.RUNNING, s.DRAINING)},
        (s.RUNNING, t.DRAIN): s.DRAINING,
        (s.JOINING, t.DRAIN): s.DRAINING,
        (s.DRAINING, t.DRAINED): s.STOPPED,
        (s.BACKOFF, t.RESTART): s.STARTING,
        (s.BACKOFF, t.REALLOCATE): s.PENDING,
        (s.BACKOFF, t.RETIRE): s.FAILED,
    }
    for state in s:
        if state.is_end:
            continue
        table[state, t.STOP] = s.STOPPED
        table[state, t.FAILED] = s.BACKOFF
        table[state, t.PEERS_FINISHED] = s.SUCCEEDED
        if state is not s.PENDING:
            table[state, t.RESTORE] = s.STARTING
    return MappingProxyType(table)


TRANSITIONS = _build_table()


class ReplicaLifecycle:
    """The state of one replica of the run."""

    def __init__(self, state: ReplicaState = ReplicaState.PENDING) -> None:
        self._state = state

    @property
    def state(self) -> ReplicaState:
        return self._state

    def allows(self, trigger: Trigger) -> bool:
        """Whether `apply(trigger)` would be legal now."""
        return (self._state, trigger) in TRANSITIONS

    def apply(self, trigger: Trigger) -> tuple[ReplicaState, ReplicaState]:
        """Takes the transition and returns (from, to).

        Raises IllegalTransition and keeps the state if there is none.
        """
        before = self._state
        after = TRANSITIONS.get((before, trigger))
        if after is None:
            raise IllegalTransition(before, trigger)
        self._state = after
        return before, after
