from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.clock import ManualClock
from elastic_train.diloco.doubt import Answer, Ask, Docket, IllegalWord, Outcome, Word, settle

ATTEMPT = "17.3"
HASH = -(2**63)
OTHER_HASH = 2**63 - 1
A, B, C = 0, 1, 2

DOUBT = Answer(word=Word.DOUBT)
ABORTED = Answer(word=Word.ABORTED)
NOVOTE = Answer(word=Word.NOVOTE)
OPEN = Answer(word=Word.OPEN)
UNKNOWN = Answer(word=Word.UNKNOWN)
COMMITTED = Answer(word=Word.COMMITTED, candidate=HASH)


def voted_yes() -> Docket:
    docket = Docket()
    docket.open(ATTEMPT)
    return docket


def settled(
    docket: Docket,
    peers: Collection[int],
    ask: Ask,
    is_dead: Callable[[int], bool] = lambda slot: False,
    bound_s: float = 1.0,
) -> Outcome:
    """settle() with time that only its waits move."""
    clock = ManualClock()
    return settle(
        ATTEMPT,
        HASH,
        peers,
        docket,
        ask=ask,
        is_dead=is_dead,
        bound_s=bound_s,
        monotonic=clock.monotonic,
        wait=clock.advance,
    )


class Script:
    """Peers that say what they are told to, the last of it for ever; and who was asked, with which dead."""

    def __init__(self, **answers: list[Answer | None]) -> None:
        self._answers = {int(slot.removeprefix("r")): says for slot, says in answers.items()}
        self.asked: list[tuple[int, frozenset[int]]] = []

    def __call__(self, slot: int, attempt: str, dead: frozenset[int]) -> Answer | None:
        assert attempt == ATTEMPT
        self.asked.append((slot, dead))
        says = self._answers[slot]
        return says.pop(0) if len(says) > 1 else says[0]


# ---- the case that went wrong before answers were bound to the dead ----


def test_a_doubt_is_void_once_a_death_is_known() -> None:
    """A commits; C hears "doubt" from B; B hears "committed" from A and commits; A dies. C must not add up the old
    doubt and the death."""
    docket_a, docket_b, docket_c = voted_yes(), voted_yes(), voted_yes()
    docket_a.committed(ATTEMPT, HASH)
    docket_b.doubt(ATTEMPT)
    dead: set[int] = set()
    asked: list[tuple[int, frozenset[int], Word | None]] = []

    def ask(slot: int, attempt: str, known_dead: frozenset[int]) -> Answer | None:
        answer = docket_b.answer(attempt, known_dead) if slot == B else None
        asked.append((slot, known_dead, answer.word if answer else None))
        if slot == B and not dead:
            assert docket_b.accept(attempt, A, docket_a.answer(attempt, ()).candidate)
            dead.add(A)
        return answer

    assert settled(docket_c, {A, B}, ask, dead.__contains__) is Outcome.COMMIT
    assert asked == [
        (A, frozenset(), None),
        (B, frozenset(), Word.DOUBT),
        (B, frozenset({A}), Word.COMMITTED),
    ]
    assert docket_c.answer(ATTEMPT, ()) == COMMITTED


def test_an_answer_that_was_under_way_when_the_promise_was_given_does_not_count() -> None:
    """The other order: A's "committed" reaches B only after B has told C "doubt" with A dead, and C has aborted."""
    docket_a, docket_b, docket_c = voted_yes(), voted_yes(), voted_yes()
    docket_a.committed(ATTEMPT, HASH)
    dead: set[int] = set()
    of_c: list[Outcome] = []

    def c_asks(slot: int, attempt: str, known_dead: frozenset[int]) -> Answer | None:
        assert slot == B
        return docket_b.answer(attempt, known_dead)

    def b_asks(slot: int, attempt: str, known_dead: frozenset[int]) -> Answer | None:
        if slot == C:
            return docket_c.answer(attempt, known_dead)
        answer = docket_a.answer(attempt, known_dead)
        dead.add(A)
        of_c.append(settled(docket_c, {A, B}, c_asks, dead.__contains__))
        return answer

    assert settled(docket_b, {A, C}, b_asks, dead.__contains__) is Outcome.ABORT
    assert of_c == [Outcome.ABORT]


