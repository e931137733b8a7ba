"""What the checks of a world find, and what the oracle computes, on logs that are written by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train.config import FaultSpec
from elastic_train.events import Record
from scripts.sync_world.checks import faults_of
from scripts.sync_world.families import FAMILIES, draw
from scripts.sync_world.model import move, parameters
from scripts.sync_world.oracle import Inconsistent, Oracle
from scripts.sync_world.positions import Positions, read_by
from scripts.sync_world.spec import WorldSpec, brisk
from scripts.sync_world.world import Account, End
from scripts.trials import Trial, Trials, sum_up

SPEC = WorldSpec(replicas=2, tokens=(100, 300), step_s=(0.0, 0.0), steps=8, width=4, diloco=brisk(sync_every=4))


def life(slot: int, *, incarnation: int = 0) -> list[Record]:
    """A replica that trains two intervals of four steps with the other one."""
    tokens = SPEC.tokens[slot]
    events: list[dict[str, Any]] = []
    for outer_step in (1, 2):
        steps = 4 * outer_step
        events += [
            {"event": "captured", "outer_step": outer_step - 1, "steps": steps},
            {
                "event": "sync_committed",
                "outer_step": outer_step,
                "steps": steps,
                "participants": [0, 1],
                "tokens": 4 * tokens,
                "anchor_hash": f"{outer_step}",
            },
        ]
    rows = [[0, 0, SPEC.tokens[s] * 4, 4] for s in (0, 0, 1, 1)]
    events.append({"event": "replica_finished", "outer_step": 2, "tokens": 8 * tokens, "positions": rows})
    return [{"replica": slot, "incarnation": incarnation, "rank": 0, **event} for event in events]


def account(**changes: Any) -> Account:
    """What a world leaves in which nothing went wrong."""
    events = {slot: life(slot) for slot in (0, 1)}
    expected = Oracle(SPEC, events).expected(0)
    states = {(slot, 0): {name: array.astype(np.float32) for name, array in expected.items()} for slot in (0, 1)}
    return replace(Account(events=events, states=states, ends=(), wall_s=1.0), **changes)


def test_a_world_in_which_nothing_went_wrong() -> None:
    assert faults_of(SPEC, account()) == []


def test_the_oracle_weighs_by_tokens_and_looks_ahead() -> None:
    spec = replace(SPEC, steps=4)
    oracle = Oracle(spec, {slot: life(slot)[:2] for slot in (0, 1)})
    shapes = {name: array.shape for name, array in parameters(4).items()}
    moved = [
        sum(move(shapes, slot, 0, step)["norm.bias"].astype(np.float64) for step in range(1, 5)) for slot in (0, 1)
    ]
    d = -(moved[0] * 0.25 + moved[1] * 0.75)
    start = parameters(4)["norm.bias"]
    lr, mu = spec.diloco.outer_lr, spec.diloco.outer_momentum
    np.testing.assert_allclose(oracle.anchors[1]["norm.bias"], start - lr * (d + mu * d), rtol=1e-12)


def test_what_a_dead_replica_brought_counts_if_others_committed_it() -> None:
    events = {0: life(0), 1: life(1)[:-2]}
    assert Oracle(SPEC, events).read == {0: [800, 8], 1: [2400, 8]}


def test_a_participant_that_brought_nothing_is_found() -> None:
    with pytest.raises(Inconsistent, match="replica 1 is in outer step 2"):
        Oracle(SPEC, {0: life(0), 1: life(1)[:2]})


def changed(slot: int, index: int, **fields: Any) -> dict[int, list[Record]]:
    events = {s: life(s) for s in (0, 1)}
    events[slot][index] = {**events[slot][index], **fields}
    return events


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        (changed(1, 3, anchor_hash="else"), "different anchors at outer step 2"),
        (changed(1, 3, participants=[1]), r"says that \[1\] committed outer step 2"),
        (changed(1, 3, tokens=0), r"replica 1\.0 trained 2400 tokens and gave 1200"),
        (changed(1, 4, event="nothing"), "replica 1 did not finish"),
        (changed(1, 4, positions=[[0, 0, 0, 0]] * 4), "replica 1 has other data positions"),
    ],
)
def test_a_log_that_is_wrong_is_found(events: dict[int, list[Record]], complaint: str) -> None:
    assert any(re.search(complaint, reason) for reason in faults_of(SPEC, account(events=events)))


def test_a_state_that_is_wrong_is_found() -> None:
    states = account().states
    states[1, 0] = {**states[1, 0], "0.anchor": states[1, 0]["0.anchor"] + np.float32(0.01)}
    reasons = faults_of(SPEC, account(states=states))
    assert any("is off by" in reason for reason in reasons)
    assert any("is not the same on replicas 0 and 1" in reason for reason in reasons)


def test_only_who_was_struck_may_die() -> None:
    end = End(slot=1, rank=0, incarnation=0, exit_code=-9)
    assert any("nothing struck it" in reason for reason in faults_of(SPEC, account(ends=(end,))))
    events = {slot: life(slot) for slot in (0, 1)}
    events[1].append({"event": "fault_injected", "incarnation": 0, "fault": "1.0@2/vote:kill"})
    assert faults_of(SPEC, account(ends=(end,), events=events)) == []


def test_positions_are_counted_from_what_is_committed() -> None:
    positions = Positions(1, 2)
    for _ in range(3):
        positions.read(10)
    positions.commit(positions.progress())
    positions.read(10)
    assert read_by(positions.committed.tolist(), 1) == (30, 3)
    assert int(positions.progress().sum()) == 11
    positions.restore(positions.committed.tolist())
    assert int(positions.progress().sum()) == 0


def test_a_seed_decides_the_fault() -> None:
    drawn = [draw("joiner", seed) for seed in range(20)]
    assert drawn == [draw("joiner", seed) for seed in range(20)]
    assert len({str(spec.faults[0]) for spec in drawn}) > 10
    assert all(spec.faults[0].replica not in spec.late for spec in drawn)
    assert set(FAMILIES) == {"plain", "fsdp", "fragments", "joiner"}


def test_trials_are_gone_on_with(tmp_path: Path) -> None:
    fault = str(FaultSpec(replica=0, rank=0, step=3, kind="kill"))
    passed = Trial(kind="plain", seed=0, fault=fault, wall_s=1.0, counts={"retries": 2, "doubts": 1}, reasons=())
    failed = replace(passed, seed=1, reasons=("it had not ended",))
    trials = Trials(tmp_path / "worlds.jsonl")
    trials.add(passed)
    trials.add(failed)
    trials.close()
    again = Trials(tmp_path / "worlds.jsonl")
    assert (again.get("plain", 0), again.get("plain", 1), again.get("fsdp", 0)) == (passed, failed, None)
    again.close()
    summary = sum_up([passed, failed], "families")
    assert (summary["runs"], summary["passed"]) == (2, 1)
    assert summary["failed"] == {"plain 1": [fault, "it had not ended"]}
