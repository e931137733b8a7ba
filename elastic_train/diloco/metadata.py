"""What the members of a quorum tell each other before they exchange data, and who of them takes part in the average.

Every member gets the same rows in the same order, so each judges all of them by itself and comes to the same end.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

WIDTH = 15
"""Integers in a row."""

_Value = TypeVar("_Value", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One replica's metadata of one attempt. Hashes and digests are signed 64-bit integers."""

    outer_step: int
    """Committed syncs in its anchor."""
    tokens: int
    """Trained on in this interval; for the log."""
    weight_tokens: int
    """Trained on since this sync's fragment was last averaged; what it weighs by."""
    finite: bool
    """No NaN and no infinity in its pseudo-gradient, on all ranks."""
    state_hash: int
    """Of its anchor and momentum, over all ranks."""
    slot: int
    incarnation: int
    step_us: int
    """Microseconds per inner step; 0 if not measured."""
    config_digest: int
    layout_digest: int
    """Of the names, shapes and order of what is exchanged."""
    id_base: int
    """The highest quorum id seen before the Lighthouse last began again."""
    loss: float
    """Mean of the interval; NaN if there is none."""
    grad_norm: float
    """Mean of the interval; NaN if there is none."""
    inner_steps: int
    """Trained in this interval."""
    retired: int
    """How many slots it knows to be given up for good, of a list that all hear in the same order."""

    def to_ints(self) -> list[int]:
        """The row as ``WIDTH`` signed 64-bit integers."""
        return [
            self.outer_step,
            self.tokens,
            self.weight_tokens,
            int(self.finite),
            self.state_hash,
            self.slot,
            self.incarnation,
            self.step_us,
            self.config_digest,
            self.layout_digest,
            self.id_base,
            float_bits(self.loss),
            float_bits(self.grad_norm),
            self.inner_steps,
            self.retired,
        ]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> Row:
        """The row that ``to_ints`` gave.

        Raises:
            ValueError: not ``WIDTH`` integers.
        """
        if len(values) != WIDTH:
            raise ValueError(f"a row of metadata has {WIDTH} integers, not {len(values)}")
        return cls(
            outer_step=values[0],
            tokens=values[1],
            weight_tokens=values[2],
            finite=bool(values[3]),
            state_hash=values[4],
            slot=values[5],
            incarnation=values[6],
            step_us=values[7],
            config_digest=values[8],
            layout_digest=values[9],
            id_base=values[10],
            loss=float_of(values[11]),
            grad_norm=float_of(values[12]),
            inner_steps=values[13],
            retired=values[14],
        )


class Standing(Enum):
    """What a member is to the others in this attempt."""

    OK = "ok"
    """It counts in the average, and its vote counts."""
    BEHIND = "behind"
    """Its anchor is older than the newest; it takes a peer's state."""
    NON_FINITE = "non_finite"
    """Its anchor is right, but its pseudo-gradient is not a number; it heals."""
    DIVERGED = "diverged"
    """Its anchor is not the one that the others have at the same outer step; it heals."""
    FOREIGN = "foreign"
    """It runs another config or another model, so its numbers mean something else."""


def judge(rows: Sequence[Row]) -> list[Standing]:
    """The standing of each member, in the order of ``rows``. The same on every member; the first that applies:

    FOREIGN by config and layout, BEHIND the newest of the rest, DIVERGED from most of the newest, NON_FINITE, OK.
    Where two opinions have the same number of members, that of the lowest slot holds.
    """
    if not rows:
        return []
    kinds = [(row.config_digest, row.layout_digest) for row in rows]
    kind = majority(kinds, [row.slot for row in rows])
    home = [row for row in rows if (row.config_digest, row.layout_digest) == kind]
    newest = max(row.outer_step for row in home)
    newest_rows = [row for row in home if row.outer_step == newest]
    state = majority([row.state_hash for row in newest_rows], [row.slot for row in newest_rows])

    def standing(row: Row) -> Standing:
        if (row.config_digest, row.layout_digest) != kind:
            return Standing.FOREIGN
        if row.outer_step < newest:
            return Standing.BEHIND
        if row.state_hash != state:
            return Standing.DIVERGED
        return Standing.OK if row.finite else Standing.NON_FINITE

    return [standing(row) for row in rows]


def majority(values: Sequence[_Value], slots: Sequence[int]) -> _Value:
    """The value that most members have; of equally frequent ones that of the lowest slot.

    Raises:
        ValueError: no members, or sequences of different lengths.
    """
    counts = Counter(values)
    value, _ = min(zip(values, slots, strict=True), key=lambda opinion: (-counts[opinion[0]], opinion[1]))
    return value


def float_bits(value: float) -> int:
    """A float as the signed 64-bit integer that carries it."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def float_of(bits: int) -> float:
    """The float that ``float_bits`` gave."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
