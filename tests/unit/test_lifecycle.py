"""The transition table is the contract's table, and an end is an end."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.lifecycle import (
    TRANSITIONS,
    IllegalTransition,
    ReplicaLifecycle,
    ReplicaState,
    Trigger,
)

LIVING = ["PENDING", "STARTING", "JOINING", "HEALING", "RUNNING", "DRAINING", "BACKOFF"]
ENDS = ["SUCCEEDED", "STOPPED", "FAILED"]

TABLE = """
    PENDING  ALLOCATED     STARTING
    STARTING READY         JOINING
    JOINING  RELEASED      RUNNING
    JOINING  HEAL_STARTED  HEALING
    HEALING  HEAL_FINISHED JOINING
    JOINING  JOINED        RUNNING
    HEALING  JOINED        RUNNING
    RUNNING  HEAL_STARTED  HEALING
    JOINING  FINISHED      SUCCEEDED
    RUNNING  FINISHED      SUCCEEDED
    DRAINING FINISHED      SUCCEEDED
    RUNNING  DRAIN         DRAINING
    JOINING  DRAIN         DRAINING
    DRAINING DRAINED       STOPPED
    BACKOFF  RESTART       STARTING
    BACKOFF  REALLOCATE    PENDING
    BACKOFF  RETIRE        FAILED
    STARTING RESTORE       STARTING
    JOINING  RESTORE       STARTING
    HEALING  RESTORE       STARTING
    RUNNING  RESTORE       STARTING
    DRAINING RESTORE       STARTING
    BACKOFF  RESTORE       STARTING
"""


def expected() -> dict[tuple[str, str], str]:
    table = {(a, trigger): b for a, trigger, b in (line.split() for line in TABLE.strip().splitlines())}
    for state in LIVING:
        table[state, "STOP"] = "STOPPED"
        table[state, "FAILED"] = "BACKOFF"
        table[state, "PEERS_FINISHED"] = "SUCCEEDED"
    return table


def test_the_table_is_the_contract() -> None:
    assert {(str(a), str(trigger)): str(b) for (a, trigger), b in TRANSITIONS.items()} == expected()


def test_the_states_are_the_contract() -> None:
    assert [str(state) for state in ReplicaState] == [*LIVING, *ENDS]
    assert [str(state) for state in ReplicaState if state.is_end] == ENDS


def test_a_whole_life() -> None:
    life = ReplicaLifecycle()
    steps = [
        Trigger.ALLOCATED,
        Trigger.READY,
        Trigger.RELEASED,
        Trigger.FAILED,
        Trigger.RESTART,
        Trigger.READY,
    ]
    steps += [Trigger.HEAL_STARTED, Trigger.HEAL_FINISHED, Trigger.JOINED, Trigger.FINISHED]
    path = [life.apply(trigger) for trigger in steps]
    assert path[0] == (ReplicaState.PENDING, ReplicaState.STARTING)
    assert [before for before, _ in path[1:]] == [after for _, after in path[:-1]]
    assert life.state is ReplicaState.SUCCEEDED


def test_an_illegal_trigger_raises_and_changes_nothing() -> None:
    life = ReplicaLifecycle(ReplicaState.STARTING)
    with pytest.raises(IllegalTransition, match="STARTING cannot take JOINED") as raised:
        life.apply(Trigger.JOINED)
    assert (raised.value.state, raised.value.trigger) == (ReplicaState.STARTING, Trigger.JOINED)
    assert life.state is ReplicaState.STARTING


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(IllegalTransition(ReplicaState.FAILED, Trigger.READY)))
    assert (error.state, error.trigger) == (ReplicaState.FAILED, Trigger.READY)
    assert str(error) == "a replica in state FAILED cannot take READY"


@given(st.lists(st.sampled_from(Trigger)))
def test_no_sequence_leaves_an_end(triggers: list[Trigger]) -> None:
    life = ReplicaLifecycle()
    for trigger in triggers:
        before = life.state
        legal = life.allows(trigger)
        try:
            assert life.apply(trigger) == (before, life.state)
            assert legal
            assert not before.is_end
        except IllegalTransition:
            assert not legal
            assert life.state is before


@pytest.mark.parametrize("state", [state for state in ReplicaState if not state.is_end])
def test_every_living_replica_can_be_stopped_and_can_fail(state: ReplicaState) -> None:
    assert ReplicaLifecycle(state).apply(Trigger.STOP) == (state, ReplicaState.STOPPED)
    assert ReplicaLifecycle(state).allows(Trigger.FAILED)
