"""What a replica writes down about quorums, syncs and heals: one voice for all its ranks.

Rank 0 writes. Where it needs the other ranks' part (hashes, donors), every rank calls, in the same order.
"""

from __future__ import annotations

import torch

from elastic_train.diloco.engine import Sync
from elastic_train.events import EventWriter
from elastic_train.peer_ckpt.http import Transfer
from elastic_train.peer_ckpt.shards import combine_hashes, hash_tensors
from elastic_train.replica.control import ControlGroup
from elastic_train.replica.membership import Quorum


class Journal:
    """The events of one incarnation's membership."""

    def __init__(self, events: EventWriter, control: ControlGroup) -> None:
        self._events = events
        self._control = control
        self._speaks = control.rank == 0
        self._last_quorum_id: int | None = None
        self._attempts = 0

    def entered(self, quorum: Quorum) -> None:
        """A quorum came; written if it is another than the last."""
        if self._speaks and quorum.quorum_id != self._last_quorum_id:
            self._events.emit("quorum_changed", quorum_id=quorum.quorum_id, participants=sorted(quorum.participants))
        self._last_quorum_id = quorum.quorum_id

    def committed(self, sync: Sync, *, step: int, tokens: int, quorum: Quorum, anchor: dict[str, torch.Tensor]) -> None:
        """An outer step was committed. Every rank calls: the hash is over the anchor's shards of all of them."""
        self._attempts = 0
        rank_hashes = [row[0] for row in self._control.gather([hash_tensors(anchor)])]
        if self._speaks:
            self._events.emit(
                "sync_committed",
                outer_step=sync.outer_step,
                inner_step=step,
                participants=sorted(quorum.participants),
                tokens=tokens,
                wait_s=round(sync.wait_s, 4),
                reduce_s=round(sync.reduce_s, 4),
                bytes=sync.bytes,
                anchor_hash=combine_hashes(rank_hashes),
            )

    def failed(self, sync: Sync) -> None:
        """A sync failed and will be tried again."""
        self._attempts += 1
        if self._speaks:
            self._events.emit(
                "sync_retried",
                outer_step=sync.outer_step + 1,
                attempt=self._attempts,
                cause="comm_error",
                error=sync.cause,
                duration_s=round(sync.wait_s + sync.reduce_s, 4),
            )

    def heals(self, quorum: Quorum) -> None:
        """A donor's state is being fetched."""
        if self._speaks:
            self._events.emit("donor_selected", donors=[quorum.donor], outer_step=quorum.outer_step)
            self._events.emit("heal_started")

    def served(self, outer_step: int, state_hash: int) -> None:
        """This rank gave its state to a joiner. Each rank speaks for itself."""
        self._events.emit("state_served", outer_step=outer_step, state_hash=f"{state_hash:x}")

    def healed(self, donor: int, transfer: Transfer, state_hash: int, *, outer_step: int, step: int) -> None:
        """A donor's state is in place, and the replica is a member. Every rank calls."""
        milliseconds = round(transfer.duration_s * 1000)
        rows = self._control.gather([donor, transfer.bytes, milliseconds, state_hash])
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
            self._events.emit("joined", outer_step=outer_step, inner_step=step)

    def saved(self, outer_step: int, path: str, duration_s: float) -> None:
        """A durable snapshot is in place."""
        if self._speaks:
            self._events.emit("checkpoint_saved", outer_step=outer_step, path=path, duration_s=round(duration_s, 3))

    def first_step(self, step: int) -> None:
        """This incarnation completed its first inner step."""
        if self._speaks:
            self._events.emit("first_step", inner_step=step)

    def finished(self, step: int, outer_step: int) -> None:
        """The replica trained to the end of the run."""
        if self._speaks:
            self._events.emit("replica_finished", inner_step=step, outer_step=outer_step)