# ---- what each answer is worth ----


def test_a_peer_that_committed_my_candidate_commits_me() -> None:
    docket = voted_yes()

    assert settled(docket, {1, 2}, Script(r1=[None], r2=[OPEN, COMMITTED])) is Outcome.COMMIT
    assert docket.answer(ATTEMPT, ()) == COMMITTED


@pytest.mark.parametrize("first", [DOUBT, ABORTED])
def test_all_in_doubt_or_aborted_abort(first: Answer) -> None:
    docket = voted_yes()
    script = Script(r1=[first], r2=[None, OPEN, DOUBT])

    assert settled(docket, {1, 2}, script) is Outcome.ABORT
    assert docket.answer(ATTEMPT, ()) == ABORTED
    assert [slot for slot, _ in script.asked] == [1, 2, 2, 2], "an answer that still counts is not asked for again"


def test_a_peer_that_never_voted_yes_aborts_me_at_once() -> None:
    docket = voted_yes()
    script = Script(r1=[NOVOTE], r2=[None])

    assert settled(docket, {1, 2}, script) is Outcome.ABORT
    assert script.asked == [(1, frozenset())]
    assert docket.answer(ATTEMPT, ()) == ABORTED


def test_nobody_left_aborts() -> None:
    script = Script()

    assert settled(voted_yes(), {1, 2}, script, lambda slot: True) is Outcome.ABORT
    assert script.asked == []


@pytest.mark.parametrize("says", [None, OPEN, UNKNOWN, Answer(word=Word.COMMITTED, candidate=OTHER_HASH)])
def test_what_settles_nothing_lasts_to_the_bound(says: Answer | None) -> None:
    docket = voted_yes()
    script = Script(r1=[DOUBT], r2=[says])

    assert settled(docket, {1, 2}, script, bound_s=1.0) is Outcome.UNSETTLED
    assert len(script.asked) > 10
    assert docket.answer(ATTEMPT, ()) == DOUBT


def test_a_peer_is_asked_at_least_once_however_short_the_bound() -> None:
    assert settled(voted_yes(), {1}, Script(r1=[COMMITTED]), bound_s=0.0) is Outcome.COMMIT


def test_each_newly_known_death_asks_everybody_again() -> None:
    script = Script(r1=[DOUBT], r2=[None], r3=[None], r4=[DOUBT])
    dead: set[int] = set()

    def is_dead(slot: int) -> bool:
        # 2 is found dead in the first round, 3 once everybody else has answered under that.
        if (4, frozenset({2})) in script.asked:
            dead.add(3)
        return slot in dead | {2}

    assert settled(voted_yes(), {1, 2, 3, 4}, script, is_dead) is Outcome.ABORT
    assert [dead for slot, dead in script.asked if slot == 1] == [
        frozenset(),
        frozenset({2}),
        frozenset({2, 3}),
    ]
    assert (4, frozenset({2, 3})) in script.asked


def test_a_renounced_member_is_not_believed_while_it_still_answers() -> None:
    docket = voted_yes()
    docket.answer(ATTEMPT, {1})

    assert settled(docket, {1}, Script(r1=[COMMITTED])) is Outcome.UNSETTLED
    assert settled(docket, {1}, Script(r1=[COMMITTED]), lambda slot: True) is Outcome.ABORT


def test_a_doubt_about_what_is_settled_is_an_error() -> None:
    docket = voted_yes()
    docket.committed(ATTEMPT, HASH)

    with pytest.raises(IllegalWord, match=r"attempt 17\.3 is committed and cannot become doubt"):
        settled(docket, {1}, Script())


