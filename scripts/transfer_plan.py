"""What a trial of transfers is: who gives, who joins, what strikes them and when, all drawn from a seed; and what may
come of it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TROUBLES: Mapping[str, str] = {
    "kill": "a donor is killed",
    "stop": "a donor is stopped",
    "primary": "the donor that the first joiner takes for its primary is killed",
    "most": "all donors but one are killed",
    "retire": "a donor writes a section anew",
    "flip": "one bit of a tensor is flipped on the way",
    "mislead": "one bit of a manifest is flipped on the way",
    "publish": "every donor publishes the next outer step",
    "overtake": "a donor publishes the next two outer steps, and keeps two",
    "strangers": "strangers crowd the donors' ports",
}
"""By name; each strikes in the middle of the transfers."""

INNER, OUTER = "inner", "outer"

OUTER_STEP = 7
"""The one that is wanted."""

_MOST = 3
_LEAST_MIB, _MOST_MIB = 8, 64
_FRACTIONS = (0.1, 0.5, 0.9)
_ON_THE_WAY = ("flip", "mislead")
_IN_MANIFESTS = 6000
"""Bytes: no more than two manifests have."""
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One trial."""

    trouble: str
    seed: int
    donors: int
    """Their slots count from 0."""
    orders: tuple[tuple[int, ...], ...]
    """For each joiner: the donors that it begins with. It hears of the others when it has lost one."""
    mib: int
    """Of the state, about."""
    fraction: float
    """Of the bytes of all joiners, when the trouble strikes."""
    struck: tuple[int, ...] = ()
    """Donors that cannot be relied on from then on."""
    section: str = ""
    """Which one is written anew."""
    manifest_byte: int = 0
    """Bytes of manifests that are passed on unharmed."""

    def __str__(self) -> str:
        joiners = f"{len(self.orders)} joiner{'s' if len(self.orders) > 1 else ''}"
        donors = f"{self.donors} donor{'s' if self.donors > 1 else ''}"
        details = [f"{joiners}, {donors}, {self.mib} MiB"]
        if self.trouble == "mislead":
            details.append(f"at byte {self.manifest_byte} of the manifests")
        else:
            details.append(f"at {self.fraction:.0%}")
        if self.struck:
            details.append(f"on {', '.join(map(str, self.struck))}")
        return ", ".join([*details, self.section] if self.section else details)


def draw(trouble: str, seed: int) -> Plan:
    """The trial of that seed."""
    chance = random.Random(f"{trouble} {seed}")
    donors = chance.randint(2 if trouble == "most" else 1, _MOST)
    orders = tuple(
        tuple(chance.sample(range(donors), chance.randint(1, donors))) for _ in range(chance.randint(1, _MOST))
    )
    struck: tuple[int, ...] = ()
    match trouble:
        case "kill" | "stop" | "retire" | "overtake":
            struck = (chance.randrange(donors),)
        case "primary":
            struck = orders[0][:1]
        case "most":
            struck = tuple(sorted(chance.sample(range(donors), donors - 1)))
    return Plan(
        trouble=trouble,
        seed=seed,
        donors=donors,
        orders=orders,
        mib=chance.randint(_LEAST_MIB, _MOST_MIB),
        fraction=chance.choice(_FRACTIONS),
        struck=struck,
        section=chance.choice((INNER, OUTER)) if trouble == "retire" else "",
        manifest_byte=chance.randrange(_IN_MANIFESTS) if trouble == "mislead" else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a donor has of the outer step that is wanted."""

    address: str
    header: Mapping[str, object]
    hashes: Mapping[str, int]
    """By section."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the transfer of one joiner ended."""

    error: str = ""
    """What it raised; empty: the state arrived."""
    failed: bool = False
    """It was a TransferFailed."""
    primary: int = -1
    """Slot of the donor that it has the header and the inner section from."""
    header: Mapping[str, object] | None = None
    hashes: Mapping[str, int] | None = None
    told: bool = False
    """The primary has heard that the state arrived."""
    lost: tuple[int, ...] = ()
    """Donors that it had to do without before it was there."""
    refetched: int = 0
    """Bytes."""
    threads: tuple[str, ...] = ()
    """Those that were left when it had ended."""


def judge(plan: Plan, held: Sequence[Held], endings: Mapping[int, Ending]) -> list[str]:
    """Everything that is wrong, one sentence each.

    Args:
        held: by slot.
        endings: by joiner; one that is not there did not end.
    """
    found: list[str] = []
    failed = [number for number, ending in endings.items() if ending.error]
    for number, _ in enumerate(plan.orders):
        if (ending := endings.get(number)) is None:
            found.append(f"joiner {number} did not end")
            continue
        found += [f"joiner {number} {complaint}" for complaint in _complaints(plan, held, ending)]
    if plan.trouble in _ON_THE_WAY:
        # It strikes one joiner on the way from one donor.
        if len(failed) > (plan.donors == 1):
            found.append(f"one bit was flipped, and {len(failed)} joiners failed: {endings[failed[0]].error}")
        if plan.trouble == "flip" and not failed and not any(ending.refetched for ending in endings.values()):
            found.append("nobody noticed the flipped bit")
    elif failed and len(plan.struck) < plan.donors:
        found.append(f"joiner {failed[0]} failed with a sound donor at hand: {endings[failed[0]].error}")
    return found


def _complaints(plan: Plan, held: Sequence[Held], ending: Ending) -> list[str]:
    found: list[str] = []
    if ending.threads:
        found.append(f"has left threads behind: {', '.join(ending.threads)}")
    if plan.trouble not in _ON_THE_WAY and (innocent := sorted(set(ending.lost) - set(plan.struck))):
        found.append(f"gave up {innocent}, which nothing had struck")
    if ending.error:
        return found if ending.failed else [*found, f"ended in something else: {ending.error}"]
    if ending.primary not in range(len(held)):
        return [*found, f"has the state of {ending.primary}, which was no donor"]
    if not ending.told and ending.primary not in plan.struck:
        found.append(f"could not tell replica {ending.primary} that the state arrived")
    primary = held[ending.primary]
    if ending.header != primary.header:
        found.append(f"has another header than replica {ending.primary}")
    if ending.hashes != primary.hashes:
        found.append(f"has another state than replica {ending.primary}")
    return found
