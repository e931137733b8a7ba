"""The control group of a replica: how its ranks decide as one.

A gloo group beside the one that FSDP uses. Its failure means that a rank of this replica is gone, which is the
death of the replica: callers let the error end the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


class ReplicaBroken(RuntimeError):
    """The ranks of this replica cannot reach each other any more; the replica must restart as a whole."""


class Word:
    """What rank 0 says, on its way to the other ranks."""

    def __init__(self, row: torch.Tensor, work: dist.Work | None) -> None:
        self._row = row
        self._work = work

    def heard(self) -> list[int]:
        """The row, once it is here.

        Raises:
            ReplicaBroken: rank 0 is gone.
        """
        if self._work is not None:
            with _broken_if_it_fails():
                self._work.wait()
        return [int(value) for value in self._row.tolist()]


class ControlGroup:
    """Small exchanges between the ranks of one replica. Every rank calls each in the same order.

    Every method raises :class:`ReplicaBroken` when a rank does not answer within the timeout. A replica of one
    rank exchanges nothing.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._aborted = False
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of int64, in rank order. All rows have the same length."""
        self._check()
        if self.ranks == 1:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.ranks)]
        with _broken_if_it_fails():
            dist.all_gather(rows, mine, group=self._group)
        return [row.tolist() for row in rows]

    def all(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        return all(row[0] for row in self.gather([int(holds)]))

    def any(self, holds: bool) -> bool:
        """Whether something holds on any rank."""
        return any(row[0] for row in self.gather([int(holds)]))

    def word(self, row: Sequence[int]) -> Word:
        """Let rank 0 tell its ``row`` of int64 to all, without waiting. The others' rows give only the length."""
        self._check()
        tensor = torch.tensor(row, dtype=torch.int64)
        if self.ranks == 1:
            return Word(tensor, None)
        with _broken_if_it_fails():
            return Word(tensor, dist.broadcast(tensor, src=0, group=self._group, async_op=True))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over the ranks, as a new host tensor."""
        self._check()
        total = tensor.clone()
        if self.ranks > 1:
            with _broken_if_it_fails():
                dist.all_reduce(total, group=self._group)
        return total

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum(torch.zeros(1))

    def abort(self) -> None:
        """Break the group, as a failing network does; every later exchange fails."""
        self._aborted = True

    def _check(self) -> None:
        if self._aborted:
            raise ReplicaBroken("the control group of this replica was aborted")


@contextmanager
def _broken_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ReplicaBroken(f"the control group of this replica failed: {error}") from error
