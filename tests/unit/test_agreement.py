"""How attempts land: all ranks of all replicas in threads, with everything around the agreement in memory."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import pytest

from elastic_train.diloco.agreement import Agreement, Landed, Landing
from elastic_train.diloco.ballot import Choice, Vote
from elastic_train.diloco.control import ReplicaBroken
from elastic_train.diloco.doubt import Answer, Docket, Word
from elastic_train.diloco.flight import Flown
from elastic_train.diloco.metadata import Standing, judge
from elastic_train.diloco.quorum import Formed
from elastic_train.diloco.wire import WireError
from elastic_train.peer_ckpt.shards import combine
from tests.rows import NEWEST, ROW

TIMEOUT_S = 30.0
KEY = 0xAB
ATTEMPT = "ab.7"

Place = tuple[int, int]
"""Slot and rank."""
Fault = Literal["deaf", "incomplete", "ignorant", "elsewhere"]
"""What befalls a rank. Deaf: its group breaks in the vote, and only the others have seen it end. Incomplete: not all
data came. Ignorant: not even the metadata came. Elsewhere: it was in another quorum than the other ranks."""


class Meeting:
    """An all-gather between threads."""

    def __init__(self, size: int) -> None:
        self._rows: list[list[int]] = [[] for _ in range(size)]
        self._here = threading.Barrier(size)

    def gather(self, place: int, row: Sequence[int]) -> list[list[int]]:
        self._rows[place] = list(row)
        self._here.wait(TIMEOUT_S)
        rows = list(self._rows)
        self._here.wait(TIMEOUT_S)
        return rows


class Control:
    """A replica's control group as one rank has it."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        return self._meeting.gather(self.rank, row)

    def word(self, row: Sequence[int]) -> Any:
        rows = self.gather(row)

        class Heard:
            def heard(self) -> list[int]:
                return rows[0]

        return Heard()


class Wire:
    """A rank's group with its peers."""

    def __init__(self, place: int, meeting: Meeting, *, broken: bool, deaf: bool) -> None:
        self._place, self._meeting = place, meeting
        self._broken, self._deaf = broken, deaf
        self.aborted = False
        self.vote: Vote | None = None

    def gather_rows(self, row: Sequence[int]) -> list[list[int]]:
        self.vote = Vote.from_ints(row)
        if self._broken:
            raise WireError("a peer is gone")
        rows = self._meeting.gather(self._place, row)
        if self._deaf:
            raise WireError("a peer went too early")
        return rows

    def abort(self) -> None:
        self.aborted = True


