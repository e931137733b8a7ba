"""Where the replicas of a run find each other: which incarnation holds a slot, where its ranks are, who has ended.

The Lighthouse knows who heartbeats, which says neither where a rank can be asked nor that a process is surely gone.
Both come from here: addresses from the ranks, ends from whoever has seen the processes end.
"""

from __future__ import annotations

import threading
from http import HTTPStatus
from typing import Any

from elastic_train.peer_ckpt.roll import PeerEntry, Roll
from elastic_train.peer_ckpt.service import BadRequest, Exchange, TokenServer


class IncarnationEnded(ValueError):
    """Somebody wants to register who is known to be dead."""


class Registry:
    """What is known, kept consistent while several tell it at once."""

    def __init__(self) -> None:
        self._roll = Roll()
        self._guard = threading.Lock()

    @property
    def roll(self) -> Roll:
        return self._roll

    def register(self, slot: int, entry: PeerEntry) -> None:
        """Put a replica into its slot, in the place of an older incarnation.

        Raises:
            IncarnationEnded: it has ended, or a newer one has its place.
        """
        with self._guard:
            if self._roll.is_dead(slot, entry.incarnation):
                raise IncarnationEnded(f"incarnation {entry.incarnation} of replica {slot} has ended")
            self._roll = self._roll.with_peer(slot, entry)

    def ended(self, slot: int, incarnation: int) -> None:
        """Note that no process of an incarnation is left, nor of one before it."""
        with self._guard:
            self._roll = self._roll.with_end(slot, incarnation)


class RegistryServer:
    """A registry at ``GET /roll``, ``POST /register`` and ``POST /ended``; each answers with the whole roll."""

    def __init__(self, host: str, port: int, token: str) -> None:
        """
        Args:
            port: 0: any that is free.

        Raises:
            OSError: it cannot listen there.
            ValueError: the token is empty.
        """
        self._registry = Registry()
        self._server = TokenServer(host, port, token, self._respond)

    @property
    def url(self) -> str:
        """``http://host:port``."""
        return self._server.address

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._server.close()

    def _respond(self, exchange: Exchange) -> None:
        match exchange.command, exchange.place:
            case "GET", "/roll":
                pass
            case "POST", "/register":
                told = exchange.read_json()
                slot, incarnation = _numbers(told)
                addresses = told.get("addresses")
                if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
                    raise BadRequest("addresses must be a list of strings")
                try:
                    self._registry.register(slot, PeerEntry(incarnation=incarnation, addresses=tuple(addresses)))
                except IncarnationEnded as error:
                    exchange.refuse(HTTPStatus.CONFLICT, str(error))
                    return
            case "POST", "/ended":
                self._registry.ended(*_numbers(exchange.read_json()))
            case method, place:
                exchange.refuse(HTTPStatus.NOT_FOUND, f"there is no {method} {place}")
                return
        exchange.answer(self._registry.roll.to_json())


def _numbers(told: Any) -> tuple[int, int]:
    """Slot and incarnation of what was told. Raises BadRequest."""
    if not isinstance(told, dict):
        raise BadRequest("an object is wanted")
    slot, incarnation = told.get("slot"), told.get("incarnation")
    if type(slot) is not int or type(incarnation) is not int or slot < 0 or incarnation < 0:
        raise BadRequest("slot and incarnation must be whole numbers")
    return slot, incarnation
