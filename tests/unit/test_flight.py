"""How an attempt comes to its candidate: all members in threads, over real groups, each with parameters of its own."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from elastic_train.diloco.compress import make_codec
from elastic_train.diloco.engine import ForeignReplica
from elastic_train.diloco.flat import FlatFragment, flatten
from elastic_train.diloco.flight import Contribution, Flight, Flown, Guarded, NonFiniteMean, Pilot
from elastic_train.diloco.metadata import Row, Standing
from elastic_train.diloco.outer import OuterOptimizer
from elastic_train.diloco.quorum import Formed, QuorumCount, QuorumFailed, QuorumSeat
from elastic_train.diloco.reduce import Feedback, Reducer
from elastic_train.diloco.wire import Wire, WireError
from tests.rows import NEWEST, ROW
from tests.wires import CPU, Members, members

TIMEOUT_S = 30.0
SIZES = (11, 7)
BUCKET_BYTES = 16
TOKENS = (10, 30, 5)
OUTER = OuterOptimizer(lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.01)


class Seat(QuorumSeat):
    """A request that is answered when the test says so, with a quorum or a failure."""

    def __init__(self, answer: Formed | Exception | None = None) -> None:
        self.here = threading.Event()
        self.waits = threading.Event()
        self._answer = answer

    def wait(self, timeout_s: float) -> bool:
        self.waits.set()
        return self.here.wait(timeout_s)

    def take(self) -> Formed:
        if isinstance(self._answer, Exception):
            raise self._answer
        assert self._answer is not None
        return self._answer


class Member:
    """One replica of one rank, which has trained since the anchor that all have."""

    def __init__(
        self,
        rank: int,
        wire: Wire,
        *,
        row: dict[str, Any],
        weighting: str = "tokens",
        compression: Literal["none", "bf16", "int8", "int4"] = "none",
        outer: OuterOptimizer = OUTER,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        common, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(100 + rank)
        self.rank, self.wire = rank, wire
        self.parameters = [nn.Parameter(torch.randn(size, generator=common)) for size in sizes]
        modules = [nn.ParameterList([parameter]) for parameter in self.parameters]
        self.fragments: list[FlatFragment] = flatten(modules, device=CPU, pin_memory=False)
        for fragment in self.fragments:
            fragment.committed.momentum.copy_(torch.randn(fragment.numel, generator=common))
        for parameter in self.parameters:
            parameter.data += torch.randn(parameter.shape, generator=own)
        self.row = replace(ROW, slot=rank, weight_tokens=TOKENS[rank], **row)
        self.progress = torch.full((2, 4), 10**rank, dtype=torch.int64)
        self.points: list[str] = []
        self.quorums: list[tuple[int, list[int]]] = []
        self.guard: Callable[[list[Row]], None] = lambda rows: None
        self.at_point: Callable[[str], None] = self.points.append
        self.count = QuorumCount()
        names = tuple(f"replica_{i}:x" for i in range(wire.world))
        self.formed = Formed(key=0xAB, number=3, replica_ids=names, rank=rank)
        self.seat = Seat(self.formed)
        self.gave_up = False
        self._abort, wire.abort = wire.abort, self._give_up  # type: ignore[method-assign]
        self.feedback = Feedback() if compression != "none" else None
        self.pilot = Pilot(
            quorum=self.seat,
            count=self.count,
            wire=wire,
            reducer=Reducer(wire, make_codec(compression)),
            outer=outer,
            fragments=self.fragments,
            weighting=weighting,
            bucket_bytes=BUCKET_BYTES,
            at_point=self._pass,
            guard=self._check,
            on_quorum=lambda number, rows: self.quorums.append((number, [row.slot for row in rows])),
        )

    def _give_up(self) -> None:
        self.gave_up = True
        self._abort()

    def _pass(self, point: str) -> None:
        self.at_point(point)

    def _check(self, rows: list[Row]) -> None:
        self.guard(rows)

    @property
    def fragment(self) -> int:
        """Which one this member brings."""
        return self.row.outer_step % len(self.fragments)

    def fly(self, *, stored: bool = False) -> Flown:
        fragment, kept = self.fragments[self.fragment], None
        if stored:
            kept = torch.empty(fragment.numel)
            fragment.pseudo_gradient(kept)
            # The inner steps beside the sync are no part of it.
            self.parameters[self.fragment].data += 9.0
        mine = Contribution(fragment=self.fragment, row=self.row, trained=0, progress=self.progress, stored=kept)
        return self.pilot.fly(mine, self.feedback)

    def agreed(self) -> list[int]:
        """What no attempt may touch: the outer state, and the parameters."""
        parameters = [hash(tuple(parameter.tolist())) for parameter in self.parameters]
        return [fragment.committed.hash() for fragment in self.fragments] + parameters

    def candidates(self) -> list[int]:
        return [fragment.candidate.hash() for fragment in self.fragments]


class World:
    """All members of one quorum."""

    def __init__(self, joined: Members, rows: dict[int, dict[str, Any]] | None = None, **settings: Any) -> None:
        self._joined = joined
        self.members = [
            Member(rank, wire, row=(rows or {}).get(rank, {}), **settings) for rank, wire in enumerate(joined.wires)
        ]

    def fly(self, **how: Any) -> list[Flown]:
        return self._joined.each(lambda rank: self.members[rank].fly(**how))

    def oracle(self, weights: Sequence[float], fragment: int = NEWEST % 2) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor and momentum of the candidate, in float64."""
        state = self.members[0].fragments[fragment].committed
        anchor, momentum = state.anchor.double(), state.momentum.double()
        outer = self.members[0].pilot._outer
        g = outer.weight_decay * anchor
        for member, weight in zip(self.members, weights, strict=True):
            if weight:
                g = g + weight * (anchor - member.parameters[fragment].detach().double())
        after = outer.momentum * momentum + g
        return anchor - outer.lr * (g + outer.momentum * after if outer.nesterov else after), after


