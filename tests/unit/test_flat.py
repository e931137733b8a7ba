import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_train.diloco.flat import FlatFragment, OuterState, flatten
from elastic_train.peer_ckpt.shards import StateMismatch, combine

CPU = torch.device("cpu")
Shape = tuple[int, ...]

SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 5)), st.tuples(st.integers(0, 4), st.integers(0, 4))), max_size=6
)


def module(shapes: Sequence[Shape], dtype: torch.dtype = torch.float32, first: float = 0.0) -> nn.ParameterList:
    """Parameters of those shapes whose elements count up from one to the next."""
    parameters, at = [], first
    for shape in shapes:
        numel = math.prod(shape)
        parameters.append(nn.Parameter(torch.arange(at, at + numel).reshape(shape).to(dtype)))
        at += numel
    return nn.ParameterList(parameters)


def flat(parameters: nn.ParameterList) -> torch.Tensor:
    parts = [parameter.detach().reshape(-1).float() for parameter in parameters]
    return torch.cat(parts) if parts else torch.empty(0)


def fragment_of(parameters: nn.Module) -> FlatFragment:
    return FlatFragment(parameters, device=CPU, pin_memory=False)


def move(parameters: nn.ParameterList, by: float) -> None:
    for parameter in parameters:
        parameter.data += by


@given(shapes=SHAPES)
def test_the_anchor_begins_as_the_parameters_and_the_momentum_as_nothing(shapes: list[Shape]) -> None:
    parameters = module(shapes)
    fragment = fragment_of(parameters)

    assert fragment.numel == sum(math.prod(shape) for shape in shapes)
    assert torch.equal(fragment.committed.anchor, flat(parameters))
    assert torch.equal(fragment.committed.momentum, torch.zeros(fragment.numel))
    assert [shape for _, shape, _ in fragment.layout] == shapes


@given(shapes=SHAPES, data=st.data())
def test_any_range_is_read_across_the_borders_of_parameters(shapes: list[Shape], data: st.DataObject) -> None:
    parameters = module(shapes)
    fragment = fragment_of(parameters)
    start = data.draw(st.integers(0, fragment.numel))
    stop = data.draw(st.integers(start, fragment.numel))
    move(parameters, 0.5)

    read = torch.full((stop - start,), math.nan)
    fragment.read_parameters(read, start)
    difference = torch.full((stop - start,), math.nan)
    fragment.pseudo_gradient(difference, start)

    assert torch.equal(read, flat(parameters)[start:stop])
    assert torch.equal(difference, torch.full((stop - start,), -0.5))


@given(shapes=SHAPES, bucket=st.integers(1, 7))
def test_ranges_side_by_side_make_up_the_whole(shapes: list[Shape], bucket: int) -> None:
    parameters = module(shapes)
    fragment = fragment_of(parameters)
    for number, parameter in enumerate(parameters):
        parameter.data *= number
    whole = torch.empty(fragment.numel)
    fragment.pseudo_gradient(whole)

    parts = torch.empty(fragment.numel)
    for start in range(0, fragment.numel, bucket):
        fragment.pseudo_gradient(parts[start : start + bucket], start)

    assert torch.equal(parts, whole)
    assert torch.equal(whole, fragment.committed.anchor - flat(parameters))


@given(shapes=SHAPES, keep=st.sampled_from([0.0, 0.25, 1.0]))
def test_parameters_become_the_anchor_and_keep_a_share_of_what_they_were(shapes: list[Shape], keep: float) -> None:
    parameters = module(shapes)
    fragment = fragment_of(parameters)
    before = flat(parameters)
    move(parameters, 8.0)

    fragment.write_parameters(keep)

    assert torch.equal(flat(parameters), before + 8.0 * keep)
    assert torch.equal(fragment.committed.anchor, before)


@pytest.mark.parametrize("carry", [False, True])
def test_a_peers_state_is_taken_over(carry: bool) -> None:
    parameters = module([(2, 3), (), (3,)])
    fragment = fragment_of(parameters)
    move(parameters, 0.5)
    anchor, momentum = torch.arange(10.0) * 3, torch.arange(10.0) - 4

    fragment.load(anchor, momentum, carry=carry)

    assert torch.equal(fragment.committed.anchor, anchor)
    assert torch.equal(fragment.committed.momentum, momentum)
    # What was learned since the old anchor is on top of the new one, so it is still there to be contributed.
    assert torch.equal(flat(parameters), anchor + 0.5 * carry)
    anchor.zero_()
    assert fragment.committed.anchor[9] == 27


@pytest.mark.parametrize(("anchor", "momentum"), [(9, 10), (10, 9), (11, 11)])
def test_a_state_of_another_size_is_refused(anchor: int, momentum: int) -> None:
    parameters = module([(2, 3), (4,)])
    fragment = fragment_of(parameters)
    before = fragment.committed.hash(), flat(parameters)

    with pytest.raises(StateMismatch, match="a fragment of 10 numbers cannot take"):
        fragment.load(torch.ones(anchor), torch.ones(momentum), carry=False)

    assert fragment.committed.hash() == before[0]
    assert torch.equal(flat(parameters), before[1])


