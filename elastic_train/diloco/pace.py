"""How many inner steps each replica trains until the next sync, so that fast and slow ones arrive together."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quotas(step_s: Sequence[float], interval: int) -> list[int]:
    """Inner steps of each replica in the next interval, in the order of ``step_s``.

    All train for the same time ``T``, chosen so that together they train as many steps as if each trained
    ``interval``: ``T = interval * n / sum(1 / step_s)``, and a quota is ``T / step_s``, rounded, at least 1.

    Args:
        step_s: seconds per inner step; 0 where none was measured, which counts as the mean speed.
        interval: inner steps of a replica of mean speed.

    Raises:
        ValueError: ``interval`` < 1, or a time that is negative or not finite.
    """
    if interval < 1:
        raise ValueError(f"an interval has at least one inner step, not {interval}")
    if not all(0 <= s < math.inf for s in step_s):
        raise ValueError(f"no times of a step: {list(step_s)}")
    speeds = [1 / s for s in step_s if s > 0]
    if not speeds:
        return [interval] * len(step_s)
    mean = math.fsum(speeds) / len(speeds)
    return [max(1, round(interval / (s * mean))) if s > 0 else interval for s in step_s]
