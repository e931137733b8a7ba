"""What a replica does that voted yes and did not see the vote pass: was the sync committed, or not?

A peer can die inside the vote and leave one survivor that saw it pass and another that did not. If the second
aborted by itself, the two would go on from different anchors. So it asks the other voters, and decides on what they
say. What makes this safe is a promise. An asker tells whom it knows dead; who answers takes, for that attempt, no
"committed" from those members any more. Otherwise an answer grows old: A commits, C hears "doubt" from B, B hears
"committed" from A and commits, A dies, and C, adding up one doubt and one death, aborts what B committed.

Why no two members that live on can end apart: who aborts has, under one and the same set of dead members, heard from
each of the others that it had not committed. From then on none of them can be the first to commit: the vote is over
for it, and it may only believe a committed member outside that set, of which there is none.

Exact only if a member counts as dead when all its processes are gone, if an attempt has one name of its own, and if
the members asked are those whose yes the vote needed. Who abstained must not be asked, and must not say "novote".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

PAUSE_S = 0.02
"""Seconds between two rounds of questions."""

_INT64 = 2**63


class Word(StrEnum):
    """What a member can say about an attempt."""

    UNKNOWN = "unknown"
    """It has not begun here, or was long ago."""
    OPEN = "open"
    """Not decided: the vote can still pass here."""
    NOVOTE = "novote"
    """Never voted yes, and never will: nobody can commit."""
    DOUBT = "doubt"
    """Voted yes; the vote is over and was not seen to pass."""
    ABORTED = "aborted"
    COMMITTED = "committed"


_AFTER: dict[Word, frozenset[Word]] = {
    Word.OPEN: frozenset({Word.NOVOTE, Word.DOUBT, Word.ABORTED, Word.COMMITTED}),
    Word.DOUBT: frozenset({Word.ABORTED, Word.COMMITTED}),
    Word.NOVOTE: frozenset(),
    Word.ABORTED: frozenset(),
    Word.COMMITTED: frozenset(),
}


class IllegalWord(RuntimeError):
    """A member would contradict what it may already have told its peers about an attempt."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One member's answer about one attempt."""

    word: Word
    candidate: int = 0
    """Hash of the state committed, a signed 64-bit integer; 0 unless committed."""

    def as_mapping(self) -> dict[str, str | int]:
        """As it travels in JSON."""
        return {"word": self.word.value, "candidate": self.candidate}

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Answer:
        """Read what a peer sent.

        Raises:
            ValueError: it is no answer.
        """
        word, candidate = values.get("word"), values.get("candidate")
        if not isinstance(word, str) or type(candidate) is not int or not -_INT64 <= candidate < _INT64:
            raise ValueError(f"no answer about an attempt: {dict(values)}")
        return cls(word=Word(word), candidate=candidate)


_UNKNOWN = Answer(word=Word.UNKNOWN)


class Outcome(StrEnum):
    """How a doubt ended."""

    COMMIT = "commit"
    ABORT = "abort"
    UNSETTLED = "unsettled"
    """Not within the bound. The replica must restart and heal; it must neither commit nor go on."""


@dataclass(kw_only=True)
class _Entry:
    answer: Answer = field(default_factory=lambda: Answer(word=Word.OPEN))
    renounced: set[int] = field(default_factory=set)


