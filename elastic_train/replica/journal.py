"""What a replica writes down about quorums, syncs and heals: one voice for all its ranks.

Rank 0 writes. Where it needs the other ranks' part (hashes, donors), every rank calls, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.engine import Sync
from elastic_train.diloco.trainee import Source
from elastic_train.events import EventWriter
from elastic_train.peer_ckpt.shards import combine_hashes

PROGRESS_S = 1.0
"""Between two words on a transfer."""
_DONORS = 16
"""As many, of one rank, are named by what they gave."""


class Journal:
    """The events of one incarnation's membership (``diloco.trainee.SyncJournal``, and what the trainer adds)."""

    def __init__(self, events: EventWriter, control: ControlGroup) -> None:
        self._events = events
        self._control = control
        self._speaks = control.rank == 0
        self._last_quorum: tuple[int, list[int]] | None = None
        self._failures = 0
        self._next_progress = 0.0

    def quorum(self, number: int, participants: Sequence[int]) -> None:
        """A quorum came; written if it is another than the last."""
        quorum = (number, sorted(participants))
        if self._speaks and quorum != self._last_quorum:
            self._events.emit("quorum_changed", quorum_id=number, participants=quorum[1])
        self._last_quorum = quorum

    def committed(self, sync: Sync, *, step: int, anchor_hash: str) -> None:
        """An outer step was committed."""
        self._failures = 0
        if self._speaks:
            self._events.emit(
                "sync_committed",
                outer_step=sync.outer_step,
                inner_step=step,
                participants=list(sync.participants),
                tokens=sync.tokens,
                wait_s=round(sync.wait_s, 4),
                reduce_s=round(sync.reduce_s, 4),
                bytes=sync.bytes,
                loss=sync.loss,
                grad_norm=sync.grad_norm,
                anchor_hash=anchor_hash,
            )

    def failed(self, sync: Sync) -> None:
        """A sync of stock DiLoCo failed; the next interval ends in another."""
        self._failures += 1
        self.retried(sync.outer_step + 1, self._failures, str(sync.cause), sync.wait_s + sync.reduce_s)

    def retried(self, outer_step: int, attempt: int, cause: str, duration_s: float) -> None:
        """An attempt at ``outer_step`` failed, and is made again."""
        if self._speaks:
            self._events.emit(
                "sync_retried",
                outer_step=outer_step,
                attempt=attempt,
                cause="comm_error",
                error=cause,
                duration_s=round(duration_s, 4),
            )

    def doubt(self, outer_step: int, outcome: str, duration_s: float) -> None:
        """The replica had voted yes and did not see the vote pass; it asked its peers."""
        if self._speaks:
            self._events.emit("doubt_settled", outer_step=outer_step, outcome=outcome, duration_s=round(duration_s, 4))

    def fenced(self, cause: str, outer_step: int) -> None:
        """This replica is kept out of the average, and takes a peer's state."""
        if self._speaks:
            self._events.emit("fenced", cause=cause, outer_step=outer_step)

    def caught_up(self, outer_step: int, tokens: int, donor: int) -> None:
        """It took the outer state of a peer that was ahead; ``tokens`` of its own are already in it."""
        if self._speaks:
            self._events.emit("caught_up", outer_step=outer_step, tokens=tokens, donor=donor)

    def heal_started(self, donors: Sequence[int], outer_step: int) -> None:
        """A state is being fetched from those slots."""
        self._next_progress = time.monotonic() + PROGRESS_S
        if self._speaks:
            self._events.emit("donor_selected", donors=list(donors), outer_step=outer_step)
            self._events.emit("heal_started")

    def transferred(self, received: int, total: int, donors: Mapping[int, int]) -> None:
        """So many bytes of it have come to this rank; written for rank 0, now and then while it takes long."""
        if self._speaks and total and time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_S
            self._events.emit("transfer_progress", bytes=received, total_bytes=total, donor_bytes=donors)

    def served(self, outer_step: int, state_hash: int) -> None:
        """This rank gave its state to a joiner. Each rank speaks for itself."""
        self._events.emit("state_served", outer_step=outer_step, state_hash=f"{state_hash:x}")

    def heal_finished(
        self,
        primary: int,
        donors: Mapping[int, int],
        outer_step: int,
        duration_s: float,
        rank_hash: int,
        source: Source = Source.PEERS,
    ) -> None:
        """The state is in place. ``donors`` gave this rank so many bytes each. Every rank calls."""
        given = [number for donor in donors.items() for number in donor][: 2 * _DONORS]
        mine = [primary, sum(donors.values()), round(duration_s * 1000), rank_hash, len(given)]
        rows = self._control.gather(mine + given + [0] * (2 * _DONORS - len(given)))
        bytes_of: dict[int, int] = {}
        for row in rows:
            numbers = row[5 : 5 + row[4]]
            for slot, size in zip(numbers[::2], numbers[1::2], strict=True):
                bytes_of[slot] = bytes_of.get(slot, 0) + size
        if self._speaks:
            self._events.emit(
                "heal_finished",
                source=source.value,
                donors=sorted(bytes_of),
                donor_bytes=dict(sorted(bytes_of.items())),
                rank_donors=[row[0] for row in rows],
                outer_step=outer_step,
                bytes=sum(row[1] for row in rows),
                duration_s=max(row[2] for row in rows) / 1000,
                state_hash=combine_hashes(row[3] for row in rows),
                rank_hashes=[f"{row[3]:x}" for row in rows],
            )

    def heal_failed(self, cause: str, error: str) -> None:
        """A joiner (cause heal_failed), or one that is kept out of the average for that cause, got no state."""
        if self._speaks:
            self._events.emit("heal_failed", cause=cause, error=error)

    def joined(self, outer_step: int, step: int) -> None:
        """The replica is in its first quorum since it took a donor's state."""
        if self._speaks:
            self._events.emit("joined", outer_step=outer_step, inner_step=step)

    def saved(self, outer_step: int, path: str, duration_s: float) -> None:
        """A durable snapshot is in place."""
        if self._speaks:
            self._events.emit("checkpoint_saved", outer_step=outer_step, path=path, duration_s=round(duration_s, 3))

    def first_step(self, step: int) -> None:
        """This incarnation completed its first inner step."""
        if self._speaks:
            self._events.emit("first_step", inner_step=step)

    def note(self, text: str) -> None:
        """Something that a reader of the log should know."""
        if self._speaks:
            self._events.emit("note", text=text)

    def left(self, step: int, outer_step: int) -> None:
        """The replica was asked to leave, and has left with the state of its last commit."""
        if self._speaks:
            self._events.emit("replica_left", inner_step=step, outer_step=outer_step)

    def finished(self, step: int, outer_step: int, tokens: int | None) -> None:
        """The replica trained to the end; ``tokens`` it trained in this incarnation, where none can have been lost."""
        if self._speaks:
            self._events.emit("replica_finished", inner_step=step, outer_step=outer_step, tokens=tokens)
