"""Where the replicas of a run find each other: which incarnation holds a slot, where its ranks are, who has ended, and
whom a joiner may fetch the state from.

The Lighthouse knows who heartbeats, which says neither where a rank can be asked nor that a process is surely gone, nor
what it holds. All of it comes from here: addresses and states from the ranks, ends from whoever has seen the processes
end. Nothing of it is kept on disk: one that was started anew is given what the controller has heard, and those who know
more tell it again.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from elastic_train.clock import Clock, SystemClock
from elastic_train.lighthouse.donors import HeldState, Holder, Leases, Wish, choose
from elastic_train.peer_ckpt.donor_list import DonorList, ListedDonor
from elastic_train.peer_ckpt.roll import Member, PeerEntry, Roll
from elastic_train.peer_ckpt.service import BadRequest, Exchange, TokenServer
from elastic_train.peer_ckpt.tls import Tls

_HELD = 2
"""Outer steps that a replica serves at once."""
_INT64 = 2**63


class IncarnationEnded(ValueError):
    """Somebody who is known to be dead wants to register, to give a state or to have one."""


class Registry:
    """What is known, kept consistent while several tell it at once."""

    def __init__(self, clock: Clock | None = None, roll: Roll | None = None) -> None:
        """
        Args:
            clock: tells when a joiner has been silent for too long.
            roll: what is known from the beginning; None: nothing.
        """
        self._clock = clock or SystemClock()
        self._roll = roll or Roll()
        self._holders: dict[int, Holder] = {}
        self._leases = Leases()
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
            self._refuse_the_dead(slot, entry.incarnation)
            self._roll = self._roll.with_peer(slot, entry)

    def ended(self, slot: int, incarnation: int) -> None:
        """Note that no process of an incarnation is left, nor of one before it."""
        with self._guard:
            self._roll = self._roll.with_end(slot, incarnation)

    def retired(self, slot: int) -> None:
        """Note that a replica has been given up for good."""
        with self._guard:
            self._roll = self._roll.with_retired(slot)

    def held(self, slot: int, incarnation: int, state: HeldState, *, host: str, load: int) -> None:
        """Note that a replica serves a state, as the newest of its last two.

        Args:
            host: where it runs.
            load: joiners that it serves now.

        Raises:
            IncarnationEnded: it has ended, or a newer one has its place.
        """
        with self._guard:
            self._refuse_the_dead(slot, incarnation)
            # Who has a state to give is not fetching one.
            self._leases.end((slot, incarnation))
            known = self._holders.get(slot)
            held: tuple[HeldState, ...] = ()
            if known is not None and known.incarnation == incarnation:
                held = tuple(older for older in known.held if older.outer_step != state.outer_step)
            self._holders[slot] = Holder(
                slot=slot, incarnation=incarnation, host=host, held=(*held, state)[-_HELD:], load=load
            )

    def donors(self, wish: Wish) -> DonorList:
        """Choose donors for a joiner, which count as busy with it from now on.

        Raises:
            IncarnationEnded: the joiner has ended, or a newer one has its place.
        """
        with self._guard:
            self._refuse_the_dead(wish.slot, wish.incarnation)
            if not wish.replaces:
                # It is done with those that it had before, which must not count against them now.
                self._leases.end(wish.member)
            choice = choose(wish, self._living())
            if choice is None:
                return DonorList()
            self._leases.give(wish.member, (donor.member for donor in choice.donors), self._clock.monotonic())
            return DonorList(
                outer_step=choice.state.outer_step,
                state_hash=choice.state.state_hash,
                donors=tuple(
                    ListedDonor(
                        slot=donor.slot,
                        incarnation=donor.incarnation,
                        addresses=self._roll.peers[donor.slot].addresses,
                    )
                    for donor in choice.donors
                ),
            )

    def taken(self, slot: int, incarnation: int) -> None:
        """Note that a joiner has its state, or needs it no more."""
        with self._guard:
            self._leases.end((slot, incarnation))

    def _refuse_the_dead(self, slot: int, incarnation: int) -> None:
        if self._roll.is_dead(slot, incarnation):
            raise IncarnationEnded(f"incarnation {incarnation} of replica {slot} has ended")

    def _living(self) -> list[Holder]:
        """Those that can be asked for what they hold, with all that they are busy with."""
        leases = self._leases.load(self._roll.is_dead, self._clock.monotonic())
        return [
            # A joiner that is served counts among both.
            replace(holder, load=max(holder.load, leases.get(holder.member, 0)))
            for slot, holder in self._holders.items()
            if slot in self._roll.peers and self._roll.peers[slot].incarnation == holder.incarnation
        ]


class RegistryServer:
    """A registry at ``GET /roll``, and at ``POST /register``, ``/ended``, ``/retired``, ``/held``, ``/taken``, each of
    which answers with the whole roll, and ``POST /donors``, which answers with the donors chosen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        *,
        clock: Clock | None = None,
        tls: Tls | None = None,
        roll: Roll | None = None,
    ) -> None:
        """
        Args:
            port: 0: any that is free.
            clock: as for ``Registry``, as well as ``roll``.
            tls: None: in plain text.

        Raises:
            OSError: it cannot listen there.
            ValueError: the token is empty.
        """
        self._registry = Registry(clock, roll)
        self._server = TokenServer(host, port, token, self._respond, tls=tls)

    @property
    def url(self) -> str:
        """``http://host:port``; with ``tls``: ``https://host:port``."""
        return self._server.address

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._server.close()

    def _respond(self, exchange: Exchange) -> None:
        try:
            match exchange.command, exchange.place:
                case "GET", "/roll":
                    pass
                case "POST", "/register":
                    self._register(_told(exchange))
                case "POST", "/ended":
                    self._registry.ended(*_member(_told(exchange)))
                case "POST", "/retired":
                    self._registry.retired(_number(_told(exchange), "slot"))
                case "POST", "/held":
                    self._held(_told(exchange))
                case "POST", "/taken":
                    self._registry.taken(*_member(_told(exchange)))
                case "POST", "/donors":
                    exchange.answer(self._registry.donors(_wish(_told(exchange))).to_json())
                    return
                case method, place:
                    exchange.refuse(HTTPStatus.NOT_FOUND, f"there is no {method} {place}")
                    return
        except IncarnationEnded as error:
            exchange.refuse(HTTPStatus.CONFLICT, str(error))
            return
        exchange.answer(self._registry.roll.to_json())

    def _register(self, told: dict[str, Any]) -> None:
        slot, incarnation = _member(told)
        addresses = told.get("addresses")
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise BadRequest("addresses must be a list of strings")
        self._registry.register(slot, PeerEntry(incarnation=incarnation, addresses=tuple(addresses)))

    def _held(self, told: dict[str, Any]) -> None:
        state_hash = told.get("state_hash")
        if type(state_hash) is not int or not -_INT64 <= state_hash < _INT64:
            raise BadRequest("state_hash must be a signed 64-bit number")
        state = HeldState(outer_step=_number(told, "outer_step"), state_hash=state_hash)
        self._registry.held(*_member(told), state, host=_text(told, "host"), load=_number(told, "load"))


