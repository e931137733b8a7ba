"""The registry as others see it: who is in the run and where, and who has certainly ended.

Training must not depend on it. While the registry does not answer, what it said last still holds: whoever was dead
stays dead, and an address that is out of date is one more peer that does not answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from elastic_train.peer_ckpt.request import RequestFailed, ask
from elastic_train.peer_ckpt.roll import PeerEntry, Roll

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How long a training process waits for news."""
_TELL_S = 10.0
"""How long one waits that has something to tell."""


class RegistryUnreachable(RuntimeError):
    """A replica could not be registered, so its peers could not find it."""


class Directory:
    """The view of one process; may be used from several threads."""

    def __init__(self, url: str, token: str) -> None:
        """
        Args:
            url: the registry's, ``http://host:port``.
        """
        self._url = url
        self._token = token
        self._known = Roll()
        self._registered = False
        self._guard = threading.Lock()

    def register(self, slot: int, incarnation: int, addresses: Sequence[str]) -> None:
        """Say where the ranks of a replica are. Addresses in the order of its ranks.

        Raises:
            RegistryUnreachable: the first time only: the registry does not answer, or knows that it has ended.
        """
        body = {"slot": slot, "incarnation": incarnation, "addresses": list(addresses)}
        try:
            self._learn(ask(self._url, "/register", self._token, timeout_s=_TELL_S, body=body))
        except RequestFailed as error:
            if not self._registered:
                raise RegistryUnreachable(f"replica {slot} could not be registered: {error}") from error
            logger.warning("replica %d could not be registered again: %s", slot, error)
        self._registered = True

    def ended(self, slot: int, incarnation: int) -> bool:
        """Say that no process of an incarnation is left, nor of one before it; False if nobody heard it."""
        try:
            self._learn(
                ask(
                    self._url,
                    "/ended",
                    self._token,
                    timeout_s=_TELL_S,
                    body={"slot": slot, "incarnation": incarnation},
                )
            )
        except RequestFailed as error:
            logger.warning("the end of replica %d's incarnation %d could not be told: %s", slot, incarnation, error)
            return False
        return True

    def roll(self) -> Roll:
        """All that is known, just asked for; what was known before, if the registry does not answer."""
        try:
            return self._learn(ask(self._url, "/roll", self._token, timeout_s=_LOOK_S))
        except RequestFailed as error:
            logger.info("nothing new about the peers: %s", error)
            return self._known

    def peers(self) -> Mapping[int, PeerEntry]:
        """The replicas that can be asked, by slot, this one among them."""
        return self.roll().peers

    def is_dead(self, slot: int, incarnation: int) -> bool:
        """Whether certainly no process of that incarnation is left."""
        return self._known.is_dead(slot, incarnation) or self.roll().is_dead(slot, incarnation)

    def _learn(self, answer: object) -> Roll:
        try:
            told = Roll.from_json(answer)
        except ValueError as error:
            raise RequestFailed(f"{self._url}: {error}") from error
        with self._guard:
            # Answers may overtake each other, and a registry that was started anew knows less.
            self._known = self._known.merged(told)
            return self._known
