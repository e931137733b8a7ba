"""What a trial of durable snapshots is: who writes them, at what moment each writer dies and what befalls the newest
snapshot, all drawn from a seed; and what may come of it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The parts of a write in their order. All but ``TENSORS`` are the leading rank's."""

    LEFTOVERS = "leftovers"
    TENSORS = "tensors"
    METADATA = "metadata"
    CHECKSUMS = "checksums"
    MANIFEST = "manifest"
    RENAME = "rename"
    OLD = "old"


_DEATHS: Mapping[str, str] = {
    "leftovers": "a writer dies while it removes what the last one left half written",
    "tensors": "it dies while the ranks write their tensors",
    "metadata": "it dies while torch lists what the tensors are",
    "checksums": "it dies while the files are read for their checksums",
    "manifest": "it dies while the manifest is written",
    "rename": "it dies right before or after the snapshot is put in its place",
    "old": "it dies while old snapshots are removed",
}
TRUNCATE, FLIP = "truncate", "flip"
TROUBLES: Mapping[str, str] = {
    **_DEATHS,
    TRUNCATE: "a writer dies, and the newest snapshot is cut short",
    FLIP: "a writer dies, and one bit of the newest snapshot is flipped",
}
"""By name."""

RANKS = 2
"""Of the replica that writes."""
INTERVAL = 10
"""Inner steps from one snapshot to the next."""

_MOST_KEPT = 3
_OPERATIONS: Mapping[Phase, int] = {
    Phase.LEFTOVERS: 5,
    Phase.METADATA: 2,
    Phase.CHECKSUMS: 4,
    Phase.MANIFEST: 2,
    Phase.RENAME: 2,
    Phase.OLD: 9,
}
"""File operations of each phase; who is to die at one that does not come dies when the next phase begins. Of the last
phase as many as there are at least."""
_LONGEST_LAG_S = 0.004
_LONGEST_ORPHANAGE_S = 0.15


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a rank dies."""

    phase: Phase
    operation: int
    """It dies before this file operation of the phase, counted from 0."""
    share: float = 0.0
    """Of its tensors' bytes that are in its file by then; in TENSORS, instead of an operation."""
    lag_s: float = 0.0
    """Seconds from there to its death."""
    rank: int = 0
    orphaned_s: float = 0.0
    """Seconds for which the other rank outlives it."""

    def __str__(self) -> str:
        where = f"{self.share:.0%}" if self.phase is Phase.TENSORS else f"operation {self.operation}"
        lag = f" + {1000 * self.lag_s:.1f} ms" if self.lag_s else ""
        return f"rank {self.rank} in {self.phase.value} at {where}{lag}"


@dataclass(frozen=True, kw_only=True)
class Life:
    """One incarnation that writes."""

    slot: int
    incarnation: int
    whole: tuple[int, ...] = ()
    """Steps whose snapshots it writes to the end, one after the other."""
    doomed: int = 0
    """Step of the snapshot in whose writing it dies."""
    death: Moment | None = None
    """None: it ends well."""

    def __str__(self) -> str:
        death = "" if self.death is None else f" dies: {self.death}"
        return f"replica {self.slot}.{self.incarnation}{death}"


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What befalls one file of the newest snapshot."""

    file: float
    """Which of its files, in the order of their names: a share of their number."""
    place: float
    """Where in it: a share of its bytes."""
    bit: int | None
    """The one that is flipped there; None: the file ends there."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One trial: lives, one after the other."""

    trouble: str
    seed: int
    keep: int
    """Snapshots that stay."""
    lives: tuple[Life, ...]
    damage: Damage | None = None
    """After the last death."""

    def __str__(self) -> str:
        return f"keep {self.keep}; {'; '.join(map(str, self.lives))}"

    @property
    def deaths(self) -> int:
        return sum(life.death is not None for life in self.lives)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run that resumes would go on from."""

    step: int
    """0: there is nothing."""
    wrong: tuple[str, ...] = ()
    """What differs from what was written for that step."""
    passed: tuple[str, ...] = ()
    """Why newer ones were passed over."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The folder of the snapshots, after a life or a damage."""

    after: Life
    listed: tuple[int, ...]
    """Steps of the snapshots that are there, whole or not."""
    told: tuple[int, ...]
    """Steps that writers have told of as written, over all lives so far, the oldest first."""
    found: Found
    stagings: tuple[int, ...]
    """Slots of the half written ones."""
    died: Phase | None = None
    """Where the life came to its death."""
    damaged: str = ""
    """The file of the newest one that was damaged just now."""
    illegible: int = 0
    """Step of the one whose manifest was damaged, now or before."""


