"""What one rank can learn from its peers outside of a quorum: who is ahead, what became of an attempt, their state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.diloco.doubt import Answer
from elastic_train.peer_ckpt.client import PeerClient, TransferFailed, Unwanted
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.snapshot import Snapshot

logger = logging.getLogger(__name__)

_PAUSE_S = 0.02
_PATIENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PeerState:
    """A peer and the state that it holds, as rank 0 of it says."""

    slot: int
    incarnation: int
    outer_step: int
    state_hash: int
    """Over all its ranks, signed 64 bit."""

    def to_ints(self) -> list[int]:
        return [self.slot, self.incarnation, self.outer_step, self.state_hash]

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> PeerState:
        slot, incarnation, outer_step, state_hash = values
        return cls(slot=slot, incarnation=incarnation, outer_step=outer_step, state_hash=state_hash)


NOBODY = PeerState(slot=0, incarnation=0, outer_step=-1, state_hash=0)
"""What stands for a peer where there is none."""


class Peers:
    """The peers of one rank. May be used from several threads."""

    def __init__(self, slot: int, rank: int, directory: Directory, client: PeerClient) -> None:
        self._slot = slot
        self._rank = rank
        self._directory = directory
        self._client = client
        self._never = threading.Event()

    def newest(
        self, at_least: int, among: Collection[int] | None = None, avoid: Collection[PeerState] = ()
    ) -> PeerState | None:
        """A peer (one of the slots ``among``, if given) whose outer step is the newest, and ``at_least`` that.

        One whose state is in ``avoid`` is taken only if there is no other.

        Among equals it is the next slot after ours, so that several who ask at once are spread over them.
        """
        found: list[PeerState] = []
        for slot, entry in self._directory.peers().items():
            if slot == self._slot or (among is not None and slot not in among):
                continue
            status = self._client.status(entry.addresses[0])
            if status is not None and status["outer_step"] >= at_least:
                found.append(
                    PeerState(
                        slot=slot,
                        incarnation=status["incarnation"],
                        outer_step=status["outer_step"],
                        state_hash=status["state_hash"],
                    )
                )
        if not found:
            return None
        found = [state for state in found if state not in avoid] or found
        best = max(state.outer_step for state in found)
        newest = sorted((state for state in found if state.outer_step == best), key=lambda state: state.slot)
        return next((state for state in newest if state.slot > self._slot), newest[0])

    def outer_step_of(self, slot: int, incarnation: int) -> int | None:
        """The outer step of that incarnation; None if it does not answer, for which it gets time: who is only slow must
        not be taken for gone."""
        entry = self._directory.peers().get(slot)
        if entry is None or entry.incarnation != incarnation:
            return None
        status = self._client.status(entry.addresses[0], timeout_s=_PATIENCE_S)
        return None if status is None or status["incarnation"] != incarnation else int(status["outer_step"])

    def ask(self, slot: int, incarnation: int, attempt: str, dead: frozenset[int]) -> Answer | None:
        """What that incarnation says about an attempt; None if it does not answer."""
        entry = self._directory.peers().get(slot)
        if entry is None:
            return None
        status = self._client.status(entry.addresses[0], attempt, dead)
        if status is None or status["incarnation"] != incarnation:
            return None
        try:
            return Answer.from_mapping(status)
        except ValueError as error:
            logger.warning("replica %d's answer about attempt %s means nothing: %s", slot, attempt, error)
            return None

    def is_dead(self, slot: int, incarnation: int) -> bool:
        """Whether certainly no process of that incarnation is left."""
        return self._directory.is_dead(slot, incarnation)

    def fetch(
        self, source: PeerState, sections: Sequence[str], timeout_s: float, alive: Callable[[], None]
    ) -> Snapshot:
        """This rank's part of the state that ``source`` names.

        A peer's ranks commit within moments of each other, and publish a little later; until then they are asked
        again.

        Raises:
            TransferFailed: it is not to be had any more.
        """
        end = time.monotonic() + timeout_s
        while True:
            alive()
            entry = self._directory.peers().get(source.slot)
            if entry is None or entry.incarnation != source.incarnation:
                raise TransferFailed(f"replica {source.slot} is not what it was")
            if self._rank >= len(entry.addresses):
                raise TransferFailed(f"replica {source.slot} has only {len(entry.addresses)} ranks")
            try:
                return self._client.fetch(
                    entry.addresses[self._rank],
                    sections,
                    max(end - time.monotonic(), 0.1),
                    lambda received, total: alive(),
                    lambda header: bool(header["outer_step"] == source.outer_step),
                )
            except Unwanted as other:
                if other.header["outer_step"] > source.outer_step or time.monotonic() >= end:
                    raise TransferFailed(
                        f"replica {source.slot} is at outer step {other.header['outer_step']}"
                    ) from other
            except TransferFailed as error:
                if time.monotonic() >= end:
                    raise
                logger.info("fetching from replica %d is tried again: %s", source.slot, error)
            self._never.wait(_PAUSE_S)


def status_of(*, slot: int, incarnation: int, outer_step: int, state_hash: int, answer: Answer) -> Mapping[str, Any]:
    """What a replica says of itself, as ``Peers`` reads it. An outer step below 0: it has no state."""
    return {
        "slot": slot,
        "incarnation": incarnation,
        "outer_step": outer_step,
        "state_hash": state_hash,
        **answer.as_mapping(),
    }