class World:
    """Replicas of equally many ranks, which hold what they need for a candidate unless a fault says otherwise."""

    def __init__(
        self,
        *,
        replicas: int = 2,
        ranks: int = 2,
        faults: dict[Place, Fault] | None = None,
        rows: dict[int, dict[str, Any]] | None = None,
        parts: dict[Place, int] | None = None,
        dead: frozenset[int] = frozenset(),
        silent: frozenset[int] = frozenset(),
        doubt_bound_s: float = TIMEOUT_S,
    ) -> None:
        """
        Args:
            rows: by slot, what is not as usual in its metadata.
            parts: hashes of candidates that are not as usual.
            dead: in doubts, slots that no process is left of.
            silent: in doubts, slots that do not answer.
        """
        self.faults = faults or {}
        self.replicas, self.ranks = replicas, ranks
        self.parts = parts or {}
        self.dead, self.silent = dead, silent
        self.doubt_bound_s = doubt_bound_s
        self.rows = [
            replace(ROW, slot=slot, incarnation=10 + slot, **(rows or {}).get(slot, {})) for slot in range(replicas)
        ]
        self.standings = judge(self.rows)
        self.dockets = [Docket() for _ in range(replicas)]
        self.points: dict[Place, list[str]] = {place: [] for place in self.places}
        self.questions: list[tuple[int, int]] = []
        self.alive = 0
        broken = {rank for (_, rank), fault in self.faults.items() if fault in ("incomplete", "ignorant")}
        groups = [Meeting(replicas) for _ in range(ranks)]
        self.wires = {
            (slot, rank): Wire(slot, groups[rank], broken=rank in broken, deaf=self.faults.get((slot, rank)) == "deaf")
            for slot, rank in self.places
        }

    @property
    def places(self) -> list[Place]:
        return list(itertools.product(range(self.replicas), range(self.ranks)))

    def land(self) -> dict[Place, Landed]:
        """Let all land at the same time. Raises what the first of them raises."""
        controls = [Meeting(self.ranks) for _ in range(self.replicas)]
        with ThreadPoolExecutor(len(self.places)) as pool:
            landing = {
                (slot, rank): pool.submit(self._land, slot, rank, Control(rank, controls[slot]))
                for slot, rank in self.places
            }
        return {place: landed.result() for place, landed in landing.items()}

    def of_replicas(self) -> list[Landed]:
        """Let all land; the end of each replica's attempt, which is the same on all its ranks but for the time."""
        ends = {place: replace(landed, doubt_s=0.0) for place, landed in self.land().items()}
        assert all(ends[slot, rank] == ends[slot, 0] for slot, rank in self.places)
        return [ends[slot, 0] for slot in range(self.replicas)]

    def said(self) -> list[Answer]:
        """What the docket of each replica says of the attempt."""
        return [docket.answer(ATTEMPT, ()) for docket in self.dockets]

    def candidate(self, slot: int) -> int:
        return combine([self.parts.get((slot, rank), rank) for rank in range(self.ranks)])

    def flown(self, slot: int, rank: int) -> Flown:
        fault = self.faults.get((slot, rank))
        if fault == "ignorant":
            return Flown()
        return Flown(
            formed=Formed(
                key=KEY + (fault == "elsewhere"),
                number=1,
                replica_ids=tuple(f"replica_{i}:x" for i in range(self.replicas)),
                rank=slot,
            ),
            rows=self.rows,
            standings=self.standings,
            complete=fault != "incomplete",
        )

    def _land(self, slot: int, rank: int, control: Control) -> Landed:
        agreement = Agreement(
            slot=slot,
            control=control,  # type: ignore[arg-type]
            wire=self.wires[slot, rank],  # type: ignore[arg-type]
            docket=self.dockets[slot],
            peers=self,  # type: ignore[arg-type]
            at_point=self.points[slot, rank].append,
            alive=self._is_alive,
            doubt_bound_s=self.doubt_bound_s,
            combine=combine,
        )
        return agreement.land(self.flown(slot, rank), self.parts.get((slot, rank), rank))

    def _is_alive(self) -> None:
        self.alive += 1

    # What the agreement asks of ``Peers``.

    def ask(self, slot: int, incarnation: int, attempt: str, dead: frozenset[int]) -> Answer | None:
        self.questions.append((slot, incarnation))
        return None if slot in self.silent else self.dockets[slot].answer(attempt, dead)

    def is_dead(self, slot: int, incarnation: int) -> bool:
        assert incarnation == 10 + slot
        return slot in self.dead


NOVOTE, ABORTED, UNKNOWN = Answer(word=Word.NOVOTE), Answer(word=Word.ABORTED), Answer(word=Word.UNKNOWN)


def committed(candidate: int) -> Answer:
    return Answer(word=Word.COMMITTED, candidate=candidate)


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_hold_the_same_and_commit(ranks: int) -> None:
    world = World(ranks=ranks)
    candidate = combine(range(ranks))

    ends = world.of_replicas()

    assert ends == [Landed(landing=Landing.COMMITTED, candidate=candidate, voted=True, unbroken=True)] * 2
    assert world.said() == [committed(candidate)] * 2
    assert set(map(tuple, world.points.values())) == {("vote", "commit")}
    assert world.questions == []
    assert not any(wire.aborted for wire in world.wires.values())


