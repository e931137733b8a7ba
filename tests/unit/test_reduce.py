import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from elastic_train.diloco.compress import BLOCK, Bfloat16, make_codec
from elastic_train.diloco.reduce import Feedback, Reducer, Residual
from elastic_train.diloco.wire import WireError
from tests.allocations import Allocations
from tests.wires import Members, members

CODECS = ("none", "bf16", "int8", "int4")
LOSSY = ("bf16", "int8", "int4")
SIZES = (1, 2, 5, 127, 128, 129, 383, 385, 1000, 4097)
STEPS = {"none": 2**22, "bf16": 2**7, "int8": 127, "int4": 7}
"""The largest magnitude of a block, divided by this, is the coarsest that its numbers are rounded to."""


@pytest.fixture(scope="module", params=[1, 2, 3], ids="world{}".format)
def joined(request: pytest.FixtureRequest) -> Iterator[Members]:
    with members(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def two() -> Iterator[Members]:
    with members(2) as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[Members]:
    with members(3) as made:
        yield made


@pytest.fixture(params=["two", "three"])
def peers(request: pytest.FixtureRequest) -> Members:
    made: Members = request.getfixturevalue(request.param)
    return made


def some_weights(world: int) -> list[float]:
    return {1: [1.0], 2: [0.3, 0.7], 3: [0.5, 0.1, 0.4]}[world]


def gradients(world: int, numel: int, seed: int = 0) -> list[torch.Tensor]:
    """Unlike in size from member to member and from place to place."""
    numbers = torch.Generator().manual_seed(seed)
    places = torch.linspace(0.1, 3.0, numel)
    return [10.0**-rank * places * torch.randn(numel, generator=numbers) for rank in range(world)]


def mean(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return sum((w * d.double() for d, w in zip(parts, weights, strict=True) if w), torch.zeros(1).double())


def bound(codec: str, parts: Sequence[torch.Tensor], weights: Sequence[float]) -> float:
    """Largest error of a mean: every contribution is rounded, and with three members their sum once more."""
    half = 0.5 / STEPS[codec]
    largest = sum(w * float(d.abs().max()) for d, w in zip(parts, weights, strict=True) if w)
    first = half * largest
    second = half * (largest + first) if len(parts) > 2 else 0.0
    return first + second + 1e-6 * largest


class Reducers:
    """A reducer for each member, and its feedback if wanted."""

    def __init__(self, joined: Members, codec: str, *, feedback: bool = False) -> None:
        self._joined = joined
        self._reducers = [Reducer(wire, make_codec(codec)) for wire in joined.wires]
        self.feedback = [Feedback() for _ in joined.wires] if feedback else None

    def __call__(self, parts: Sequence[torch.Tensor], weights: Sequence[float], *, at: int = 0) -> list[torch.Tensor]:
        """What each member gets."""

        def act(rank: int) -> torch.Tensor:
            bucket = parts[rank].clone()
            feedback = self.feedback[rank] if self.feedback else None
            self._reducers[rank].reduce(bucket, weights, feedback=feedback, at=at)
            return bucket

        return self._joined.each(act)

    def all_feedback(self, act: Callable[[Feedback], None]) -> None:
        assert self.feedback is not None
        for feedback in self.feedback:
            act(feedback)

    def commit(self) -> None:
        self.all_feedback(Feedback.commit)

    def abort(self) -> None:
        self.all_feedback(Feedback.abort)


def the_same(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result that all members have, to the last bit."""
    first = results[0]
    for other in results[1:]:
        assert torch.equal(first.view(torch.int32), other.view(torch.int32))
    return first


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("feedback", [False, True])
def test_mean_is_exact_to_the_codec_and_the_same_everywhere(joined: Members, codec: str, feedback: bool) -> None:
    reduce, weights = Reducers(joined, codec, feedback=feedback), some_weights(joined.world)
    # The buffers shrink and grow again on the way, and must not show what was in them before.
    for seed, numel in enumerate(SIZES + SIZES[::-1]):
        parts = gradients(joined.world, numel, seed)

        result = the_same(reduce(parts, weights, at=10_000 * seed))

        error = (result.double() - mean(parts, weights)).abs().max()
        assert error <= bound(codec, parts, weights)


@pytest.mark.parametrize("codec", CODECS)
def test_one_alone_keeps_every_bit(codec: str) -> None:
    with members(1) as alone:
        reduce = Reducers(alone, codec, feedback=True)
        parts = gradients(1, 1000)

        assert torch.equal(reduce(parts, [1.0])[0], parts[0])
        assert alone.wires[0].take_bytes() == 0


@pytest.mark.parametrize("codec", LOSSY)
def test_it_really_is_compressed(codec: str) -> None:
    for world in (2, 3):
        with members(world) as joined:
            parts, weights = gradients(world, 30 * BLOCK), some_weights(world)
            plain = the_same(Reducers(joined, "none")(parts, weights))
            plain_bytes = joined.wires[0].take_bytes()
            small = the_same(Reducers(joined, codec)(parts, weights))
            small_bytes = joined.wires[0].take_bytes()

            share = {"bf16": 1 / 2, "int8": 1 / 4 + 1 / 128, "int4": 1 / 8 + 1 / 128}[codec]
            assert not torch.equal(plain, small)
            assert small_bytes == pytest.approx(share * plain_bytes, rel=1e-3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_weight_zero_keeps_anything_out(joined: Members, codec: str, poison: float) -> None:
    world = joined.world
    for out in range(world):
        reduce = Reducers(joined, codec, feedback=True)
        parts = gradients(world, 1000)
        ill = list(parts)
        ill[out] = torch.full((1000,), poison)
        weights = [0.0 if rank == out else 1.0 / max(world - 1, 1) for rank in range(world)]

        result = the_same(reduce(ill, weights))
        reduce.commit()

        assert (result.double() - mean(parts, weights)).abs().max() <= bound(codec, parts, weights)
        # And nothing of it stays behind for the time when the member counts again.
        again = the_same(reduce(parts, some_weights(world)))
        assert (again.double() - mean(parts, some_weights(world))).abs().max() <= 2.5 * bound(
            codec, parts, some_weights(world)
        )


def test_weight_zero_is_not_even_looked_at(two: Members) -> None:
    class Garbage(Bfloat16):
        def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
            super().encode(torch.full_like(values, float("nan")), out)

    codecs, bucket = (Bfloat16(), Garbage()), [torch.ones(5), torch.ones(5)]
    two.each(lambda rank: Reducer(two.wires[rank], codecs[rank]).reduce(bucket[rank], [1.0, 0.0]))

    assert torch.equal(the_same(bucket), torch.ones(5))


@pytest.mark.parametrize("codec", LOSSY)
def test_weight_zero_delivers_no_errors_and_keeps_them(peers: Members, codec: str) -> None:
    reduce, parts, world = Reducers(peers, codec, feedback=True), gradients(peers.world, 1000), peers.world
    assert reduce.feedback is not None

    def left(rank: int, feedback: list[Feedback]) -> torch.Tensor:
        values = torch.zeros(1000)
        feedback[rank].sent.add_to(values, 0)
        return values

    reduce(parts, some_weights(world))
    reduce.commit()
    before = [left(rank, reduce.feedback) for rank in range(world)]
    reduce(parts, [0.0] + [1.0 / (world - 1)] * (world - 1))
    reduce.commit()

    assert before[0].abs().max() > 0
    assert torch.equal(left(0, reduce.feedback), before[0])
    assert not torch.equal(left(1, reduce.feedback), before[1])


@pytest.mark.parametrize("codec", CODECS)
def test_nobody_counts(joined: Members, codec: str) -> None:
    reduce = Reducers(joined, codec, feedback=True)
    world = joined.world
    reduce(gradients(world, 300), some_weights(world))
    reduce.commit()

    result = the_same(reduce([torch.full((300,), float("nan"))] * world, [0.0] * world))

    assert torch.equal(result, torch.zeros(300))


@pytest.mark.parametrize("codec", LOSSY)
def test_feedback_makes_up_for_what_was_lost(peers: Members, codec: str) -> None:
    rounds, numel, weights = 10, 1000, some_weights(peers.world)
    parts = gradients(peers.world, numel)
    errors = {}
    for feedback in (False, True):
        reduce = Reducers(peers, codec, feedback=feedback)
        total = torch.zeros(numel).double()
        for _ in range(rounds):
            # Two buckets, so that what belongs to one must not go to the other.
            total[:700] += the_same(reduce([d[:700] for d in parts], weights, at=0))
            total[700:] += the_same(reduce([d[700:] for d in parts], weights, at=700))
            if feedback:
                reduce.commit()
        errors[feedback] = (total - rounds * mean(parts, weights)).abs()

    assert errors[True].max() <= 1.5 * bound(codec, parts, weights)
    assert errors[True].mean() <= 0.25 * errors[False].mean()


@pytest.mark.parametrize("codec", LOSSY)
def test_only_a_committed_sync_leaves_something_behind(peers: Members, codec: str) -> None:
    reduce, weights = Reducers(peers, codec, feedback=True), some_weights(peers.world)
    parts = gradients(peers.world, 1000)
    first = the_same(reduce(parts, weights))
    reduce.abort()

    assert torch.equal(the_same(reduce(parts, weights)), first)
    reduce.commit()
    second = the_same(reduce(parts, weights))
    reduce.abort()
    assert not torch.equal(second, first)
    assert torch.equal(the_same(reduce(parts, weights)), second)
    reduce.abort()
    reduce.all_feedback(Feedback.reset)
    assert torch.equal(the_same(reduce(parts, weights)), first)


def test_an_attempt_that_broke_off_leaves_nothing_behind(two: Members) -> None:
    reduce, weights = Reducers(two, "int4", feedback=True), some_weights(2)
    parts = gradients(2, 600)

    def both_buckets() -> list[torch.Tensor]:
        return [the_same(reduce([d[span] for d in parts], weights, at=span.start)) for span in halves]

    halves = (slice(0, 301), slice(301, 600))
    both_buckets()
    reduce.commit()
    expected = both_buckets()
    reduce.abort()
    the_same(reduce([d[halves[0]] for d in parts], weights, at=0))
    reduce.abort()

    assert all(map(torch.equal, both_buckets(), expected))


def test_sums_made_for_others_are_forgotten_with_them(three: Members) -> None:
    reduce, weights = Reducers(three, "int4", feedback=True), some_weights(3)
    parts = gradients(3, 1000)

    def after(change: Callable[[Feedback], None]) -> torch.Tensor:
        reduce.all_feedback(Feedback.reset)
        reduce(parts, weights)
        reduce.commit()
        reduce.all_feedback(change)
        result = the_same(reduce(parts, weights))
        reduce.abort()
        return result

    def without_sums(feedback: Feedback) -> None:
        feedback.summed.reset()

    stayed = after(lambda feedback: None)
    assert torch.equal(after(Feedback.members_changed), after(without_sums))
    assert not torch.equal(after(Feedback.members_changed), stayed)
    assert torch.equal(after(lambda feedback: feedback.take_place(*_place(reduce, feedback, three))), stayed)
    # Elsewhere in between, and back at its place: others were there.
    assert torch.equal(after(lambda feedback: feedback.take_place(7, 9)), after(without_sums))


def _place(reduce: Reducers, feedback: Feedback, joined: Members) -> tuple[int, int]:
    assert reduce.feedback is not None
    return next(rank for rank, own in enumerate(reduce.feedback) if own is feedback), joined.world


@pytest.mark.parametrize("codec", LOSSY)
def test_own_errors_wait_while_a_member_is_alone(two: Members, codec: str) -> None:
    reduce, parts, weights = Reducers(two, codec, feedback=True), gradients(2, 1000), some_weights(2)
    the_same(reduce(parts, weights))
    reduce.commit()
    expected = the_same(reduce(parts, weights))
    reduce.abort()

    with members(1) as alone:
        single = Reducers(alone, codec)
        single.feedback = reduce.feedback
        assert torch.equal(single(parts, [1.0])[0], parts[0])
        reduce.commit()

    assert torch.equal(the_same(reduce(parts, weights)), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_large_is_allocated_after_the_first_syncs(joined: Members, codec: str) -> None:
    numel, weights = 10_007, some_weights(joined.world)
    parts = gradients(joined.world, numel)

    def act(rank: int) -> int:
        reducer, feedback = Reducer(joined.wires[rank], make_codec(codec)), Feedback()
        bucket = parts[rank].clone()
        for _ in range(3):
            reducer.reduce(bucket, weights, feedback=feedback)
            feedback.commit()
        allocations = Allocations()
        with allocations:
            for decide in (Feedback.commit, Feedback.abort, Feedback.commit, Feedback.reset, Feedback.commit):
                reducer.reduce(bucket, weights, feedback=feedback)
                decide(feedback)
        return allocations.largest

    assert max(joined.each(act)) < numel / 8


@pytest.mark.parametrize("codec", CODECS)
def test_a_peer_that_is_gone_is_a_wire_error(codec: str) -> None:
    with members(3) as joined:

        def act(rank: int) -> None:
            if rank == 1:
                joined.wires[rank].abort()
                return
            reducer = Reducer(joined.wires[rank], make_codec(codec))
            with pytest.raises(WireError):
                reducer.reduce(torch.ones(1000), [0.2, 0.2, 0.6])
            joined.wires[rank].abort()

        joined.each(act)


def test_weights_must_be_those_of_the_members(two: Members) -> None:
    with pytest.raises(ValueError, match="3 weights for 2 members"):
        Reducer(two.wires[0], None).reduce(torch.ones(1), [1.0, 0.0, 0.0])


@pytest.mark.parametrize("ends", list(itertools.product(["commit", "abort", "reset"], repeat=4)), ids="-".join)
def test_residual_keeps_what_the_last_commit_held(ends: tuple[str, ...]) -> None:
    residual, expected = Residual(), {0: 0.0, 8: 0.0}
    for number, end in enumerate(ends, start=1):
        held = {0: float(number)} if number % 2 else {0: float(number), 8: -float(number)}
        for at, value in held.items():
            residual.hold(torch.full((4,), value + 100), at)
            residual.hold(torch.full((4,), value), at)
        getattr(residual, end)()
        expected = {"commit": expected | held, "abort": expected, "reset": {0: 0.0, 8: 0.0}}[end]

        for at, value in expected.items():
            values = torch.ones(4)
            residual.add_to(values, at)
            assert values.tolist() == [1 + value] * 4
