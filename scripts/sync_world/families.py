"""One fault in a world: at a point, of a kind, on a rank and at an outer step that a seed decides."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from elastic_train.config import FaultSpec
from elastic_train.config.faults import POINTS
from scripts.sync_world.spec import WorldSpec, brisk

KINDS = ("kill", "stop", "comms")

FAMILIES: Mapping[str, WorldSpec] = {
    "plain": WorldSpec(steps=300),
    "fsdp": WorldSpec(ranks=2, steps=120, diloco=brisk(sync_every=4)),
    "fragments": WorldSpec(steps=300, diloco=brisk(fragments=2, overlap_steps=2)),
    "joiner": WorldSpec(steps=300, diloco=brisk(fragments=2)),
}
"""Worlds by name; in a world of "joiner" another replica comes in when the fault strikes, in mid-cycle."""

_FIRST_OUTER_STEP, _LAST_OUTER_STEP = 3, 8
_LONGEST_LAG_S = 0.004


def draw(family: str, seed: int) -> WorldSpec:
    """The world of that seed."""
    chance, spec = random.Random(f"{family} {seed}"), FAMILIES[family]
    fault = FaultSpec(
        replica=chance.randrange(spec.replicas),
        rank=chance.randrange(spec.ranks),
        step=chance.randint(_FIRST_OUTER_STEP, _LAST_OUTER_STEP),
        point=chance.choice(POINTS),
        kind=chance.choice(KINDS),
    )
    late = {}
    if family == "joiner":
        joiner = chance.choice([slot for slot in range(spec.replicas) if slot != fault.replica])
        late = {joiner: fault.step + chance.randint(-1, 1)}
    # Half of the kills strike within an exchange that follows the point.
    lag_s = chance.choice((0.0, chance.uniform(0.0, _LONGEST_LAG_S)))
    return dataclasses.replace(spec, faults=(fault,), lag_s=lag_s, late=late)
