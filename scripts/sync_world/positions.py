"""Where a replica of a world is in its data: each slot reads two shards of its own in turn."""

from __future__ import annotations

import torch

_SHARDS = 2
_OFFSET, _SAMPLES = 2, 3


class Positions:
    """Absolute positions, int64 ``[2 * replicas, 4]``, as ``PositionTable`` has them: what is committed, and own."""

    def __init__(self, slot: int, replicas: int) -> None:
        self._own = slice(_SHARDS * slot, _SHARDS * (slot + 1))
        self.committed = torch.zeros(_SHARDS * replicas, 4, dtype=torch.int64)
        self._here = self.committed[self._own].clone()

    def read(self, tokens: int) -> None:
        """One sample, from the shard of which fewer were taken."""
        row = self._here[int(self._here[:, _SAMPLES].argmin())]
        row[_OFFSET] += tokens
        row[_SAMPLES] += 1

    def progress(self) -> torch.Tensor:
        delta = torch.zeros_like(self.committed)
        delta[self._own] = self._here - self.committed[self._own]
        return delta

    def commit(self, progress: torch.Tensor) -> None:
        """All have read so much."""
        self.committed = self.committed + progress

    def follow(self, rows: list[list[int]]) -> None:
        """A peer's committed positions; own shards stay where they are."""
        self.committed = torch.tensor(rows, dtype=torch.int64)

    def restore(self, rows: list[list[int]]) -> None:
        """A peer's committed positions; own shards go back to them."""
        self.follow(rows)
        self._here = self.committed[self._own].clone()


def read_by(rows: list[list[int]], slot: int) -> tuple[int, int]:
    """Tokens and samples that a slot's shards have given to the model."""
    own = rows[_SHARDS * slot : _SHARDS * (slot + 1)]
    return sum(row[_OFFSET] for row in own), sum(row[_SAMPLES] for row in own)
