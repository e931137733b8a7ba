"""Control groups without process groups: of one rank, and of ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from elastic_train.diloco.control import ControlGroup, Word

TIMEOUT_S = 30.0

T = TypeVar("T")


class Alone(ControlGroup):
    """Of a replica of one rank."""

    def __init__(self) -> None:
        self.rank, self.ranks, self._aborted = 0, 1, False


class Together(ControlGroup):
    """Of one of several ranks, which meet in the rows that they share."""

    def __init__(self, rank: int, rows: list[list[int]], here: threading.Barrier) -> None:
        self.rank, self.ranks, self._aborted = rank, len(rows), False
        self._rows, self._here = rows, here

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        self._rows[self.rank] = list(row)
        self._here.wait(TIMEOUT_S)
        rows = list(self._rows)
        self._here.wait(TIMEOUT_S)
        return rows

    def word(self, row: Sequence[int]) -> Word:
        return Word(torch.tensor(self.gather(row)[0], dtype=torch.int64), None)


def together(ranks: int) -> list[ControlGroup]:
    """The control groups of all ranks of one replica."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    here = threading.Barrier(ranks)
    return [Together(rank, rows, here) for rank in range(ranks)]


def each(ranks: int, act: Callable[[int], T]) -> list[T]:
    """Have all ranks act at the same time; their results, or the first failure."""
    with ThreadPoolExecutor(ranks) as pool:
        return [done.result() for done in [pool.submit(act, rank) for rank in range(ranks)]]
