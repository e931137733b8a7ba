"""The registry as others see it: who is in the run and where, who has certainly ended, who gives a joiner its state.

Training must not depend on it. While the registry does not answer, what it said last still holds: whoever was dead
stays dead, and an address that is out of date is one more peer that does not answer. One that was started anew is told
again what it does not know.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elastic_train.peer_ckpt.donor_list import DonorList
from elastic_train.peer_ckpt.outage import Outage
from elastic_train.peer_ckpt.request import RequestFailed, RequestRefused, ask
from elastic_train.peer_ckpt.roll import PeerEntry, Roll
from elastic_train.peer_ckpt.tls import Tls

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How long a training process waits for news."""
_CHOICE_S = 5.0
"""How long a joiner waits for its donors, which it can only find more slowly by itself."""
_TELL_S = 10.0
"""How long one waits that has something to tell."""


class RegistryUnreachable(RuntimeError):
    """A replica could not be registered for too long, so its peers could not find it."""


class RegistrationRefused(RuntimeError):
    """The registry does not let this incarnation in: it has ended, as far as anybody knows."""


class Directory:
    """The view of one process; may be used from several threads."""

    def __init__(self, url: str, token: str, *, tls: Tls | None = None) -> None:
        """
        Args:
            url: the registry's, ``http://host:port``; with ``tls``: ``https://host:port``.
        """
        self._url = url
        self._token = token
        self._tls = tls
        self._known = Roll()
        self._registered: dict[str, Any] | None = None
        """What was told of ourselves."""
        self._outage = Outage("the registry of the replicas", logger)
        self._guard = threading.Lock()

    def register(self, slot: int, incarnation: int, addresses: Sequence[str]) -> bool:
        """Say where the ranks of a replica are. Addresses in the order of its ranks.

        Returns:
            False if nobody heard it.

        Raises:
            RegistrationRefused: the registry knows that it has ended.
        """
        body = {"slot": slot, "incarnation": incarnation, "addresses": list(addresses)}
        try:
            self._tell("/register", body)
        except RequestRefused as error:
            raise RegistrationRefused(f"replica {slot} could not be registered: {error}") from error
        except RequestFailed:
            return False
        self._registered = body
        return True

    def ended(self, slot: int, incarnation: int) -> bool:
        """Say that no process of an incarnation is left, nor of one before it; False if nobody heard it.

        Who says so has seen it, so here it is known in any case, and ``refresh`` tells it again.
        """
        with self._guard:
            self._known = self._known.with_end(slot, incarnation)
        try:
            self._tell("/ended", {"slot": slot, "incarnation": incarnation})
        except RequestFailed as error:
            logger.debug("the end of replica %d's incarnation %d could not be told: %s", slot, incarnation, error)
            return False
        return True

    def retired(self, slot: int) -> bool:
        """Say that a replica has been given up for good; False if nobody heard it.

        Those known before are told with it, so that the order is the same for a registry that was started anew.
        """
        return self._tell_retired((*self._known.retired, slot))

    def held(self, slot: int, incarnation: int, *, outer_step: int, state_hash: int, host: str, load: int = 0) -> None:
        """Say that a replica serves a state, as the newest of its last two. If nobody hears it, the next is told.

        Args:
            state_hash: over all its ranks, signed 64 bit.
            host: where it runs; a joiner on the same host is sent to it first.
            load: joiners that it serves now.
        """
        body = {
            "slot": slot,
            "incarnation": incarnation,
            "outer_step": outer_step,
            "state_hash": state_hash,
            "host": host,
            "load": load,
        }
        try:
            told = self._tell("/held", body, timeout_s=_LOOK_S)
        except RequestFailed as error:
            logger.debug("that replica %d holds outer step %d could not be told: %s", slot, outer_step, error)
            return
        self._remind(told)

    def donors(
        self,
        slot: int,
        incarnation: int,
        host: str,
        *,
        at_least: int,
        count: int,
        at_most: int | None = None,
        among: Collection[int] | None = None,
        avoid: Collection[tuple[int, int]] = (),
    ) -> DonorList | None:
        """Ask for replicas to fetch the state from. They count as busy until ``taken``, or until the next question.

        Args:
            host: where we run; donors on the same host are preferred.
            at_least: least outer step that is of use.
            count: most donors to be named, at least 1.
            at_most: greatest outer step that is of use; None: any. A donor that was lost in the middle of a transfer
                is replaced only by one with the same outer step.
            among: slots that may be named; None: all.
            avoid: slot and incarnation of those that have failed us.

        Returns:
            The newest outer step that there is, and who has it, the best first: nobody, if no peer holds such a state.
            None: the registry does not answer, or takes us for dead.
        """
        body = {
            "slot": slot,
            "incarnation": incarnation,
            "host": host,
            "at_least": at_least,
            "at_most": at_most,
            "count": count,
            "among": None if among is None else sorted(among),
            "avoid": sorted(avoid),
        }
        try:
            return DonorList.from_json(self._ask("/donors", body, timeout_s=_CHOICE_S))
        except (RequestFailed, ValueError) as error:
            logger.debug("replica %d learns of no donors: %s", slot, error)
            return None

    def taken(self, slot: int, incarnation: int) -> None:
        """Say that we need our donors no more. If nobody hears it, they count as busy a while longer."""
        try:
            self._tell("/taken", {"slot": slot, "incarnation": incarnation}, timeout_s=_LOOK_S)
        except RequestFailed as error:
            logger.debug("that replica %d has its state could not be told: %s", slot, error)

    def refresh(self) -> bool:
        """Hear what is new, and tell the registry what it does not know, as one that was started anew; False if it does
        not answer."""
        try:
            self._remind(self._learn(self._ask("/roll", timeout_s=_LOOK_S)))
        except RequestFailed as error:
            logger.debug("nothing new about the peers: %s", error)
            return False
        return True

    def roll(self) -> Roll:
        """All that is known, just asked for; what was known before, if the registry does not answer."""
        try:
            self._learn(self._ask("/roll", timeout_s=_LOOK_S))
        except RequestFailed as error:
            logger.debug("nothing new about the peers: %s", error)
        return self._known

    @property
    def known(self) -> Roll:
        """What was last heard, without asking."""
        return self._known

    def peers(self) -> Mapping[int, PeerEntry]:
        """The replicas that can be asked, by slot, this one among them."""
        return self.roll().peers

    def is_dead(self, slot: int, incarnation: int) -> bool:
        """Whether certainly no process of that incarnation is left."""
        return self._known.is_dead(slot, incarnation) or self.roll().is_dead(slot, incarnation)

    def _tell(self, target: str, body: Mapping[str, Any], *, timeout_s: float = _TELL_S) -> Roll:
        """What the registry knows after that. Raises RequestFailed."""
        return self._learn(self._ask(target, body, timeout_s=timeout_s))

    def _ask(self, target: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        try:
            answer = ask(self._url, target, self._token, timeout_s=timeout_s, body=body, tls=self._tls)
        except RequestRefused as error:
            self._outage.is_over()
            logger.warning("%s", error)
            raise
        except RequestFailed as error:
            self._outage.goes_on(error)
            raise
        self._outage.is_over()
        return answer

    def _tell_retired(self, slots: Sequence[int]) -> bool:
        for slot in slots:
            try:
                self._tell("/retired", {"slot": slot})
            except RequestFailed as error:
                logger.debug("that replica %d is retired could not be told: %s", slot, error)
                return False
        return True

    def _remind(self, told: Roll) -> None:
        """Tell the registry again what it has forgotten: of ourselves, of the dead and of the retired."""
        known = self._known
        for slot, incarnation in known.ended.items():
            if told.ended.get(slot, -1) < incarnation:
                self.ended(slot, incarnation)
        mine, retired = self._registered, known.retired
        if mine is not None and mine["slot"] not in told.peers and not known.is_dead(mine["slot"], mine["incarnation"]):
            try:
                self.register(mine["slot"], mine["incarnation"], mine["addresses"])
            except RegistrationRefused as error:
                logger.warning("%s", error)
        if retired[: len(told.retired)] == told.retired:
            self._tell_retired(retired[len(told.retired) :])

    def _learn(self, answer: object) -> Roll:
        """What the answer says, by itself. Raises RequestFailed."""
        try:
            told = Roll.from_json(answer)
        except ValueError as error:
            raise RequestFailed(f"{self._url}: {error}") from error
        with self._guard:
            # Answers may overtake each other, and a registry that was started anew knows less.
            self._known = self._known.merged(told)
        return told
