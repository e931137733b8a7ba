"""What the replicas have agreed on, as one rank holds it: its part of the outer state, and the proofs of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.flat import FlatFragment, OuterState
from elastic_train.diloco.publication import OUTER
from elastic_train.diloco.quorum import QuorumCount
from elastic_train.peer_ckpt.shards import combine
from elastic_train.peer_ckpt.snapshot import Snapshot

_HISTORY = 8


class Ledger:
    """The outer state of one rank with its hashes, and who agreed on it. Hashes are signed 64-bit integers."""

    def __init__(self, fragments: Sequence[FlatFragment], control: ControlGroup) -> None:
        """Every rank of a replica makes its own together.

        Args:
            fragments: of this rank's parameters, in the order in which they sync.
        """
        self.fragments = fragments
        self.count = QuorumCount()
        self.members: list[tuple[int, int]] = []
        """Slot and incarnation of all who took part in the last commit."""
        self.history: dict[int, int] = {}
        """Hashes of the whole replica's state after the last outer steps."""
        self.retired: tuple[int, ...] = ()
        """Slots given up for good, as far as all who took part in a commit knew of them."""
        self._hashes = [fragment.committed.hash() for fragment in fragments]
        self.state_hash = combine([row[0] for row in control.gather([self.rank_hash])])
        """Of the whole replica's state now, the same on all replicas."""

    @property
    def rank_hash(self) -> int:
        """Of this rank's part."""
        return combine(self._hashes)

    def rank_hash_with(self, fragment: int, candidate: int) -> int:
        """Of this rank's part, if the candidate of that hash becomes the state of a fragment."""
        return combine([candidate if i == fragment else agreed for i, agreed in enumerate(self._hashes)])

    def is_sound(self) -> bool:
        """Whether the memory still holds what was agreed on."""
        return all(f.committed.hash() == agreed for f, agreed in zip(self.fragments, self._hashes, strict=True))

    def commit(
        self, outer_step: int, fragment: int, *, part: int, state_hash: int, members: Sequence[tuple[int, int]]
    ) -> None:
        """The candidate of a fragment is agreed on.

        Args:
            part: hash of this rank's candidate.
            state_hash: of the whole replica's state with it.
            members: slot and incarnation of all who took part.
        """
        self.fragments[fragment].swap()
        self._hashes[fragment] = part
        self.state_hash = state_hash
        self.members = list(members)
        self.history[outer_step] = state_hash
        self.history = dict(list(self.history.items())[-_HISTORY:])

    def adopt(self, snapshot: Snapshot, *, carried: Collection[int]) -> None:
        """Put a peer's outer state in the place of this rank's; ``carried`` fragments keep what they have learned.

        Raises:
            StateMismatch: the sizes differ.
        """
        parts = parts_of(snapshot, len(self.fragments))
        for index, (fragment, part) in enumerate(zip(self.fragments, parts, strict=True)):
            fragment.load(part.anchor, part.momentum, carry=index in carried)
        header = snapshot.header
        self._hashes = [fragment.committed.hash() for fragment in self.fragments]
        self.state_hash = header["state_hash"]
        self.history = {int(step): state for step, state in header["history"].items()}
        self.members = [(slot, incarnation) for slot, incarnation in header["members"]]
        self.retired = tuple(header["retired"])
        self.count.follow(header["quorum_count"])

    def header(self, outer_step: int) -> Mapping[str, Any]:
        """What a peer needs to know of this state, as JSON has it."""
        return {
            "outer_step": outer_step,
            "rank_hash": self.rank_hash,
            "state_hash": self.state_hash,
            "history": {str(step): state for step, state in self.history.items()},
            "members": self.members,
            "retired": self.retired,
            "quorum_count": self.count.to_list(),
        }


def parts_of(snapshot: Snapshot, fragments: int) -> list[OuterState]:
    """The outer state of each fragment in a peer's snapshot.

    Raises:
        KeyError: it has another number of fragments.
    """
    tensors = snapshot.sections[OUTER]
    return [
        OuterState(anchor=tensors[f"{index}.anchor"], momentum=tensors[f"{index}.momentum"])
        for index in range(fragments)
    ]
