"""The position in the data as a value that can be stored, exchanged, compared and replayed.

Positions of all virtual shards travel with the model's state, so a replica's place in the data outlives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

COLUMNS = 4


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where the next sample of a virtual shard begins."""

    epoch: int = 0
    """Passes over the shard that lie behind."""

    document: int = 0
    """Index in this epoch's order of the shard's documents; their number at the end of the epoch."""

    offset: int = 0
    """Tokens of that document that lie behind."""

    samples: int = 0
    """Samples taken from the shard since the start of the run."""


class PositionTable:
    """The positions of all virtual shards of a dataset. Immutable; int64 ``[virtual_shards, 4]`` inside."""

    __slots__ = ("_rows",)

    def __init__(self, rows: torch.Tensor) -> None:
        """Copies ``rows``, int64 ``[virtual_shards, 4]``.

        Raises:
            ValueError: another type or shape, or a negative number.
        """
        if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != COLUMNS:
            given = f"{rows.dtype} {list(rows.shape)}"
            raise ValueError(f"positions are int64 [virtual_shards, {COLUMNS}], not {given}")
        if bool((rows < 0).any()):
            raise ValueError("a position is negative: a shard's progress was counted more than once")
        self._rows = rows.detach().to("cpu", copy=True)

    @classmethod
    def start(cls, virtual_shards: int) -> PositionTable:
        """Nothing read yet."""
        return cls(torch.zeros(virtual_shards, COLUMNS, dtype=torch.int64))

    @classmethod
    def from_list(cls, rows: Sequence[Sequence[int]]) -> PositionTable:
        """The inverse of ``to_list``."""
        return cls(torch.tensor(rows, dtype=torch.int64).reshape(-1, COLUMNS))

    def to_list(self) -> list[list[int]]:
        """Plain integers, one row a shard."""
        return [[int(value) for value in row] for row in self._rows.tolist()]

    @property
    def rows(self) -> torch.Tensor:
        """A copy, int64 ``[virtual_shards, 4]``: epoch, document, offset, samples."""
        return self._rows.clone()

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __getitem__(self, shard: int) -> ShardPosition:
        return ShardPosition(*self._rows[shard].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionTable) and torch.equal(self._rows, other._rows)

    def __hash__(self) -> int:
        return hash(self._rows.numpy().tobytes())

    def __repr__(self) -> str:
        return f"PositionTable({self.to_list()})"

    def replace(self, positions: Mapping[int, ShardPosition]) -> PositionTable:
        """This table with the given shards elsewhere."""
        rows = self.rows
        for shard, position in positions.items():
            rows[shard] = torch.tensor(astuple(position), dtype=torch.int64)
        return PositionTable(rows)

    def delta(self, since: PositionTable) -> torch.Tensor:
        """What has to be added to ``since`` to get here: int64 ``[virtual_shards, 4]``, 0 where none moved.

        Deltas of readers that moved different shards add up: their sum is what a sync exchanges.

        Raises:
            ValueError: the tables have different numbers of shards.
        """
        self._check_size(len(since))
        return self._rows - since._rows

    def plus(self, delta: torch.Tensor) -> PositionTable:
        """The table that ``delta``, a sum of deltas since this one, leads to.

        Raises:
            ValueError: another number of shards, or the result is no position.
        """
        self._check_size(delta.shape[0])
        return PositionTable(self._rows + delta.to("cpu"))

    def _check_size(self, shards: int) -> None:
        if shards != len(self):
            raise ValueError(
                f"positions of {shards} virtual shards do not fit a table of {len(self)}: "
                "training.dataloader.virtual_shards must stay what it was when the run began"
            )
