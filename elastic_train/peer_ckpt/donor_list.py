"""Whom a joiner may fetch its state from, as the registry tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ListedDonor:
    """One replica that holds the state."""

    slot: int
    incarnation: int
    addresses: tuple[str, ...]
    """Of its ranks, in their order, as ``http://host:port``."""


@dataclass(frozen=True, kw_only=True)
class DonorList:
    """Replicas that all hold one and the same state, the best to ask first; a value."""

    outer_step: int = -1
    """Of the state that each of them holds; -1 if there is none."""
    state_hash: int = 0
    """Of that state over all ranks of a replica, signed 64 bit."""
    donors: tuple[ListedDonor, ...] = ()

    def to_json(self) -> dict[str, Any]:
        if not self.donors:
            return {"donors": []}
        return {
            "outer_step": self.outer_step,
            "state_hash": self.state_hash,
            "donors": [
                {"slot": donor.slot, "incarnation": donor.incarnation, "addresses": donor.addresses}
                for donor in self.donors
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> DonorList:
        """From what ``to_json`` gave. Raises ValueError."""
        try:
            donors = tuple(
                ListedDonor(
                    slot=int(donor["slot"]),
                    incarnation=int(donor["incarnation"]),
                    addresses=tuple(map(str, donor["addresses"])),
                )
                for donor in value["donors"]
            )
            if not donors:
                return cls()
            return cls(outer_step=int(value["outer_step"]), state_hash=int(value["state_hash"]), donors=donors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no list of donors: {error!r}") from error
