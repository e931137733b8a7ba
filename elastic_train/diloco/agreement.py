"""How the ranks of a replica, and the replicas, agree that a candidate becomes the next anchor.

First the ranks tell each other what they hold; only if all of them hold complete data does the replica vote yes. Then
every rank votes in its own group with its peers. Any rank that sees the vote pass commits for the whole replica: all
who voted yes hold the same candidate on all their ranks. A yes without any rank that saw the vote pass is a doubt,
which the peers resolve (``diloco.doubt``).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from elastic_train.diloco.ballot import Choice, Result, Vote, count, minority
from elastic_train.diloco.control import ControlGroup, ReplicaBroken
from elastic_train.diloco.doubt import Docket, Outcome, settle
from elastic_train.diloco.engine import FaultHook
from elastic_train.diloco.flight import Flown
from elastic_train.diloco.metadata import Row, Standing
from elastic_train.diloco.peers import Peers
from elastic_train.diloco.wire import Wire, WireError

_OUTCOMES = (Outcome.COMMIT, Outcome.ABORT, Outcome.UNSETTLED)
_NOT_YET = -1


class Landing(Enum):
    """How an attempt ended for this replica."""

    COMMITTED = "committed"
    LEFT_OUT = "left out"
    """It took no part in the average: others may have committed."""
    ABORTED = "aborted"
    MISMATCH = "mismatch"
    """All held complete data and did not compute the same from it."""


@dataclass(frozen=True, kw_only=True)
class Landed:
    """The end of an attempt, the same on all ranks of the replica."""

    landing: Landing
    candidate: int = 0
    """Hash over all ranks."""
    voted: bool = False
    """Whether this replica voted for ``candidate``."""
    why: str = ""
    """Why it was not committed."""
    unbroken: bool = False
    """Whether the group can be used again."""
    in_minority: bool = False
    """After a mismatch: whether most others computed something else."""
    doubt: str | None = None
    """How a doubt ended, if there was one."""
    doubt_s: float = 0.0


class Agreement:
    """Lands the attempts of one rank."""

    def __init__(
        self,
        *,
        slot: int,
        control: ControlGroup,
        wire: Wire,
        docket: Docket,
        peers: Peers,
        at_point: FaultHook,
        alive: Callable[[], None],
        doubt_bound_s: float,
        combine: Callable[[list[int]], int],
    ) -> None:
        """
        Args:
            combine: the hash of the replica's whole candidate, from its ranks' parts in rank order.
        """
        self._slot = slot
        self._control = control
        self._wire = wire
        self._docket = docket
        self._peers = peers
        self._at_point = at_point
        self._alive = alive
        self._pause = threading.Event()
        self._doubt_bound_s = doubt_bound_s
        self._combine = combine

    def land(self, flown: Flown, part: int) -> Landed:
        """Bring an attempt to its end. Every rank calls with its own part.

        Args:
            part: hash of this rank's whole outer state, if the candidate becomes the anchor.

        Raises:
            ReplicaBroken: another rank is gone, or a doubt could not be settled: the replica must restart.
        """
        knows = bool(flown.standings)
        standing = flown.standing if knows else None
        attempt = f"{flown.formed.key:x}.{flown.newest + 1}" if knows and flown.formed is not None else None
        if attempt is not None and standing is Standing.OK and self._control.rank == 0:
            self._docket.open(attempt)
        rows = self._control.gather([int(flown.complete), part, _fingerprint(flown)])
        whole = all(row[0] for row in rows) and len({row[2] for row in rows}) == 1
        yes = whole and standing is Standing.OK
        candidate = self._combine([row[1] for row in rows])
        if not yes:
            self._say(attempt if standing is Standing.OK else None, Docket.novote)
        choice = Choice.YES if yes else Choice.ABSTAIN if whole else Choice.NO
        votes, result = self._vote(flown, Vote(choice=choice, candidate=candidate if yes else 0))
        seen = self._control.gather(
            [int(result is wanted) for wanted in (Result.PASSED, Result.REFUSED, Result.MISMATCH)]
        )
        passed, refused, mismatch = (any(row[i] for row in seen) for i in range(3))
        unbroken = all(row[0] for row in seen)
        if not yes:
            if whole:
                return Landed(landing=Landing.LEFT_OUT, why="it was left out of the average", unbroken=unbroken)
            return Landed(landing=Landing.ABORTED, why="another rank of this replica lacks data")
        assert attempt is not None
        if passed:
            self._at_point("commit")
            self._say(attempt, lambda docket, name: docket.committed(name, candidate))
            return Landed(landing=Landing.COMMITTED, candidate=candidate, voted=True, unbroken=unbroken)
        if mismatch:
            self._say(attempt, Docket.aborted)
            mine = bool(votes) and self._slot in minority(votes, [row.slot for row in flown.rows])
            in_minority = any(row[0] for row in self._control.gather([int(mine)]))
            why = "replicas computed different candidates from the same data"
            return Landed(landing=Landing.MISMATCH, why=why, in_minority=in_minority)
        if refused:
            self._say(attempt, Docket.aborted)
            return Landed(landing=Landing.ABORTED, candidate=candidate, voted=True, why="a replica voted no")
        assert flown.formed is not None
        return self._doubt(attempt, candidate, flown.rows, flown.standings, flown.formed.rank)

    def _vote(self, flown: Flown, mine: Vote) -> tuple[list[Vote], Result | None]:
        """This rank's vote in its group; no result if the group broke."""
        if not flown.complete:
            return [], None
        self._at_point("vote")
        try:
            votes = [Vote.from_ints(row) for row in self._wire.gather_rows(mine.to_ints())]
        except WireError:
            self._wire.abort()
            return [], None
        return votes, count(votes, flown.standings)

    def _doubt(self, attempt: str, candidate: int, rows: list[Row], standings: list[Standing], place: int) -> Landed:
        began = time.monotonic()
        outcome = Outcome.UNSETTLED
        # Not all at the same time: whoever gives up last is who keeps the state.
        bound_s = self._doubt_bound_s * (1 + place / 4)
        if self._control.rank == 0:
            incarnations = {
                row.slot: row.incarnation
                for row, standing in zip(rows, standings, strict=True)
                if standing is Standing.OK and row.slot != self._slot
            }
            outcome = settle(
                attempt,
                candidate,
                incarnations.keys(),
                self._docket,
                ask=lambda slot, name, dead: self._peers.ask(slot, incarnations[slot], name, dead),
                is_dead=lambda slot: self._peers.is_dead(slot, incarnations[slot]),
                bound_s=bound_s,
                monotonic=time.monotonic,
                wait=self._wait,
            )
        while (word := self._control.word([_OUTCOMES.index(outcome)]).heard()[0]) == _NOT_YET:
            self._alive()
        outcome = _OUTCOMES[word]
        if outcome is Outcome.UNSETTLED:
            step = max(row.outer_step for row in rows) + 1
            raise ReplicaBroken(
                f"whether outer step {step} was committed could not be settled with the peers within {bound_s:g} s"
            )
        landing = Landing.COMMITTED if outcome is Outcome.COMMIT else Landing.ABORTED
        if landing is Landing.COMMITTED:
            self._at_point("commit")
        return Landed(
            landing=landing,
            candidate=candidate,
            voted=True,
            why="the vote broke off, and no replica had seen it pass",
            doubt=outcome.value,
            doubt_s=time.monotonic() - began,
        )

    def _wait(self, seconds: float) -> None:
        """Between two rounds of questions by rank 0; the others learn that it is still asking."""
        self._control.word([_NOT_YET]).heard()
        self._alive()
        self._pause.wait(seconds)

    def _say(self, attempt: str | None, what: Callable[[Docket, str], None]) -> None:
        if attempt is not None and self._control.rank == 0:
            what(self._docket, attempt)


def _fingerprint(flown: Flown) -> int:
    """Differs between ranks that are not in the same quorum, or heard different metadata."""
    key = flown.formed.key if flown.formed is not None else 0
    return zlib.crc32(repr((key, [row.to_ints() for row in flown.rows])).encode())
