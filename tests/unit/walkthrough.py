"""The log of one small run, for the tests of everything that reads logs.

Three replicas train 60 steps and sync every 20; replica 0 is killed at step 25, goes on in its warm standby and comes
back with the state of replica 1.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_train.events import LineFile, Record

START = 1000.0


def event(after: float, name: str, replica: int | None = None, incarnation: int = 0, /, **fields: Any) -> Record:
    """An event, `after` seconds from the start of the run."""
    where = {} if replica is None else {"replica": replica, "incarnation": incarnation}
    return {"t": START + after, "event": name, **where, **fields}


def states(after: float, replica: int, incarnation: int, *path: str) -> list[Record]:
    return [event(after, "replica_state", replica, incarnation, **{"from": a, "to": b}) for a, b in pairwise(path)]


def sync(
    after: float, replica: int, outer_step: int, members: list[int], wait_s: float, incarnation: int = 0
) -> Record:
    return event(
        after,
        "sync_committed",
        replica,
        incarnation,
        outer_step=outer_step,
        inner_step=20 * outer_step,
        participants=members,
        tokens=100,
        wait_s=wait_s,
        reduce_s=0.1,
        bytes=4096,
        anchor_hash=f"anchor-{outer_step}",
    )


def metrics(after: float, replica: int, step: int, loss: float | None, incarnation: int = 0) -> Record:
    return {
        "t": START + after,
        "replica": replica,
        "incarnation": incarnation,
        "step": step,
        "outer_step": step // 20,
        "loss": loss,
        "grad_norm": 1.25,
        "lr": 1e-3,
        "tokens": 5 * step,
        "tps": 1234.5,
    }


def events() -> list[Record]:
    """Every event in the order of its time."""
    everybody, survivors = [0, 1, 2], [1, 2]
    log = [
        event(
            0.0,
            "run_started",
            replicas=3,
            config_digest="d1",
            steps=60,
            procs_per_replica=1,
            name="tiny",
            run_dir="outputs/tiny",
        )
    ]
    for r in everybody:
        log += states(0.1, r, 0, "PENDING", "STARTING")
        log.append(event(0.5, "procs_started", r, pids=[100 + r], standby=False))
    for r in everybody:
        log.append(event(4.0, "replica_ready", r))
        log += states(4.0, r, 0, "STARTING", "JOINING")
    for r in everybody:
        log += states(5.0, r, 0, "JOINING", "RUNNING")
    log += [event(5.2, "first_step", r, inner_step=1) for r in everybody]
    log.append(event(5.5, "standby_started", 0, pids=[200]))
    log.append(event(6.7, "standby_ready", 0, duration_s=1.5))
    log += [event(6.9, "quorum_changed", r, quorum_id=1, participants=everybody) for r in everybody]
    log += [sync(7.0, r, 1, everybody, 0.2) for r in everybody]

    log.append(event(8.0, "fault_injected", 0, rank=0, kind="kill", point="step", spec="0.0@25:kill"))
    log.append(event(8.2, "failure_detected", 0, cause="signal", signal="SIGKILL", detect_s=0.2, rank=0, step=25))
    log += states(8.2, 0, 0, "RUNNING", "BACKOFF")
    log.append(event(8.2, "restart_scheduled", 0, 1, level="restart_in_place", delay_s=0.0))
    log += states(8.3, 0, 1, "BACKOFF", "STARTING")
    log.append(event(8.5, "procs_started", 0, 1, pids=[200], standby=True))

    log += [event(9.9, "quorum_changed", r, quorum_id=2, participants=survivors) for r in survivors]
    log += [sync(10.0, 1, 2, survivors, 1.5), sync(10.0, 2, 2, survivors, 1.4)]

    log.append(event(11.0, "replica_ready", 0, 1))
    log += states(11.0, 0, 1, "STARTING", "JOINING", "HEALING")
    log.append(event(11.1, "donor_selected", 0, 1, donors=[1], outer_step=2))
    log.append(event(11.1, "heal_started", 0, 1))
    log.append(
        event(
            11.6,
            "heal_finished",
            0,
            1,
            donors=[1],
            outer_step=2,
            bytes=12_300_000,
            duration_s=0.5,
            state_hash="anchor-2",
        )
    )
    log += states(11.6, 0, 1, "HEALING", "JOINING")
    log.append(event(11.8, "first_step", 0, 1, inner_step=41))
    log.append(event(12.9, "joined", 0, 1, outer_step=2, inner_step=60))
    log += [event(12.9, "quorum_changed", r, quorum_id=3, participants=everybody) for r in survivors]
    log.append(event(12.9, "quorum_changed", 0, 1, quorum_id=3, participants=everybody))
    log += states(12.9, 0, 1, "JOINING", "RUNNING")
    log += [sync(13.0, 0, 3, everybody, 0.0, incarnation=1)]
    log += [sync(13.0, 1, 3, everybody, 0.05), sync(13.0, 2, 3, everybody, 0.04)]

    for r in everybody:
        log.append(event(13.5, "replica_finished", r, int(r == 0), tokens=100 if r == 0 else 300))
        log += states(13.5, r, int(r == 0), "RUNNING", "SUCCEEDED")
    log.append(event(13.8, "checkpoint_saved", outer_step=3, path="outputs/tiny/last", duration_s=0.2))
    log.append(event(14.0, "run_finished", status="succeeded", inner_step=60, outer_step=3, loss=5.25))
    return log


def metrics_records() -> list[Record]:
    return [
        *(metrics(5.2, r, 1, 8.0 + r / 10) for r in (0, 1, 2)),
        *(metrics(7.0, r, 20, 7.0) for r in (0, 1, 2)),
        *(metrics(10.0, r, 40, 6.0) for r in (1, 2)),
        metrics(13.0, 0, 60, 5.4, incarnation=1),
        *(metrics(13.0, r, 60, 5.1) for r in (1, 2)),
    ]


def write(run_dir: Path, upto: float = float("inf")) -> Path:
    """A run folder as it was `upto` seconds after the start."""
    for name, records in (("events.jsonl", events()), ("metrics.jsonl", metrics_records())):
        lines = LineFile(run_dir / name)
        for record in records:
            if record["t"] <= START + upto:
                lines.append(record)
        lines.close()
    return run_dir