# ---- the docket ----


def test_a_docket_answers_what_was_said_last() -> None:
    docket = Docket()
    assert docket.answer("1", ()) == UNKNOWN
    docket.open("1")
    assert docket.answer("1", ()) == OPEN
    docket.doubt("1")
    assert docket.answer("1", ()) == DOUBT
    docket.committed("1", HASH)
    assert docket.answer("1", ()) == COMMITTED


@pytest.mark.parametrize("last", ["novote", "aborted", "committed"])
@pytest.mark.parametrize("then", ["novote", "doubt", "aborted", "committed", "other"])
def test_a_final_word_stands(last: str, then: str) -> None:
    says: dict[str, Callable[[Docket], None]] = {
        "novote": lambda docket: docket.novote(ATTEMPT),
        "doubt": lambda docket: docket.doubt(ATTEMPT),
        "aborted": lambda docket: docket.aborted(ATTEMPT),
        "committed": lambda docket: docket.committed(ATTEMPT, HASH),
        "other": lambda docket: docket.committed(ATTEMPT, OTHER_HASH),
    }
    docket = voted_yes()
    says[last](docket)
    said = docket.answer(ATTEMPT, ())

    if then == last:
        says[then](docket)
    else:
        with pytest.raises(IllegalWord, match="cannot become"):
            says[then](docket)
    assert docket.answer(ATTEMPT, ()) == said


def test_who_voted_yes_cannot_take_it_back() -> None:
    docket = voted_yes()
    docket.doubt(ATTEMPT)

    with pytest.raises(IllegalWord, match="is doubt and cannot become novote"):
        docket.novote(ATTEMPT)


def test_a_promise_binds_for_its_attempt_and_its_members() -> None:
    docket = Docket()
    for attempt in ("1", "2"):
        docket.open(attempt)
        docket.doubt(attempt)
    docket.answer("1", {3})
    docket.answer("1", ())

    assert not docket.accept("1", 3, HASH)
    assert docket.answer("1", ()) == DOUBT
    assert docket.accept("2", 3, HASH)
    assert docket.accept("1", 4, HASH)


def test_a_docket_forgets_the_oldest_attempts() -> None:
    docket = Docket(keep=2)
    for attempt in ("1", "2", "3"):
        docket.open(attempt)

    assert [docket.answer(attempt, ()) for attempt in ("1", "2", "3")] == [UNKNOWN, OPEN, OPEN]
    with pytest.raises(IllegalWord, match="attempt 1 was never opened, or is forgotten"):
        docket.aborted("1")
    with pytest.raises(ValueError, match="at least one attempt, not 0"):
        Docket(keep=0)


def test_an_attempt_is_opened_once() -> None:
    docket = voted_yes()
    docket.novote(ATTEMPT)

    with pytest.raises(IllegalWord, match=r"attempt 17\.3 was opened before: it is novote"):
        docket.open(ATTEMPT)


@given(st.sampled_from(Word), st.integers(-(2**63), 2**63 - 1))
def test_an_answer_survives_its_journey(word: Word, candidate: int) -> None:
    answer = Answer(word=word, candidate=candidate)

    assert Answer.from_mapping(answer.as_mapping()) == answer


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"word": "doubt"},
        {"word": "perhaps", "candidate": 0},
        {"word": None, "candidate": 0},
        {"word": "committed", "candidate": "0"},
        {"word": "committed", "candidate": True},
        {"word": "committed", "candidate": 2**63},
    ],
)
def test_what_is_no_answer_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no answer|is not a valid Word"):
        Answer.from_mapping(values)


# ---- a network of members that die, and messages that get lost ----

SEEDS = range(4000)