def test_a_swap_makes_the_candidate_the_state_and_copies_nothing() -> None:
    fragment = fragment_of(module([(3,)]))
    committed, candidate = fragment.committed, fragment.candidate
    candidate.anchor.fill_(7.0)

    fragment.swap()

    assert (fragment.committed, fragment.candidate) == (candidate, committed)
    assert fragment.committed.anchor.tolist() == [7.0] * 3
    assert fragment.candidate.anchor.tolist() == [0.0, 1.0, 2.0]


def test_the_two_states_share_no_memory_with_each_other_or_the_parameters() -> None:
    parameters = module([(3,)])
    fragment = fragment_of(parameters)
    tensors = [fragment.committed.anchor, fragment.committed.momentum]
    tensors += [fragment.candidate.anchor, fragment.candidate.momentum, parameters[0].detach()]

    assert len({tensor.data_ptr() for tensor in tensors}) == 5


@pytest.mark.parametrize("kind", ["anchor", "momentum"])
@pytest.mark.parametrize("place", [0, 5])
def test_the_hash_covers_every_bit_of_both(kind: str, place: int) -> None:
    fragment = fragment_of(module([(2, 3)]))
    before = fragment.committed.hash()
    assert fragment.committed.hash() == before

    tensor = getattr(fragment.committed, kind)
    tensor.view(torch.int32)[place] ^= 1

    assert fragment.committed.hash() != before
    tensor.view(torch.int32)[place] ^= 1
    assert fragment.committed.hash() == before


def test_the_hash_does_not_depend_on_the_chunks_it_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    state = OuterState(anchor=torch.arange(10.0), momentum=torch.arange(10.0) - 3)
    whole = state.hash()

    monkeypatch.setattr("elastic_train.diloco.flat._PIECE", 3)

    assert state.hash() == whole
    assert -(2**63) <= whole < 2**63


def test_anchor_and_momentum_are_not_the_same_to_the_hash() -> None:
    one, two = torch.ones(3), torch.zeros(3)

    assert OuterState(anchor=one, momentum=two).hash() != OuterState(anchor=two, momentum=one).hash()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_a_combined_hash_depends_on_all_and_their_order(hashes: list[int]) -> None:
    combined = combine(hashes)

    assert -(2**63) <= combined < 2**63
    assert combine(list(hashes)) == combined
    assert combine([*hashes, 0]) != combined
    if hashes != hashes[::-1]:
        assert combine(hashes[::-1]) != combined


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("parameter", "place"), [(0, 0), (1, 0), (2, 3)])
def test_one_value_that_is_not_finite_is_found(value: float, parameter: int, place: int) -> None:
    parameters = module([(2,), (), (2, 2)])
    fragment = fragment_of(parameters)
    assert fragment.is_finite()

    parameters[parameter].data.view(-1)[place] = value

    assert not fragment.is_finite()


def test_infinities_that_cancel_are_not_finite() -> None:
    parameters = module([(2,)])
    fragment = fragment_of(parameters)

    parameters[0].data.copy_(torch.tensor([math.inf, -math.inf]))

    assert not fragment.is_finite()


def test_low_precision_parameters_have_an_anchor_in_float32() -> None:
    parameters = module([(2,), (2, 2)], torch.bfloat16)
    fragment = fragment_of(parameters)
    anchor = torch.tensor([0.1, 1.0, 257.0, 2.0, 3.0, 1e-3])
    assert fragment.committed.anchor.dtype == torch.float32
    assert {dtype for _, _, dtype in fragment.layout} == {"torch.bfloat16"}

    fragment.load(anchor, torch.zeros(6), carry=False)

    # What a parameter cannot hold stays in the anchor.
    assert torch.equal(fragment.committed.anchor, anchor)
    rounded = anchor.to(torch.bfloat16)
    assert torch.equal(flat(parameters), rounded.float())
    difference = torch.empty(6)
    fragment.pseudo_gradient(difference)
    assert torch.equal(difference, anchor - rounded.float())


def test_low_precision_parameters_carry_and_keep() -> None:
    parameters = module([(4,)], torch.bfloat16)
    fragment = fragment_of(parameters)
    move(parameters, 0.5)

    fragment.load(torch.full((4,), 8.0), torch.zeros(4), carry=True)
    assert flat(parameters).tolist() == [8.5] * 4

    fragment.write_parameters(0.5)
    assert flat(parameters).tolist() == [8.25] * 4


def test_a_fragment_may_be_empty() -> None:
    fragment = fragment_of(nn.ModuleList())
    out = torch.empty(0)

    fragment.pseudo_gradient(out)
    fragment.write_parameters()
    fragment.load(torch.empty(0), torch.empty(0), carry=True)
    fragment.swap()

    assert fragment.numel == 0
    assert fragment.is_finite()
    assert fragment.committed.hash() == fragment.candidate.hash()
    assert fragment.layout == ()


def test_fragments_keep_their_order() -> None:
    fragments = flatten([module([(3,)]), module([(2,)])], device=CPU, pin_memory=False)

    assert [fragment.numel for fragment in fragments] == [3, 2]


def test_a_parameter_that_two_modules_share_is_there_once() -> None:
    first = nn.Linear(2, 2, bias=False)
    second = nn.Linear(2, 2, bias=False)
    second.weight = first.weight

    assert fragment_of(nn.ModuleList([first, second])).numel == 4
