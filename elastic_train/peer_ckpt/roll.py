"""Who is in the run, as everybody is told it: which incarnation holds a slot, where its ranks are, who has ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

logger = logging.getLogger(__name__)

Member = tuple[int, int]
"""Slot and incarnation."""


@dataclass(frozen=True, kw_only=True)
class PeerEntry:
    """One replica that can be asked."""

    incarnation: int
    addresses: tuple[str, ...]
    """Of its ranks, in their order, as ``http://host:port``."""


@dataclass(frozen=True, kw_only=True)
class Roll:
    """What is known of all slots; a value.

    Incarnations of a slot follow one another, so the end of one holds for those before it too.
    """

    peers: Mapping[int, PeerEntry] = field(default_factory=dict)
    """By slot, the newest incarnation that has registered and not ended."""
    ended: Mapping[int, int] = field(default_factory=dict)
    """By slot, the newest incarnation of which no process is left."""
    retired: tuple[int, ...] = ()
    """Slots given up for good, in the order in which that was told. It only ever grows at its end, so that its length
    says which of them somebody knows."""

    def is_dead(self, slot: int, incarnation: int) -> bool:
        """Whether no process of that incarnation is left: it was seen to end, or a newer one has its place."""
        entry = self.peers.get(slot)
        newer = entry is not None and entry.incarnation > incarnation
        return newer or self.ended.get(slot, -1) >= incarnation

    def with_peer(self, slot: int, entry: PeerEntry) -> Roll:
        """With ``entry`` in its slot, unless its incarnation is dead."""
        if self.is_dead(slot, entry.incarnation):
            return self
        return replace(self, peers={**self.peers, slot: entry})

    def with_end(self, slot: int, incarnation: int) -> Roll:
        """Without that incarnation, and all before it."""
        ended = {**self.ended, slot: max(incarnation, self.ended.get(slot, incarnation))}
        peers = {other: entry for other, entry in self.peers.items() if entry.incarnation > ended.get(other, -1)}
        return replace(self, peers=peers, ended=ended)

    def with_retired(self, slot: int) -> Roll:
        """With that slot given up for good."""
        return self if slot in self.retired else replace(self, retired=(*self.retired, slot))

    def merged(self, other: Roll) -> Roll:
        """Both together; where they differ, ``other`` is the later one. Whoever is dead in one is dead in both.

        Of the retired, the longer list counts. If neither continues the other, ours stays: what has been acted upon
        cannot change its order.
        """
        roll = replace(self, retired=self._longer(other.retired))
        for slot, entry in other.peers.items():
            roll = roll.with_peer(slot, entry)
        for slot, incarnation in other.ended.items():
            roll = roll.with_end(slot, incarnation)
        return roll

    def _longer(self, retired: tuple[int, ...]) -> tuple[int, ...]:
        shorter, longer = sorted((self.retired, retired), key=len)
        if longer[: len(shorter)] == shorter:
            return longer
        logger.warning("replicas %s were told to be retired, but %s are known to be", retired, self.retired)
        return self.retired

    def to_json(self) -> dict[str, Any]:
        return {
            "peers": {
                str(slot): {"incarnation": entry.incarnation, "addresses": entry.addresses}
                for slot, entry in self.peers.items()
            },
            "ended": {str(slot): incarnation for slot, incarnation in self.ended.items()},
            "retired": self.retired,
        }

    @classmethod
    def from_json(cls, value: Any) -> Roll:
        """From what ``to_json`` gave. Raises ValueError."""
        try:
            return cls(
                peers={
                    int(slot): PeerEntry(
                        incarnation=int(entry["incarnation"]), addresses=tuple(map(str, entry["addresses"]))
                    )
                    for slot, entry in value["peers"].items()
                },
                ended={int(slot): int(incarnation) for slot, incarnation in value["ended"].items()},
                retired=tuple(map(int, value["retired"])),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no roll: {error!r}") from error