class Docket:
    """What a replica says about its last attempts, and what it promised. One per replica, on rank 0.

    The engine's thread writes; ``answer`` is called by the threads of a server.
    """

    def __init__(self, *, keep: int = 16) -> None:
        """
        Args:
            keep: attempts remembered. A peer that asks about an older one hears "unknown", and restarts in the end.

        Raises:
            ValueError: ``keep`` < 1.
        """
        if keep < 1:
            raise ValueError(f"a docket must keep at least one attempt, not {keep}")
        self._keep = keep
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    def open(self, attempt: str) -> None:
        """Begin an attempt, before anything is sent in it: so whoever votes yes finds it open on every member.

        Its name must be the same on all members, and never come again.

        Raises:
            IllegalWord: the attempt is known already.
        """
        with self._lock:
            if attempt in self._entries:
                raise IllegalWord(f"attempt {attempt} was opened before: it is {self._entries[attempt].answer.word}")
            self._entries[attempt] = _Entry()
            while len(self._entries) > self._keep:
                del self._entries[next(iter(self._entries))]

    def novote(self, attempt: str) -> None:
        """This replica has not voted yes, and will not. Raises IllegalWord, as all that follow."""
        self._say(attempt, Answer(word=Word.NOVOTE))

    def doubt(self, attempt: str) -> None:
        """Every rank's vote is over, and none was seen to pass or to be refused."""
        self._say(attempt, Answer(word=Word.DOUBT))

    def aborted(self, attempt: str) -> None:
        """The vote was refused, or the doubt ended so."""
        self._say(attempt, Answer(word=Word.ABORTED))

    def committed(self, attempt: str, candidate: int) -> None:
        """Some rank saw the vote pass for ``candidate``."""
        self._say(attempt, Answer(word=Word.COMMITTED, candidate=candidate))

    def accept(self, attempt: str, member: int, candidate: int) -> bool:
        """End a doubt by the word of a member that committed ``candidate``.

        Returns:
            Whether it counts. Not if this replica promised meanwhile to take no word from that member.
        """
        with self._lock:
            if member in self._entry(attempt).renounced:
                return False
            self._write(attempt, Answer(word=Word.COMMITTED, candidate=candidate))
            return True

    def answer(self, attempt: str, dead: Collection[int]) -> Answer:
        """Answer a peer that knows ``dead`` (slots) dead, and promise to believe none of them about this attempt."""
        with self._lock:
            entry = self._entries.get(attempt)
            if entry is None:
                return _UNKNOWN
            entry.renounced.update(dead)
            return entry.answer

    def _say(self, attempt: str, answer: Answer) -> None:
        with self._lock:
            self._write(attempt, answer)

    def _write(self, attempt: str, answer: Answer) -> None:
        entry = self._entry(attempt)
        if answer == entry.answer:
            return
        if answer.word not in _AFTER[entry.answer.word]:
            raise IllegalWord(f"attempt {attempt} is {entry.answer.word} and cannot become {answer.word}")
        entry.answer = answer

    def _entry(self, attempt: str) -> _Entry:
        if attempt not in self._entries:
            raise IllegalWord(f"attempt {attempt} was never opened, or is forgotten")
        return self._entries[attempt]


Ask = Callable[[int, str, frozenset[int]], Answer | None]
"""Puts a member (slot) the question about an attempt, with the slots known dead. None: no answer, which says nothing.
Must ask the incarnation that voted, and must return within a short time."""


def settle(
    attempt: str,
    candidate: int,
    peers: Collection[int],
    docket: Docket,
    *,
    ask: Ask,
    is_dead: Callable[[int], bool],
    bound_s: float,
    monotonic: Callable[[], float],
    wait: Callable[[float], None],
) -> Outcome:
    """Settle a doubt, by rank 0 of the replica; the outcome is then in the docket, and is the word of all its ranks.

    It commits on meeting a peer that committed exactly ``candidate`` and was not renounced. It aborts when a peer never
    voted yes, or when every peer is dead or answered "doubt" or "aborted" under the set of dead members that is known
    now. A death that becomes known makes the earlier answers void: everybody is asked again.

    Args:
        attempt: opened in ``docket``; the vote is over on every rank of this replica.
        candidate: hash of what this replica voted yes for, a signed 64-bit integer.
        peers: slots of the other members whose yes the vote needed.
        is_dead: whether all processes of the incarnation that voted are gone for good; no guess.
        bound_s: seconds after which no further round of questions begins.
        wait: waits about so many seconds.

    Raises:
        IllegalWord: the docket has another outcome of the attempt.
    """
    docket.doubt(attempt)
    end = monotonic() + bound_s
    dead: frozenset[int] = frozenset()
    answered_under: dict[int, frozenset[int]] = {}
    while True:
        before = dead
        for peer in sorted(peers):
            if peer in dead or answered_under.get(peer) == dead:
                continue
            if is_dead(peer):
                dead |= {peer}
                continue
            answer = ask(peer, attempt, dead)
            if answer is None:
                continue
            if answer == Answer(word=Word.COMMITTED, candidate=candidate) and docket.accept(attempt, peer, candidate):
                return Outcome.COMMIT
            if answer.word is Word.NOVOTE:
                docket.aborted(attempt)
                return Outcome.ABORT
            if answer.word in (Word.DOUBT, Word.ABORTED):
                answered_under[peer] = dead
        if all(peer in dead or answered_under.get(peer) == dead for peer in peers):
            docket.aborted(attempt)
            return Outcome.ABORT
        if monotonic() >= end:
            return Outcome.UNSETTLED
        if dead == before:
            wait(PAUSE_S)