def _told(exchange: Exchange) -> dict[str, Any]:
    """What was sent along. Raises BadRequest, as all that follow."""
    told = exchange.read_json()
    if not isinstance(told, dict):
        raise BadRequest("an object is wanted")
    return told


def _wish(told: dict[str, Any]) -> Wish:
    slot, incarnation = _member(told)
    among, avoid = told.get("among"), told.get("avoid")
    if among is not None and not (isinstance(among, list) and all(type(slot) is int for slot in among)):
        raise BadRequest("among must be a list of slots, or null")
    if not isinstance(avoid, list) or not all(_is_member(member) for member in avoid):
        raise BadRequest("avoid must be a list of pairs, each a slot and an incarnation")
    return Wish(
        slot=slot,
        incarnation=incarnation,
        host=_text(told, "host"),
        at_least=_number(told, "at_least"),
        at_most=None if told.get("at_most") is None else _number(told, "at_most"),
        count=_number(told, "count", least=1),
        among=None if among is None else frozenset(among),
        avoid=frozenset((slot, incarnation) for slot, incarnation in avoid),
    )


def _member(told: dict[str, Any]) -> Member:
    return _number(told, "slot"), _number(told, "incarnation")


def _is_member(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value)


def _number(told: dict[str, Any], name: str, *, least: int = 0) -> int:
    value = told.get(name)
    if type(value) is not int or value < least:
        raise BadRequest(f"{name} must be a whole number, {least} or more")
    return value


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string")
    return value
