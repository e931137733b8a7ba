"""Trials of transfers of a state under fire."""

from __future__ import annotations

from scripts.transfer_plan import draw
from scripts.transfer_scene import Scene
from scripts.trials import Trial

RESULTS = "transfers.jsonl"


def make(trouble: str, seed: int) -> Trial:
    """Make the trial of that seed.

    It counts joiners, those that failed because no donor was left, as they should (``without_donor``), and bytes that
    the joiners had to fetch again.
    """
    plan = draw(trouble, seed)
    account = Scene(plan).run()
    endings = account.endings.values()
    return Trial(
        kind=trouble,
        seed=seed,
        fault=str(plan),
        wall_s=round(account.wall_s, 1),
        counts={
            "joiners": len(plan.orders),
            "without_donor": sum(bool(ending.error) for ending in endings),
            "refetched_bytes": sum(ending.refetched for ending in endings),
        },
        reasons=account.reasons,
    )
