"""Which host is given next: those that are free, evenly, and one that has failed only if there is no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """A part of a host that one replica has."""

    host: str
    position: int
    """Among the parts of the host, from 0."""


class Hosts:
    """What is taken of a list of hosts. Times are seconds of one clock."""

    def __init__(self, hosts: Sequence[str], *, replicas_per_host: int, cool_down_s: float) -> None:
        """
        Args:
            cool_down_s: how long a host that has failed is left alone, if another is free.
        """
        self._cool_down_s = cool_down_s
        self._free: dict[str, list[int]] = {host: list(range(replicas_per_host)) for host in hosts}
        self._failed_at: dict[str, float] = {}

    def take(self, now: float) -> Place | None:
        """A part of the host that has the most left; None: everything is taken.

        Of those that have failed lately, the one whose failure is the longest ago.
        """
        free = [host for host, positions in self._free.items() if positions]
        if not free:
            return None
        host = min(free, key=lambda host: (self._failure(host, now), -len(self._free[host])))
        position = min(self._free[host])
        self._free[host].remove(position)
        return Place(host=host, position=position)

    def give_back(self, place: Place, *, failed: bool, now: float) -> None:
        """Let others have it."""
        self._free[place.host].append(place.position)
        if failed:
            self._failed_at[place.host] = now

    def _failure(self, host: str, now: float) -> float:
        """When it failed, if that counts; else a time before any."""
        failed_at = self._failed_at.get(host, -float("inf"))
        return failed_at if now - failed_at < self._cool_down_s else -float("inf")