@pytest.fixture(scope="module")
def pair() -> Iterator[Members]:
    """Two members, for attempts that leave their group whole."""
    with members(2) as joined:
        yield joined


@pytest.fixture(scope="module")
def three() -> Iterator[Members]:
    """The same of three."""
    with members(3) as joined:
        yield joined


def by_tokens(*ranks: int) -> list[float]:
    total = sum(TOKENS[rank] for rank in ranks)
    return [TOKENS[rank] / total if rank in ranks else 0.0 for rank in range(3)]


def check_candidate(
    member: Member,
    expected: tuple[torch.Tensor, torch.Tensor],
    fragment: int = NEWEST % 2,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    candidate = member.fragments[fragment].candidate
    torch.testing.assert_close(candidate.anchor.double(), expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(candidate.momentum.double(), expected[1], rtol=rtol, atol=atol)


# -- the candidate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("weighting", ["tokens", "uniform"])
@pytest.mark.parametrize("stored", [False, True])
def test_all_members_compute_the_weighted_step(world: int, weighting: str, stored: bool) -> None:
    with members(world) as joined:
        quorum = World(joined, weighting=weighting)
        total = sum(TOKENS[:world])
        shares = [TOKENS[rank] / total if weighting == "tokens" else 1 / world for rank in range(world)]
        expected = quorum.oracle(shares)

        ends = quorum.fly(stored=stored)
        assert not any(member.gave_up for member in quorum.members)

    for member, flown in zip(quorum.members, ends, strict=True):
        assert flown.error is None
        assert flown.complete
        assert flown.standing is Standing.OK
        check_candidate(member, expected)
        assert flown.candidate == member.fragments[0].candidate.hash()
        assert [row.slot for row in flown.counted] == list(range(world))
        assert flown.formed == member.formed
        assert flown.progress is not None
        assert flown.progress.tolist() == [[sum(10**rank for rank in range(world))] * 4] * 2
        assert member.points == ["reduce"]
    assert len({flown.candidate for flown in ends}) == 1


@pytest.mark.parametrize("outer_step", [NEWEST, NEWEST + 1])
def test_the_fragment_whose_turn_it_is_becomes_a_candidate(pair: Members, outer_step: int) -> None:
    quorum = World(pair, {rank: {"outer_step": outer_step} for rank in range(2)})
    expected = quorum.oracle([0.25, 0.75], outer_step % 2)
    before = [member.agreed() for member in quorum.members]

    quorum.fly()

    for member in quorum.members:
        check_candidate(member, expected, outer_step % 2)
        assert not member.fragments[1 - outer_step % 2].candidate.anchor.any()
    assert [member.agreed() for member in quorum.members] == before


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_step_is_that_of_torch(pair: Members, nesterov: bool) -> None:
    quorum = World(pair, outer=OuterOptimizer(lr=0.5, momentum=0.8, nesterov=nesterov, weight_decay=0.1))
    fragment = quorum.members[0].fragments[0]
    parameter = nn.Parameter(fragment.committed.anchor.clone())
    sgd = torch.optim.SGD([parameter], lr=0.5, momentum=0.8, nesterov=nesterov, weight_decay=0.1)
    sgd.state[parameter]["momentum_buffer"] = fragment.committed.momentum.clone()
    deltas = [member.fragments[0].committed.anchor - member.parameters[0].detach() for member in quorum.members]
    parameter.grad = 0.25 * deltas[0] + 0.75 * deltas[1]

    quorum.fly()
    sgd.step()

    torch.testing.assert_close(quorum.members[1].fragments[0].candidate.anchor, parameter.detach())


@pytest.mark.parametrize(("compression", "atol"), [("bf16", 0.05), ("int8", 0.1), ("int4", 1.5)])
def test_what_is_compressed_is_the_same_on_all_and_near_the_truth(
    three: Members, compression: Literal["bf16", "int8", "int4"], atol: float
) -> None:
    quorum = World(three, compression=compression)
    expected = quorum.oracle(by_tokens(0, 1, 2))

    ends = quorum.fly()

    assert len({flown.candidate for flown in ends}) == 1
    for member in quorum.members:
        check_candidate(member, expected, rtol=0.0, atol=atol)


def test_an_attempt_that_is_made_again_comes_to_the_same(pair: Members) -> None:
    quorum = World(pair)

    first, second = quorum.fly(), quorum.fly()

    assert [flown.candidate for flown in first] == [flown.candidate for flown in second]


def test_who_has_no_tokens_weighs_nothing_and_gets_the_candidate(three: Members) -> None:
    quorum = World(three)
    quorum.members[1].row = replace(quorum.members[1].row, weight_tokens=0)
    expected = quorum.oracle(by_tokens(0, 2))

    ends = quorum.fly()

    assert len({flown.candidate for flown in ends}) == 1
    assert ends[1].standing is Standing.OK
    check_candidate(quorum.members[1], expected)


def test_a_fragment_without_parameters_is_synced_all_the_same(pair: Members) -> None:
    quorum = World(pair, sizes=(0, 3))

    ends = quorum.fly()

    assert all(flown.complete for flown in ends)
    assert len({flown.candidate for flown in ends}) == 1
    assert [member.points for member in quorum.members] == [["reduce"]] * 2


def test_members_are_told_the_quorum_by_the_number_that_never_goes_back(pair: Members) -> None:
    quorum = World(pair)
    # One was there before the Lighthouse began to count anew.
    quorum.members[1].count.base = 40

    ends = quorum.fly()

    assert [member.quorums for member in quorum.members] == [[(43, [0, 1])]] * 2
    assert [[row.id_base for row in flown.rows] for flown in ends] == [[0, 40]] * 2


# -- members that do not count -----------------------------------------------------------------------------------------


def check_left_out(quorum: World, left_out: int, standing: Standing, **how: bool) -> None:
    """One member does not count: all data goes its way, and that member has nothing of it."""
    others, member = [rank for rank in range(3) if rank != left_out], quorum.members[left_out]
    expected = quorum.oracle(by_tokens(*others))
    before = [fragment.committed.hash() for fragment in member.fragments], member.candidates()

    ends = quorum.fly(**how)

    for flown in ends:
        assert flown.error is None
        assert flown.complete
        assert flown.newest == NEWEST
        assert [row.slot for row in flown.counted] == others
        assert flown.progress is not None
        assert flown.progress.tolist() == [[sum(10**rank for rank in others)] * 4] * 2
    assert ends[left_out].standing is standing
    assert ends[left_out].candidate == 0
    assert ([fragment.committed.hash() for fragment in member.fragments], member.candidates()) == before
    assert len({ends[rank].candidate for rank in others}) == 1
    for rank in others:
        # Of what is compressed this is the error that int8 may have.
        check_candidate(quorum.members[rank], expected, rtol=0.0, atol=1e-5 if member.feedback is None else 0.1)


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("left_out", [0, 2])
@pytest.mark.parametrize("stored", [False, True])
def test_who_is_behind_passes_on_zeros_for_the_fragment_of_the_others(
    three: Members, compression: str, left_out: int, stored: bool
) -> None:
    quorum = World(three, {left_out: {"outer_step": NEWEST - 1, "state_hash": 9}}, compression=compression)
    assert quorum.members[left_out].fragment != NEWEST % 2

    check_left_out(quorum, left_out, Standing.BEHIND, stored=stored)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_who_is_not_finite_weighs_nothing(three: Members, value: float, compression: str) -> None:
    quorum = World(three, {1: {"finite": False}}, compression=compression)
    quorum.members[1].parameters[0].data[3] = value

    check_left_out(quorum, 1, Standing.NON_FINITE)


def test_who_has_diverged_is_not_in_the_average(three: Members) -> None:
    check_left_out(World(three, {1: {"state_hash": 2}}), 1, Standing.DIVERGED)


def test_if_nobody_is_finite_there_is_no_candidate(pair: Members) -> None:
    quorum = World(pair, {rank: {"finite": False} for rank in range(2)})

    ends = quorum.fly()

    assert [(flown.complete, flown.candidate, flown.counted) for flown in ends] == [(True, 0, [])] * 2


# -- attempts that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"layout_digest": 2}, {"config_digest": 2}])
@pytest.mark.parametrize(("world", "foreign"), [(2, 1), (3, 0), (3, 2)])
def test_who_runs_another_config_learns_it_and_the_others_who_it_is(
    world: int, foreign: int, other: dict[str, int]
) -> None:
    with members(world) as joined:
        quorum = World(joined, {foreign: other})
        before = [member.agreed() for member in quorum.members]

        def act(rank: int) -> str:
            try:
                flown = quorum.members[rank].fly()
            except ForeignReplica as error:
                return f"foreign: {error}"
            assert not flown.complete
            assert flown.candidate == 0
            return str(flown.error)

        ends = joined.each(act)

    said = ends.pop(foreign)
    assert said.startswith(f"foreign: replica {foreign} has another config or other parameter shapes")
    assert str([rank for rank in range(world) if rank != foreign]) in said
    assert ends == [f"replicas [{foreign}] run another config or model and are kept out"] * (world - 1)
    assert [member.agreed() for member in quorum.members] == before
    assert [member.points for member in quorum.members] == [[]] * world


@pytest.mark.parametrize("guarded", [{0}, {0, 1}])
def test_a_guard_that_says_no_leaves_everything_as_it_was(guarded: set[int]) -> None:
    def refuse(rows: list[Row]) -> None:
        assert [row.slot for row in rows] == [0, 1]
        raise Guarded("replica 2 lives on")

    with members(2) as joined:
        quorum = World(joined)
        for rank in guarded:
            quorum.members[rank].guard = refuse
        before = [(member.agreed(), member.candidates()) for member in quorum.members]

        ends = quorum.fly()
        # So that nobody waits for it.
        assert all(member.gave_up for member in quorum.members)

    for rank, flown in enumerate(ends):
        assert isinstance(flown.error, Guarded if rank in guarded else WireError)
        assert not flown.complete
        assert flown.candidate == 0
        assert flown.formed == quorum.members[rank].formed
        assert len(flown.rows) == 2
    assert [(member.agreed(), member.candidates()) for member in quorum.members] == before


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "int4"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_anchor_that_is_no_number_any_more_fails_the_attempt_of_all(
    world: int, compression: Literal["none", "bf16", "int8", "int4"], value: float
) -> None:
    with members(world) as joined:
        quorum = World(joined, compression=compression)
        # A bit flipped in the memory of one of them: its parameters, and what it says, are as they should be.
        quorum.members[1].fragments[0].committed.anchor[2] = value
        before = [member.agreed() for member in quorum.members]

        ends = quorum.fly()

    assert [type(flown.error) for flown in ends] == [NonFiniteMean] * world
    assert not any(flown.complete or flown.candidate for flown in ends)
    assert [member.agreed() for member in quorum.members] == before


def test_a_momentum_that_is_no_number_any_more_fails_where_it_is() -> None:
    with members(2) as joined:
        quorum = World(joined)
        quorum.members[1].fragments[0].committed.momentum[2] = torch.inf

        sound, damaged = quorum.fly()

    assert isinstance(damaged.error, NonFiniteMean)
    assert (sound.error, sound.complete) == (None, True)


@pytest.mark.parametrize("failing", [0, 1])
def test_who_stops_in_the_middle_of_the_data_stops_the_others(failing: int) -> None:
    def stop(point: str) -> None:
        raise OSError(f"no memory at {point}")

    with members(2) as joined:
        quorum = World(joined)
        quorum.members[failing].at_point = stop
        before = [member.agreed() for member in quorum.members]

        ends = quorum.fly()

    assert isinstance(ends[failing].error, OSError)
    assert isinstance(ends[1 - failing].error, WireError)
    assert not any(flown.complete or flown.candidate for flown in ends)
    assert [member.agreed() for member in quorum.members] == before


def test_a_quorum_that_came_to_nothing_is_the_end_of_the_attempt() -> None:
    with members(1) as joined:
        quorum = World(joined)
        quorum.members[0].seat._answer = QuorumFailed("the Lighthouse is gone")

        (flown,) = quorum.fly()

    assert isinstance(flown.error, QuorumFailed)
    assert (flown.formed, flown.rows, flown.complete) == (None, [], False)
    assert quorum.members[0].quorums == []


# -- beside the inner steps --------------------------------------------------------------------------------------------


class Line(Wire):
    """A wire that counts operations which a test says were begun; it can be told how often it was looked at."""

    def __init__(self) -> None:
        self.device = CPU
        self.begun = 0
        self.looks = 0
        self.looked_often = threading.Event()

    @property
    def operations(self) -> int:  # type: ignore[override]
        self.looks += 1
        if self.looks > 5:
            self.looked_often.set()
        return self.begun


def test_an_attempt_is_called_back_while_it_waits() -> None:
    seat, flights = Seat(), []

    def fly() -> Flown:
        flights.append("flown")
        return Flown()

    flight = Flight(seat, Line(), fly)
    assert seat.waits.wait(TIMEOUT_S)

    assert flight.recall()

    # It ended, so a quorum that comes now is another's to take.
    assert not flight._thread.is_alive()
    seat.here.set()
    assert flights == []
    assert not flight.began


def test_an_attempt_that_has_its_quorum_is_not_called_back() -> None:
    seat, flies, go, end = Seat(), threading.Event(), threading.Event(), Flown()

    def fly() -> Flown:
        flies.set()
        assert go.wait(TIMEOUT_S)
        return end

    flight = Flight(seat, Line(), fly)
    seat.here.set()
    assert flies.wait(TIMEOUT_S)

    assert not flight.recall()
    assert flight.began
    go.set()
    assert flight.land(lambda: None) is end
    assert not flight.recall()


def test_a_flight_takes_the_quorum_that_was_there_before_it() -> None:
    seat, end = Seat(), Flown()
    seat.here.set()

    assert Flight(seat, Line(), lambda: end).land(lambda: None) is end


def test_the_trainer_is_seen_alive_as_long_as_the_attempt_gets_somewhere() -> None:
    seat, line, heard = Seat(), Line(), threading.Semaphore(0)
    signs: list[int] = []

    def alive() -> None:
        signs.append(line.begun)
        heard.release()

    def fly() -> Flown:
        for number in range(1, 4):
            line.begun = number
            # The next one begins when this one was noticed.
            while signs[-1:] != [number]:
                assert heard.acquire(timeout=TIMEOUT_S)
        return Flown()

    seat.here.set()
    Flight(seat, line, fly).land(alive)

    assert [number for number in signs if number] == [1, 2, 3]


def test_an_attempt_that_hangs_is_no_sign_of_life() -> None:
    seat, line, signs = Seat(), Line(), []

    def fly() -> Flown:
        line.begun = 1
        assert line.looked_often.wait(TIMEOUT_S)
        return Flown()

    flight = Flight(seat, line, fly)
    seat.here.set()
    flight.land(lambda: signs.append(line.begun))

    assert line.looks > 5
    # The first look may be from before it hung.
    assert signs in ([1], [0, 1])


@pytest.mark.parametrize("error", [ForeignReplica("another model"), SystemExit(3)], ids=["foreign", "exit"])
def test_what_ends_the_replica_ends_it_in_the_main_thread(error: BaseException) -> None:
    seat = Seat()

    def fly() -> Flown:
        raise error

    flight = Flight(seat, Line(), fly)
    seat.here.set()

    with pytest.raises(type(error)) as raised:
        flight.land(lambda: None)
    assert raised.value is error


def test_a_foreign_replica_learns_it_when_it_lands() -> None:
    with members(2) as joined:
        quorum = World(joined, {1: {"layout_digest": 2}})
        for member in quorum.members:
            member.seat.here.set()

        def act(rank: int) -> Flown | None:
            member = quorum.members[rank]
            try:
                return Flight(member.seat, member.wire, member.fly).land(lambda: None)
            except ForeignReplica:
                return None

        home, foreign = joined.each(act)

    assert foreign is None
    assert home is not None
    assert "replicas [1]" in str(home.error)
