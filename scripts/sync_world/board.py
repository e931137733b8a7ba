"""A few numbers in memory that all processes of a world share: how far each is, and what the world says to all.

No locks: every number has one writer, and one that is killed cannot leave a lock behind.
"""

from __future__ import annotations

import math
import time
from enum import IntEnum
from multiprocessing.context import BaseContext
from typing import Any

_PAUSE_S = 0.005
_FIELDS = 4
_STAGE, _BEAT, _OUTER_STEP, _PORT = range(_FIELDS)
_RELEASED, _OVER, _GLOBAL = range(3)


class Stage(IntEnum):
    """How far a rank is."""

    BUILDING = 0
    READY = 1
    TRAINING = 2
    FINISHED = 3


class Board:
    """Shared by the processes of one world."""

    def __init__(self, context: BaseContext, replicas: int, ranks: int) -> None:
        self._ranks = ranks
        self._cells: Any = context.RawArray("d", _GLOBAL + replicas * ranks * _FIELDS)

    # -- by a rank

    def enter(self, slot: int, rank: int, stage: Stage) -> None:
        self._set(slot, rank, _STAGE, stage)

    def beat(self, slot: int, rank: int) -> None:
        """It got somewhere."""
        self._set(slot, rank, _BEAT, time.monotonic())

    def wait_for_peers(self, slot: int, rank: int) -> None:
        """From here to the next beat others decide how long it takes."""
        self._set(slot, rank, _BEAT, math.inf)

    def at(self, slot: int, rank: int, outer_step: int) -> None:
        self._set(slot, rank, _OUTER_STEP, outer_step)

    def tell_port(self, slot: int, port: int) -> None:
        """Where rank 0 serves the replica's store."""
        self._set(slot, 0, _PORT, port)

    def port(self, slot: int) -> int:
        """Waits for rank 0."""
        while not (port := int(self._get(slot, 0, _PORT))):
            time.sleep(_PAUSE_S)
        return port

    def wait_for_release(self) -> None:
        while not self._cells[_RELEASED]:
            time.sleep(_PAUSE_S)

    def wait_for_the_end(self) -> None:
        while not self._cells[_OVER]:
            time.sleep(_PAUSE_S)

    # -- by the world

    def clear(self, slot: int, rank: int) -> None:
        """A new process takes that place."""
        self._set(slot, rank, _STAGE, Stage.BUILDING)
        self._set(slot, rank, _BEAT, math.inf)
        self._set(slot, rank, _PORT, 0)

    def stage(self, slot: int, rank: int) -> Stage:
        return Stage(int(self._get(slot, rank, _STAGE)))

    def silence_s(self, slot: int, rank: int) -> float:
        """Seconds since it last got somewhere; below 0 while it waits for others."""
        return time.monotonic() - self._get(slot, rank, _BEAT)

    @property
    def outer_step(self) -> int:
        """The newest that any rank has reached."""
        return int(max(self._cells[_GLOBAL + _OUTER_STEP :: _FIELDS]))

    def release(self) -> None:
        self._cells[_RELEASED] = 1

    def end(self) -> None:
        self._cells[_OVER] = 1

    def _set(self, slot: int, rank: int, field: int, value: float) -> None:
        self._cells[_GLOBAL + (slot * self._ranks + rank) * _FIELDS + field] = value

    def _get(self, slot: int, rank: int, field: int) -> float:
        return float(self._cells[_GLOBAL + (slot * self._ranks + rank) * _FIELDS + field])
