"""What must hold of a world, whatever struck it. Pure: reads only what the world has left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from elastic_train.config import FaultSpec
from elastic_train.events import Record
from scripts.sync_world.oracle import Inconsistent, Oracle
from scripts.sync_world.positions import read_by
from scripts.sync_world.spec import WorldSpec
from scripts.sync_world.world import Account

_EXACT = 1e-5
_COMPRESSED = {"none": _EXACT, "bf16": 2e-2, "int8": 5e-2, "int4": 0.5}


def faults_of(spec: WorldSpec, account: Account) -> list[str]:
    """Everything that is wrong, one sentence each."""
    found = [account.unfinished] if account.unfinished else []
    found += [f"left behind: {process}" for process in account.left]
    found += _nobody_else_died(account)
    found += _same_anchors(account.events)
    found += _nothing_lost(account.events)
    finished = {
        slot: record
        for slot, records in account.events.items()
        for record in records
        if record["event"] == "replica_finished"
    }
    expected = set(range(spec.replicas)) - spec.foreign
    found += [f"replica {slot} did not finish" for slot in sorted(expected - finished.keys())]
    if not found:
        found += _as_computed_again(spec, account, finished)
    return found


def _nobody_else_died(account: Account) -> Iterator[str]:
    """Only who is struck by a fault that kills may end, and who is refused."""
    for end in account.ends:
        mine = [record for record in account.events[end.slot] if record["incarnation"] == end.incarnation]
        if any(
            record["event"] == "refused" or (record["event"] == "fault_injected" and _kills(record["fault"]))
            for record in mine
        ):
            continue
        why = next((record["error"] for record in mine if record["event"] == "rank_failed"), "")
        yield f"nothing struck it, and it ended: {end} {why}"


def _kills(fault: str) -> bool:
    return FaultSpec.parse(fault).kind in ("kill", "stop")


def _same_anchors(events: dict[int, list[Record]]) -> Iterator[str]:
    """Whoever is at an outer step has the same anchor and momentum, and names the same participants."""
    states: dict[int, tuple[str, str]] = {}
    members: dict[int, Sequence[int]] = {}
    for slot, records in events.items():
        for record in records:
            if "anchor_hash" not in record:
                continue
            step, who = record["outer_step"], f"replica {slot}.{record['incarnation']}"
            other, state = states.setdefault(step, (who, record["anchor_hash"]))
            if state != record["anchor_hash"]:
                yield f"{who} and {other} have different anchors at outer step {step}"
            if (
                record["event"] == "sync_committed"
                and members.setdefault(step, record["participants"]) != (record["participants"])
            ):
                yield f"{who} says that {record['participants']} committed outer step {step}, not {members[step]}"


def _nothing_lost(events: dict[int, list[Record]]) -> Iterator[str]:
    """Replicas that were never unfit have given all that they trained."""
    for slot, records in events.items():
        for incarnation in sorted({record["incarnation"] for record in records}):
            mine = [record for record in records if record["incarnation"] == incarnation]
            names = {record["event"] for record in mine}
            if "replica_finished" not in names or "fenced" in names:
                continue
            given = sum(record["tokens"] for record in mine if record["event"] in ("sync_committed", "caught_up"))
            trained = next(record["tokens"] for record in mine if record["event"] == "replica_finished")
            if given != trained:
                yield f"replica {slot}.{incarnation} trained {trained} tokens and gave {given}"


def _as_computed_again(spec: WorldSpec, account: Account, finished: dict[int, Record]) -> Iterator[str]:
    try:
        oracle = Oracle(spec, account.events)
    except Inconsistent as error:
        yield str(error)
        return
    if len(oracle.anchors) - 1 != spec.schedule.outer_steps:
        yield f"{len(oracle.anchors) - 1} outer steps were committed, not {spec.schedule.outer_steps}"
    allowed = _COMPRESSED[spec.diloco.compression] * oracle.movement
    bits: dict[tuple[int, str], tuple[int, bytes]] = {}
    for (slot, rank), arrays in sorted(account.states.items()):
        expected = oracle.expected(rank)
        for name, array in arrays.items():
            other, same = bits.setdefault((rank, name), (slot, array.tobytes()))
            if same != array.tobytes():
                yield f"{name} of rank {rank} is not the same on replicas {other} and {slot}"
            off = float(np.abs(array - expected[name]).max())
            if not off <= allowed:
                yield f"{name} of rank {rank} of replica {slot} is off by {off:.2e}; {allowed:.2e} is allowed"
    tables = {slot: record["positions"] for slot, record in finished.items()}
    for slot, rows in tables.items():
        if rows != next(iter(tables.values())):
            yield f"replica {slot} has other data positions than replica {next(iter(tables))}"
        for reader, (tokens, samples) in oracle.read.items():
            if read_by(rows, reader) != (tokens, samples):
                given = read_by(rows, reader)
                yield f"replica {slot} has {given} tokens and samples of slot {reader}, not {(tokens, samples)}"