@pytest.mark.parametrize("fault", ["incomplete", "ignorant", "elsewhere"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_with_a_rank_that_lacks_data_lets_nobody_commit(fault: Fault, rank: int) -> None:
    world = World(faults={(1, rank): fault})

    sound, lacking = world.of_replicas()

    assert (lacking.landing, lacking.voted, lacking.unbroken) == (Landing.ABORTED, False, False)
    assert lacking.why == "another rank of this replica lacks data"
    assert (sound.landing, sound.voted, sound.doubt) == (Landing.ABORTED, True, None)
    assert sound.why == "a replica voted no"
    # With another name for the attempt, or none, nobody will ever ask for it under this one.
    unnamed = rank == 0 and fault in ("ignorant", "elsewhere")
    assert world.said() == [ABORTED, UNKNOWN if unnamed else NOVOTE]
    assert not any("commit" in passed for passed in world.points.values())


def test_a_replica_that_lacks_data_leaves_its_attempt_closed_under_its_own_name() -> None:
    world = World(faults={(1, 0): "elsewhere"})

    world.land()

    assert world.dockets[1].answer("ac.7", ()) == NOVOTE


@pytest.mark.parametrize(
    "row", [{"outer_step": NEWEST - 1}, {"finite": False}, {"state_hash": 2}], ids=["behind", "non-finite", "diverged"]
)
def test_who_is_not_in_the_average_abstains_and_keeps_nobody_from_it(row: dict[str, Any]) -> None:
    world = World(replicas=3, rows={2: row})
    assert world.standings[:2] == [Standing.OK] * 2

    *ends, left_out = world.of_replicas()

    assert [end.landing for end in ends] == [Landing.COMMITTED] * 2
    assert (left_out.landing, left_out.voted, left_out.unbroken) == (Landing.LEFT_OUT, False, True)
    # Who abstains has no say in whether the others committed.
    assert world.said() == [committed(world.candidate(0))] * 2 + [UNKNOWN]
    assert world.points[2, 0] == ["vote"]
    assert [world.wires[2, rank].vote for rank in range(2)] == [Vote(choice=Choice.ABSTAIN)] * 2
    assert world.wires[0, 1].vote == Vote(choice=Choice.YES, candidate=world.candidate(0))


def test_who_abstains_and_lacks_data_is_not_left_out_for_certain() -> None:
    world = World(replicas=3, rows={2: {"finite": False}}, faults={(2, 1): "incomplete"})

    *ends, lacking = world.of_replicas()

    # The others heard the vote of rank 0.
    assert world.wires[2, 0].vote == Vote(choice=Choice.NO)
    assert [end.landing for end in ends] == [Landing.COMMITTED] * 2
    assert (lacking.landing, lacking.voted) == (Landing.ABORTED, False)
    assert world.said()[2] == UNKNOWN


@pytest.mark.parametrize(("replicas", "other", "minority"), [(3, 0, [0]), (3, 1, [1]), (2, 1, [1]), (2, 0, [1])])
def test_other_candidates_are_committed_by_nobody(replicas: int, other: int, minority: list[int]) -> None:
    world = World(replicas=replicas, parts={(other, 1): 99})

    ends = world.of_replicas()

    assert {end.landing for end in ends} == {Landing.MISMATCH}
    assert [slot for slot, end in enumerate(ends) if end.in_minority] == minority
    assert {end.why for end in ends} == {"replicas computed different candidates from the same data"}
    assert not any(end.unbroken or end.voted for end in ends)
    assert world.said() == [ABORTED] * replicas


def test_a_mismatch_that_one_rank_saw_is_known_to_the_other() -> None:
    world = World(replicas=3, parts={(2, 0): 99}, faults={(2, 0): "deaf", (0, 1): "deaf"})

    ends = world.of_replicas()

    assert {(end.landing, end.doubt) for end in ends} == {(Landing.MISMATCH, None)}
    assert [end.in_minority for end in ends] == [False, False, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_sees_the_vote_pass_speaks_for_its_replica(rank: int) -> None:
    world = World(faults={(1, rank): "deaf"})

    sound, torn = world.of_replicas()

    assert (sound.landing, sound.unbroken) == (Landing.COMMITTED, True)
    # Its group must be set up anew all the same.
    assert (torn.landing, torn.unbroken, torn.doubt) == (Landing.COMMITTED, False, None)
    assert world.said() == [committed(world.candidate(0))] * 2
    assert world.points[1, rank] == ["vote", "commit"]
    assert [place for place, wire in world.wires.items() if wire.aborted] == [(1, rank)]


def test_a_refusal_that_one_rank_saw_is_no_doubt() -> None:
    world = World(faults={(0, 0): "deaf", (1, 1): "elsewhere"})

    sound, _ = world.of_replicas()

    assert (sound.landing, sound.doubt) == (Landing.ABORTED, None)
    assert world.questions == []
    assert world.said() == [ABORTED, NOVOTE]


def test_who_saw_nothing_learns_that_a_peer_committed() -> None:
    world = World(faults={(1, 0): "deaf", (1, 1): "deaf"})
    candidate = world.candidate(0)

    sound, doubted = world.of_replicas()

    assert (sound.landing, sound.doubt) == (Landing.COMMITTED, None)
    assert doubted == Landed(
        landing=Landing.COMMITTED,
        candidate=candidate,
        voted=True,
        why="the vote broke off, and no replica had seen it pass",
        doubt="commit",
    )
    assert world.said() == [committed(candidate)] * 2
    assert [world.points[1, rank] for rank in (0, 1)] == [["vote", "commit"]] * 2
    assert set(world.questions) == {(0, 10)}


def test_who_saw_nothing_learns_that_a_peer_never_voted_yes() -> None:
    world = World(faults={(0, 0): "incomplete", (0, 1): "ignorant"})

    lacking, doubted = world.of_replicas()

    assert lacking.landing is Landing.ABORTED
    assert (doubted.landing, doubted.doubt, doubted.voted) == (Landing.ABORTED, "abort", True)
    assert world.said() == [NOVOTE, ABORTED]
    assert world.points[1, 0] == ["vote"]


def test_if_nobody_saw_it_pass_nobody_commits() -> None:
    world = World(replicas=3, faults={(slot, rank): "deaf" for slot in range(3) for rank in range(2)})

    ends = world.of_replicas()

    assert {(end.landing, end.doubt) for end in ends} == {(Landing.ABORTED, "abort")}
    assert world.said() == [ABORTED] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_dead_are_not_waited_for(ranks: int) -> None:
    world = World(
        ranks=ranks, faults={(slot, rank): "deaf" for slot in range(2) for rank in range(ranks)}, dead=frozenset({0, 1})
    )

    ends = world.of_replicas()

    assert [end.doubt for end in ends] == ["abort"] * 2
    assert world.questions == []


def test_a_doubt_that_nobody_ends_breaks_the_replica() -> None:
    world = World(
        faults={(slot, rank): "deaf" for slot in range(2) for rank in range(2)},
        silent=frozenset({0, 1}),
        doubt_bound_s=0.0,
    )

    with pytest.raises(ReplicaBroken, match="whether outer step 7 was committed could not be settled"):
        world.land()

    assert world.said() == [Answer(word=Word.DOUBT)] * 2
    assert not any("commit" in passed for passed in world.points.values())


def test_who_abstained_is_not_asked() -> None:
    faults: dict[Place, Fault] = {(slot, rank): "deaf" for slot in range(2) for rank in range(2)}
    world = World(replicas=3, rows={2: {"outer_step": NEWEST - 1}}, faults=faults)

    *ends, left_out = world.of_replicas()

    assert {end.doubt for end in ends} == {"abort"}
    assert left_out.landing is Landing.LEFT_OUT
    assert {slot for slot, _ in world.questions} == {0, 1}


def test_a_doubt_is_no_standstill_to_whoever_watches() -> None:
    """Rank 0 asks for a while, and all ranks say that they live."""
    world = World(faults={(1, 0): "deaf", (1, 1): "deaf"})
    answer, asked = world.ask, threading.Event()

    def answers_late(slot: int, incarnation: int, attempt: str, dead: frozenset[int]) -> Answer | None:
        if not asked.is_set():
            asked.set()
            return None
        return answer(slot, incarnation, attempt, dead)

    world.ask = answers_late  # type: ignore[method-assign]

    assert world.of_replicas()[1].landing is Landing.COMMITTED
    assert world.alive >= 2


FATES: list[Fault | None] = [None, "deaf", "incomplete"]


@pytest.mark.parametrize("first", FATES, ids=str)
def test_whatever_befalls_the_ranks_no_two_replicas_end_apart(first: Fault | None) -> None:
    places = list(itertools.product(range(2), range(2)))
    for rest in itertools.product(FATES, repeat=3):
        faults = {place: fate for place, fate in zip(places, (first, *rest), strict=True) if fate is not None}
        world = World(faults=faults)

        ends = world.of_replicas()

        lacking = "incomplete" in faults.values()
        seen = list(faults.values()).count("deaf") < 4
        expected = Landing.COMMITTED if seen and not lacking else Landing.ABORTED
        assert [end.landing for end in ends] == [expected] * 2, faults
        assert {answer.word for answer in world.said()} <= (
            {Word.COMMITTED} if expected is Landing.COMMITTED else {Word.ABORTED, Word.NOVOTE}
        ), faults
