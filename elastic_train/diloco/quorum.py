"""A replica's request for a quorum: announced without waiting, answered whenever the others are there.

torchft's Manager asks and configures the group. What it lacks is added here: ids that stay unique when the
Lighthouse is started again and counts anew, the members of the answer, and a request that can be looked at.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchft.manager import Manager

from elastic_train.diloco.engine import COLD_START_STEP

_STEP_BITS = 24
_STAMP_BITS = 38
"""Both together are torchft's signed 64-bit step."""


class QuorumFailed(RuntimeError):
    """The quorum came to nothing, or its group could not be set up; another one must be asked for."""


@dataclass(frozen=True, kw_only=True)
class Formed:
    """A quorum as one rank sees it."""

    key: int
    """Unique over restarts of the Lighthouse, the same on all members."""
    number: int
    """The Lighthouse's own number of it."""
    replica_ids: tuple[str, ...]
    """torchft's ids of the members, which stay the same over incarnations, in the order of the group's ranks."""
    rank: int
    """This replica's place among them."""


class FencedClient:
    """Stands before torchft's ManagerClient: makes quorum ids unique, and keeps the last answer.

    A group may only stay if all members keep it, and otherwise all must set it up anew under the same key, one that
    never was before. The Lighthouse's number of a quorum does not tell which of both it is: a Lighthouse that was
    started again counts from 1, and the ids of replicas stay the same over incarnations. So a member whose last attempt
    was not committed in a whole group stamps its request: above the bits of its outer step it puts a random number. All
    members hear the greatest step, and with it that there is a stamp, and which one. Without any, whoever was in
    another group, or is behind, sets its group up anew, and then so do all: what moved one of them away or ahead
    without a stamp was a commit, which left the others behind.
    """

    def __init__(self, client: Any, *, draw: Callable[[], int] = lambda: secrets.randbits(_STAMP_BITS) | 1) -> None:
        """
        Args:
            draw: gives a new stamp, above 0 and of 38 bits at most.
        """
        self._client = client
        self._draw = draw
        self._key = 0
        self._seen: tuple[int, tuple[str, ...]] | None = None
        self._stamp = 0
        self.formed: Formed | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def stamp(self, broken: bool) -> None:
        """Whether the next request asks for a new group, although its members may be the same."""
        self._stamp = self._draw() if broken else 0

    def _quorum(self, **request: Any) -> Any:
        step, stamp = request["step"], self._stamp
        # Commit failures make the Lighthouse count up the quorum's number, which people are shown.
        answer = self._client._quorum(
            **{**request, "step": stamp << _STEP_BITS | step, "commit_failures": int(stamp > 0)}
        )
        members = tuple(answer.replica_ids)
        seen = (answer.quorum_id, members)
        if seen != self._seen or answer.max_step > step:
            text = repr((seen, answer.max_step)).encode()
            self._key = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
            self._seen = seen
        self.formed = Formed(key=self._key, number=answer.quorum_id, replica_ids=members, rank=answer.replica_rank)
        answer.quorum_id = self._key
        answer.max_step &= (1 << _STEP_BITS) - 1
        return answer


class QuorumSeat:
    """The requests of one rank. All ranks of a replica announce together."""

    def __init__(self, manager: Manager) -> None:
        """``manager`` is in asynchronous quorum mode, without state functions: it never heals anybody."""
        self._manager = manager
        self._client = FencedClient(manager._client)
        manager._client = self._client
        self._request: concurrent.futures.Future[None] | None = None
        # The others may have had this replica's last incarnation in their group, under the same id.
        self.rebuild_group(broken=True)

    @property
    def pending(self) -> bool:
        """Whether a request was announced and not taken."""
        return self._request is not None

    @property
    def fired(self) -> bool:
        """Whether the pending request was answered, or failed."""
        return self._request is not None and self._request.done()

    def announce(self, outer_step: int) -> None:
        """Ask for a quorum at ``outer_step``, without waiting; nothing if a request is pending."""
        self._manager.load_state_dict({"step": outer_step + COLD_START_STEP, "batches_committed": 0})
        if self._request is None:
            self._manager.start_quorum(allow_heal=False)
            self._request = self._manager._quorum_future

    def wait(self, timeout_s: float) -> bool:
        """Wait for the answer; False if it did not come in time. True also if it was taken already."""
        request = self._request
        return request is None or bool(concurrent.futures.wait([request], timeout=timeout_s).done)

    def take(self) -> Formed:
        """The quorum that the pending request got. Its group is ready.

        Raises:
            QuorumFailed: the request failed, or the group could not be set up.
        """
        request, self._request = self._request, None
        assert request is not None, "nothing was announced"
        error = request.exception()
        if error is not None:
            # torchft would raise it again in every later request.
            self._manager._quorum_future = None
            raise QuorumFailed(f"no quorum: {error}") from error
        wrong = self._manager.errored()
        if wrong is not None:
            raise QuorumFailed(f"the group of the quorum was not set up: {wrong.original_exception}")
        assert self._client.formed is not None
        return self._client.formed

    def rebuild_group(self, broken: bool) -> None:
        """Whether the next quorum must set up its group anew although its members are the same: unless the last attempt
        was committed in a group that is still whole, and this replica is where that commit has left it."""
        self._client.stamp(broken)

    def shutdown(self) -> None:
        """Leave: no heartbeat from here on."""
        self._manager.shutdown(wait=False)


class QuorumCount:
    """Numbers quorums for people: the Lighthouse's number, plus the highest seen before each of its restarts."""

    def __init__(self) -> None:
        self.base = 0
        self._last = 0
        self._key = 0

    def see(self, formed: Formed) -> None:
        """A quorum came. A number that went back, or that stands for another group now, tells of a restart."""
        anew = formed.number == self._last and self._key not in (0, formed.key)
        if formed.number < self._last or anew:
            self.base += self._last
        self._last, self._key = formed.number, formed.key

    def agree(self, bases: Sequence[int]) -> int:
        """Take over the highest base among the members; gives the number to show."""
        self.base = max(bases)
        return self.base + self._last

    def to_list(self) -> list[int]:
        return [self.base, self._last, self._key]

    def follow(self, values: Sequence[int]) -> None:
        """Take over a peer's ``to_list``."""
        self.base, self._last, self._key = values
