"""Trials of durable snapshots whose writers die."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.durable_plan import Phase, draw
from scripts.durable_scene import Scene
from scripts.trials import Trial

RESULTS = "durable.jsonl"


def make(trouble: str, seed: int, folder: Path, *, keep: bool) -> Trial:
    """Make the trial of that seed, in a folder of its own, which stays if it fails.

    It counts snapshots that were found and loaded (``loaded``), those that were passed over (``passed_over``), and
    deaths by phase (``died_in_<phase>``).
    """
    here = folder / f"{trouble}_{seed}"
    # A trial that was interrupted has left its folder.
    shutil.rmtree(here, ignore_errors=True)
    plan = draw(trouble, seed)
    account = Scene(plan, here).run()
    if not account.reasons and not keep:
        shutil.rmtree(here, ignore_errors=True)
    deaths = [look.died for look in account.looks if look.died is not None and not look.damaged]
    return Trial(
        kind=trouble,
        seed=seed,
        fault=str(plan),
        wall_s=round(account.wall_s, 1),
        counts={
            "loaded": sum(look.found.step > 0 for look in account.looks),
            "passed_over": sum(len(look.found.passed) for look in account.looks if look.found.step),
            **{f"died_in_{phase.value}": deaths.count(phase) for phase in Phase},
        },
        reasons=account.reasons,
    )
