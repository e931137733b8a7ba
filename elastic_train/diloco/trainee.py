"""What the elastic engine asks of the trainer that it works for, and whom it tells what happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import torch

from elastic_train.peer_ckpt.snapshot import Snapshot


class Source(StrEnum):
    """Where a whole state came from."""

    PEERS = "peers"
    MEMORY = "memory"
    """This rank's own of an earlier incarnation, left on the same host."""


class Trainee(Protocol):
    """The trainer of one rank."""

    def at_point(self, point: str) -> None:
        """A named point of the sync (quorum, reduce, vote, commit, snapshot) is reached; may end the process."""

    def alive(self) -> None:
        """The sync gets somewhere. May be called from another thread than the trainer's."""

    def waiting(self) -> None:
        """A quorum is still being waited for, in the trainer's thread."""

    def progress(self) -> torch.Tensor:
        """int64 ``[virtual_shards, 4]``: what the replica read since the last commit (``PositionTable.delta``),
        the same on all ranks."""

    def moments(self) -> Mapping[str, torch.Tensor]:
        """Live tensors of the inner optimizer, this rank's shards, by name; they change with the next inner step."""

    def counters(self) -> dict[str, Any]:
        """Everything else that a joiner takes over, as JSON has it: step, LR, tokens, RNG, data positions."""

    def take(self, snapshot: Snapshot) -> None:
        """Take over the moments and counters of a peer, and go back to its data positions; from now on those of the
        slots that are retired in its header are read by the others.

        Raises:
            StateMismatch: they do not fit this rank.
        """

    def follow(self, snapshot: Snapshot, *, included: bool) -> None:
        """A peer was ahead: take over its committed data positions, and what it knows of retired slots.

        Args:
            included: what this replica read since its last commit is in them; else it goes on counting it.
        """


class SyncJournal(Protocol):
    """Whom the engine tells. Every rank calls each in the same order; rank 0 writes."""

    def quorum(self, number: int, participants: Sequence[int]) -> None:
        """A quorum and its members (slots) are known."""

    def retried(self, outer_step: int, attempt: int, cause: str, duration_s: float) -> None:
        """An attempt at ``outer_step`` failed, and is made again."""

    def doubt(self, outer_step: int, outcome: str, duration_s: float) -> None:
        """The replica had voted yes and did not see the vote pass; it asked its peers."""

    def fenced(self, cause: str, outer_step: int) -> None:
        """This replica is kept out of the average (cause: non_finite, diverged) and takes a peer's state."""

    def heal_started(self, donors: Sequence[int], outer_step: int) -> None:
        """A state is being fetched from those slots."""

    def transferred(self, received: int, total: int, donors: Mapping[int, int]) -> None:
        """So many bytes of it have come to this rank, and so many from each slot. Each rank speaks for itself."""

    def heal_finished(
        self,
        primary: int,
        donors: Mapping[int, int],
        outer_step: int,
        duration_s: float,
        rank_hash: int,
        source: Source = Source.PEERS,
    ) -> None:
        """It is in place. ``donors`` gave this rank so many bytes each, ``primary`` among them what no other has;
        ``rank_hash`` is of what this rank now holds. From memory they gave none, and confirmed it. Every rank calls."""

    def heal_failed(self, cause: str, error: str) -> None:
        """This replica was kept out of the average for that cause, and got no state; ``error`` is one line."""

    def served(self, outer_step: int, state_hash: int) -> None:
        """A joiner took this rank's state, of that hash. Each rank speaks for itself, from any thread."""

    def joined(self, outer_step: int, step: int) -> None:
        """The replica is in its first quorum since it took a peer's state."""

    def caught_up(self, outer_step: int, tokens: int, donor: int) -> None:
        """It took the outer state of a peer that was ahead; ``tokens`` of its own are already in it."""