class Killed(BaseException):
    """Ends the thread of a member that died."""


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What goes wrong in a simulated run."""

    deaths: int = 0
    """At most."""
    death: float = 0.0
    """Chance of one at each step of the run."""
    last_words: float = 0.0
    """Chance that who has answered dies while its answer is under way."""
    loss: float = 0.0
    """Chance that a question is lost, and that an answer is."""
    known: float = 1.0
    """Chance that a death is known to who looks."""
    burst_ends: float = 0.25
    """Chance at each step that another member runs next."""
    novote: float = 0.0
    passes: float = 0.5
    """Chance that a member sees a vote pass that all said yes in."""
    bound_s: float = 0.5


@dataclass(kw_only=True)
class Member:
    """A member's docket, and the thread that runs its part. Only who holds the baton runs."""

    slot: int
    docket: Docket
    baton: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    clock: ManualClock = field(default_factory=ManualClock)
    alive: bool = True
    yes: bool = False
    outcome: Outcome | None = None
    by_doubt: bool = False


class Network:
    """One attempt of a few members, run step by step in an order, with deaths and losses, that a seed decides."""

    def __init__(
        self,
        seed: int,
        weather: Weather,
        *,
        make_docket: type[Docket] = Docket,
        tell_dead: bool = True,
        cache: bool = False,
    ) -> None:
        self._rng = random.Random(seed)
        self._weather = weather
        self._tell_dead = tell_dead
        self._cache = cache
        self._over = threading.Event()
        self._deaths = weather.deaths
        self.members = [Member(slot=slot, docket=make_docket()) for slot in range(self._rng.choice([2, 3, 3, 4]))]
        self._refuser = self._rng.choice(self.members) if self._happens(weather.novote) else None

    def run(self) -> None:
        for member in self.members:
            member.baton.acquire()
            member.thread = threading.Thread(target=self._body, args=(member,))
            member.thread.start()
        self._rng.choice(self.members).baton.release()
        assert self._over.wait(60)

    @property
    def survivors(self) -> list[Member]:
        return [member for member in self.members if member.alive]

    def _happens(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _pause(self, member: Member, burst_ends: float | None = None) -> None:
        """Let others run, any number of steps; does not return to who died meanwhile.

        Members run in bursts: what is rare needs one of them to stand still while another gets far.
        """
        if self._happens(self._weather.death):
            self._kill(self._rng.choice(self.members))
        if self._happens(self._weather.burst_ends if burst_ends is None else burst_ends):
            self._hand_on()
            member.baton.acquire()
        if not member.alive:
            raise Killed

    def _kill(self, member: Member) -> None:
        if self._deaths:
            self._deaths -= 1
            member.alive = False

    def _hand_on(self) -> None:
        running = [other for other in self.members if other.thread is not None]
        if running:
            self._rng.choice(running).baton.release()
        else:
            self._over.set()

    def _body(self, member: Member) -> None:
        member.baton.acquire()
        try:
            if member.alive:
                member.outcome = self._attempt(member)
                if member.outcome is Outcome.UNSETTLED:
                    member.alive = False  # It restarts.
        except Killed:
            pass
        finally:
            member.thread = None
            self._hand_on()

    def _attempt(self, member: Member) -> Outcome:
        member.docket.open(ATTEMPT)
        self._pause(member)
        if member is self._refuser:
            member.docket.novote(ATTEMPT)
            return Outcome.ABORT
        member.yes = True
        self._pause(member)
        while not all(other.yes for other in self.members) and self._happens(0.9):
            self._pause(member, 1.0)
        if all(other.yes for other in self.members) and self._happens(self._weather.passes):
            member.docket.committed(ATTEMPT, HASH)
            return Outcome.COMMIT
        if self._refuser is not None and self._happens(0.3):
            member.docket.aborted(ATTEMPT)
            return Outcome.ABORT
        member.by_doubt = True
        heard: dict[int, Answer] = {}

        def ask(slot: int, attempt: str, dead: frozenset[int]) -> Answer | None:
            if self._cache and slot in heard:
                return heard[slot]
            self._pause(member)
            peer = self.members[slot]
            if self._happens(self._weather.loss) or not peer.alive:
                return None
            answer = peer.docket.answer(attempt, dead if self._tell_dead else frozenset())
            if self._happens(self._weather.last_words):
                self._kill(peer)
            for _ in range(self._rng.choice([0, 0, 1, 8])):
                self._pause(member, 1.0)
            if self._happens(self._weather.loss):
                return None
            if answer.word is Word.DOUBT:
                heard[slot] = answer
            return answer

        def is_dead(slot: int) -> bool:
            self._pause(member)
            return not self.members[slot].alive and self._happens(self._weather.known)

        def wait(seconds: float) -> None:
            member.clock.advance(seconds)
            self._pause(member)

        return settle(
            ATTEMPT,
            HASH,
            [other.slot for other in self.members if other is not member],
            member.docket,
            ask=ask,
            is_dead=is_dead,
            bound_s=self._weather.bound_s,
            monotonic=member.clock.monotonic,
            wait=wait,
        )


def weather_of(seed: int) -> Weather:
    """Other weather for each seed, from calm to wild."""
    rng = random.Random(f"weather {seed}")
    return Weather(
        deaths=rng.choice([0, 1, 1, 1, 2, 3]),
        death=rng.choice([0.0, 0.02, 0.1]),
        last_words=rng.choice([0.0, 0.2, 0.5]),
        loss=rng.choice([0.0, 0.1, 0.4]),
        known=rng.choice([0.5, 0.8, 1.0]),
        burst_ends=rng.choice([0.05, 0.15, 0.5]),
        novote=rng.choice([0.0, 0.0, 0.3]),
        passes=rng.choice([0.2, 0.3, 0.5]),
    )


def ends_apart(network: Network) -> bool:
    """Whether, once it has run, one survivor committed and another aborted."""
    network.run()
    return {Outcome.COMMIT, Outcome.ABORT} <= {member.outcome for member in network.survivors}


def test_survivors_never_end_apart() -> None:
    ends: Counter[tuple[Outcome | None, bool]] = Counter()
    for seed in SEEDS:
        network = Network(seed, weather_of(seed))

        assert not ends_apart(network), f"seed {seed}"
        if any(member.outcome is Outcome.COMMIT for member in network.members):
            assert all(member.yes for member in network.members), f"seed {seed}"
        for member in network.survivors:
            word = member.docket.answer(ATTEMPT, ()).word
            assert (word is Word.COMMITTED) == (member.outcome is Outcome.COMMIT), f"seed {seed}"
        ends.update((member.outcome, member.by_doubt) for member in network.survivors)

    # All of it happened often: the runs are not all calm, and not all hopeless.
    assert ends[Outcome.COMMIT, True] > 300
    assert ends[Outcome.ABORT, True] > 300
    assert ends[Outcome.COMMIT, False] > 300


def test_a_network_that_works_settles_every_doubt() -> None:
    for seed in range(500):
        network = Network(seed, Weather(deaths=2, death=0.05, novote=0.05, bound_s=60.0))

        assert not ends_apart(network), f"seed {seed}"
        assert Outcome.UNSETTLED not in {member.outcome for member in network.members}, f"seed {seed}"


class Credulous(Docket):
    """Gives its promises and does not keep them."""

    def accept(self, attempt: str, member: int, candidate: int) -> bool:
        self.committed(attempt, candidate)
        return True


def test_the_simulation_would_find_promises_not_kept() -> None:
    assert any(ends_apart(Network(seed, weather_of(seed), make_docket=Credulous)) for seed in SEEDS)


def test_the_simulation_would_find_questions_that_do_not_tell_the_dead() -> None:
    assert any(ends_apart(Network(seed, weather_of(seed), tell_dead=False)) for seed in SEEDS)


def test_the_simulation_would_find_old_answers_counted() -> None:
    assert any(ends_apart(Network(seed, weather_of(seed), cache=True)) for seed in SEEDS)
