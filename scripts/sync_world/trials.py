"""Trials of worlds that take a fault."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.sync_world.checks import faults_of
from scripts.sync_world.families import draw
from scripts.sync_world.world import World
from scripts.trials import Trial

RESULTS = "worlds.jsonl"


def make(family: str, seed: int, folder: Path, *, keep: bool) -> Trial:
    """Make the world of that seed, in a folder of its own, which stays if it fails.

    It counts attempts that failed (``retries``) and doubts.
    """
    here = folder / f"{family}_{seed}"
    # A trial that was interrupted has left its folder.
    shutil.rmtree(here, ignore_errors=True)
    spec = draw(family, seed)
    account = World(spec, here).run()
    events = [record["event"] for records in account.events.values() for record in records]
    reasons = faults_of(spec, account)
    if "fault_injected" not in events:
        reasons.append("the fault did not strike")
    if not reasons and not keep:
        shutil.rmtree(here, ignore_errors=True)
    return Trial(
        kind=family,
        seed=seed,
        fault=str(spec.faults[0]),
        wall_s=round(account.wall_s, 1),
        counts={"retries": events.count("sync_retried"), "doubts": events.count("doubt_settled")},
        reasons=tuple(reasons),
    )