def draw(trouble: str, seed: int) -> Plan:
    """The trial of that seed."""
    chance = random.Random(f"{trouble} {seed}")
    damaging = trouble in (TRUNCATE, FLIP)
    keep = chance.randint(2 if damaging else 1, _MOST_KEPT)
    phase = chance.choice([each for each in Phase if each is not Phase.LEFTOVERS]) if damaging else Phase(trouble)
    writers = _Writers(chance)
    # Two at least, or nothing sound is left once the newest is damaged; for something old to be there, all that stay.
    before = keep if phase is Phase.OLD else chance.randint(2 if damaging else 0, keep)
    if phase is Phase.LEFTOVERS:
        # Who has begun a file leaves something.
        writers.die(0, before, chance.choice((Phase.METADATA, Phase.CHECKSUMS, Phase.MANIFEST)))
        before = 0
    writers.die(0, before, phase)
    if chance.random() < 0.5:
        writers.die(chance.randrange(2), 0, chance.choice((Phase.TENSORS, Phase.METADATA, Phase.MANIFEST)))
    # Another replica may be the one that writes on, beside what the dead one has left.
    for slot in chance.sample((0, 1), 2):
        writers.write(slot)
    damage = None
    if damaging:
        bit = chance.randrange(8) if trouble == FLIP else None
        damage = Damage(file=chance.random(), place=chance.random(), bit=bit)
    return Plan(trouble=trouble, seed=seed, keep=keep, lives=tuple(writers.lives), damage=damage)


class _Writers:
    """The lives that were drawn so far."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._step = 0
        self.lives: list[Life] = []

    def die(self, slot: int, whole: int, phase: Phase) -> None:
        """One more life, which dies after so many whole snapshots."""
        chance, by_size = self._chance, phase is Phase.TENSORS
        moment = Moment(
            phase=phase,
            operation=0 if by_size else chance.randrange(_OPERATIONS[phase]),
            share=chance.random() if by_size else 0.0,
            lag_s=0.0 if by_size else chance.choice((0.0, 0.0, chance.uniform(0.0, _LONGEST_LAG_S))),
            rank=chance.randrange(RANKS) if by_size else 0,
            orphaned_s=chance.choice((0.0, chance.uniform(0.0, _LONGEST_ORPHANAGE_S))),
        )
        self._add(slot, [self._next() for _ in range(whole)], moment)

    def write(self, slot: int) -> None:
        """One more life, which writes a snapshot and ends well."""
        self._add(slot, [self._next()], None)

    def _add(self, slot: int, whole: Sequence[int], death: Moment | None) -> None:
        incarnation = sum(life.slot == slot for life in self.lives)
        doomed = 0 if death is None else self._next()
        life = Life(slot=slot, incarnation=incarnation, whole=tuple(whole), doomed=doomed, death=death)
        self.lives.append(life)

    def _next(self) -> int:
        self._step += INTERVAL
        return self._step


def judge(plan: Plan, looks: Sequence[Look]) -> list[str]:
    """Everything that is wrong, one sentence each. The looks are in the order of the lives."""
    found: list[str] = []
    for look in looks:
        found += [f"after {look.after}: {complaint}" for complaint in _complaints(look)]
    if looks and looks[-1].after == plan.lives[-1]:
        # Both slots have written once more since the last death.
        last = looks[-1]
        if last.stagings:
            found.append(f"half written snapshots of slots {', '.join(map(str, last.stagings))} are left")
        left = _left({step for look in looks for step in look.listed}, plan.keep, last.illegible)
        if last.listed != left:
            found.append(f"the snapshots of steps {left} should have stayed, and there are {last.listed}")
    return found


def _left(steps: Set[int], keep: int, illegible: int) -> tuple[int, ...]:
    """What should be there once everything old is removed: one whose manifest cannot be read does not count as kept."""
    left: list[int] = []
    for step in sorted(steps, reverse=True):
        if keep <= 0:
            break
        left.append(step)
        keep -= step != illegible
    return tuple(reversed(left))


def _complaints(look: Look) -> list[str]:
    life, found, complaints = look.after, look.found, list(look.found.wrong)
    there = look.listed[:-1] if look.damaged else look.listed
    newest = there[-1] if there else 0
    if found.step != newest:
        names = f"step {found.step}" if found.step else "nothing"
        complaints.append(f"{names} was found and not step {newest}; passed over: {'; '.join(found.passed) or '-'}")
    if look.damaged and not any(look.damaged in text for text in found.passed):
        complaints.append(f"nobody named the damaged file {look.damaged}")
    if there and not look.damaged and found.step == newest and found.passed:
        complaints.append(f"a sound snapshot was passed over: {'; '.join(found.passed)}")
    if look.told and look.told[-1] > max(look.listed, default=0):
        complaints.append(f"the snapshot of step {look.told[-1]} was written and is gone")
    if look.died is Phase.OLD and life.doomed not in look.listed:
        complaints.append(f"old snapshots were removed before that of step {life.doomed} was in its place")
    if life.death is not None and look.died is None:
        complaints.append("it did not die")
    if life.death is None and life.slot in look.stagings:
        complaints.append("what this slot had left half written is still there")
    return complaints
