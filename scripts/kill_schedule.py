"""When processes of a training are killed, and which: the same for every training that is to be compared."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL."""

    after_s: float
    """Since the span with faults began."""
    replica: int
    rank: int
    """Within the replica."""


def schedule(seed: int, *, span_s: float, every_s: float, replicas: int, ranks: int) -> tuple[Kill, ...]:
    """A kill at the beginning of the span and at the end of each period before its last, so that as much time follows
    the last as any other. Which process dies is left to chance, whether or not it has come back from its last death.

    Args:
        ranks: processes of each replica.

    Raises:
        ValueError: the span has no whole period.
    """
    periods = int(span_s / every_s)
    if periods < 1:
        raise ValueError(f"{span_s:g} s have no whole period of {every_s:g} s")
    chance = random.Random(seed)
    return tuple(
        Kill(after_s=number * every_s, replica=chance.randrange(replicas), rank=chance.randrange(ranks))
        for number in range(periods)
    )
