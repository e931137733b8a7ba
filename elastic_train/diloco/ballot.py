"""The vote on a candidate: every member that counts must hold complete data, and the same result of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from elastic_train.diloco.metadata import Standing, majority

WIDTH = 2
"""Integers in a vote."""


class Choice(IntEnum):
    """What a replica votes. The numbers travel."""

    NO = 0
    """Its data is not complete on every rank."""
    YES = 1
    """All its ranks hold complete data and the candidate."""
    ABSTAIN = 2
    """It has no candidate, and none is asked of it: its standing is not OK."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One replica's vote."""

    choice: Choice
    candidate: int = 0
    """Hash of the candidate over all its ranks, a signed 64-bit integer; meaningless unless it votes yes."""

    def to_ints(self) -> list[int]:
        """The vote as ``WIDTH`` signed 64-bit integers."""
        return [int(self.choice), self.candidate]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> Vote:
        """The vote that ``to_ints`` gave.

        Raises:
            ValueError: not ``WIDTH`` integers, or no choice.
        """
        if len(values) != WIDTH:
            raise ValueError(f"a vote has {WIDTH} integers, not {len(values)}")
        return cls(choice=Choice(values[0]), candidate=values[1])


class Result(Enum):
    """What a complete vote says."""

    PASSED = "passed"
    REFUSED = "refused"
    """Somebody whose vote counts did not vote yes, or nobody's counts."""
    MISMATCH = "mismatch"
    """All voted yes, for candidates that are not the same."""


def count(votes: Sequence[Vote], standings: Sequence[Standing]) -> Result:
    """Count the votes of the members whose standing is OK, in whatever order the two sequences share.

    Raises:
        ValueError: sequences of different lengths.
    """
    counted = [vote for vote, standing in zip(votes, standings, strict=True) if standing is Standing.OK]
    if not counted or any(vote.choice is not Choice.YES for vote in counted):
        return Result.REFUSED
    return Result.PASSED if len({vote.candidate for vote in counted}) == 1 else Result.MISMATCH


def minority(votes: Sequence[Vote], slots: Sequence[int]) -> frozenset[int]:
    """The slots that voted yes for another candidate than most; on a tie, all that differ from the lowest slot.

    Raises:
        ValueError: sequences of different lengths.
    """
    yes = [(vote.candidate, slot) for vote, slot in zip(votes, slots, strict=True) if vote.choice is Choice.YES]
    if not yes:
        return frozenset()
    accepted = majority([candidate for candidate, _ in yes], [slot for _, slot in yes])
    return frozenset(slot for candidate, slot in yes if candidate != accepted)
