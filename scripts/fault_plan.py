"""Which faults strike a run, where and when: drawn by chance, and the same again for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.config import FaultSpec

EARLIEST_STEP = 25
"""The first fault comes when training is under way, not while the processes still warm up."""


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The faults of one run, in the order of their steps."""

    faults: tuple[FaultSpec, ...]
    steps: int
    """Inner steps of the run: the last replica that is struck has time to come back."""


def draw_plan(
    chance: random.Random,
    kinds: Sequence[str],
    *,
    replicas: int,
    ranks: int,
    gap_steps: int,
    first_step: int = EARLIEST_STEP,
) -> FaultPlan:
    """One fault of each of ``kinds``, in an order and at places that ``chance`` decides.

    The replica struck last may still be away when the next fault comes, so another one is struck; of those the one
    that was struck least often, so that no replica uses up its restarts while others keep theirs.

    Args:
        ranks: processes of each replica.
        gap_steps: least steps from one fault to the next, enough for a replica to come back; chance adds up to a third.
        first_step: least steps before the first one.

    Raises:
        ValueError: a run of fewer than two replicas cannot heal anybody.
    """
    if replicas < 2:
        raise ValueError("a replica that is struck needs a peer to get its state from: take 2 replicas or more")
    spread = gap_steps // 3
    order = list(kinds)
    chance.shuffle(order)
    faults: list[FaultSpec] = []
    struck = [0] * replicas
    last: int | None = None
    step = first_step + chance.randint(0, spread)
    for kind in order:
        allowed = [replica for replica in range(replicas) if replica != last]
        fewest = min(struck[replica] for replica in allowed)
        last = chance.choice([replica for replica in allowed if struck[replica] == fewest])
        struck[last] += 1
        faults.append(FaultSpec(replica=last, rank=chance.randrange(ranks), step=step, kind=kind))
        step += gap_steps + chance.randint(0, spread)
    # Nobody can come back once the others have finished, so the last one gets more time than any other.
    return FaultPlan(faults=tuple(faults), steps=step + spread)
