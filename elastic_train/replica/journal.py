"""What a replica writes down about quorums, syncs and heals: one voice for all its ranks.

Rank 0 writes. Where it needs the other ranks' part (hashes, donors), every rank calls, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.engine import Sync
from elastic_train.events import EventWriter
from elastic_train.peer_ckpt.shards import combine_hashes


class Journal:
    """The events of one incarnation's membership (``diloco.trainee.SyncJournal``, and what the trainer adds)."""

    def __init__(self, events: EventWriter, control: ControlGroup) -> None:
        self._events = events
        self._control = control
        self._speaks = control.rank == 0
        self._last_quorum: tuple[int, list[int]] | None = None
        self._failures = 0

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

    def heal_started(self, donor: int, outer_step: int) -> None:
        """A donor's state is being fetched."""
        if self._speaks:
            self._events.emit("donor_selected", donors=[donor], outer_step=outer_step)
            self._events.emit("heal_started")

    def served(self, outer_step: int, state_hash: int) -> None:
        """This rank gave its state to a joiner. Each rank speaks for itself."""
        self._events.emit("state_served", outer_step=outer_step, state_hash=f"{state_hash:x}")

    def heal_finished(self, donor: int, outer_step: int, size: int, duration_s: float, rank_hash: int) -> None:
        """A donor's state is in place. Every rank calls."""
        rows = self._control.gather([donor, size, round(duration_s * 1000), rank_hash])
        if self._speaks:
            self._events.emit(
                "heal_finished",
                donors=sorted({row[0] for row in rows}),
                rank_donors=[row[0] for row in rows],
                outer_step=outer_step,
                bytes=sum(row[1] for row in rows),
                duration_s=max(row[2] for row in rows) / 1000,
                state_hash=combine_hashes(row[3] for row in rows),
                rank_hashes=[f"{row[3]:x}" for row in rows],
            )

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

    def finished(self, step: int, outer_step: int, tokens: int | None) -> None:
        """The replica trained to the end; ``tokens`` it trained in this incarnation, where none can have been lost."""
        if self._speaks:
            self._events.emit("replica_finished", inner_step=step, outer_step=outer_step, tokens=tokens)
