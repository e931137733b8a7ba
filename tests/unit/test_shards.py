import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic_train.peer_ckpt.shards import (
    StateMismatch,
    combine_hashes,
    export_optimizer,
    export_tensors,
    hash_tensors,
    load_optimizer,
    load_tensors,
    local,
    tensor_bytes,
)
from tests.groups import group_of_one

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
    "SGD without": lambda parameters: torch.optim.SGD(parameters, lr=0.7),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[dist.DeviceMesh]:
    """A mesh of this process alone, over gloo."""
    with group_of_one():
        yield init_device_mesh("cpu", (1,))


@pytest.fixture(params=["plain", "sharded"])
def make_model(request: pytest.FixtureRequest) -> Any:
    """Makes models of the same shapes, each with parameters of its own."""
    mesh = request.getfixturevalue("mesh") if request.param == "sharded" else None

    def make(seed: int, width: int = 8) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 2))
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        return model

    return make


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def same(left: Any, right: Any) -> bool:
    """Whether two exported structures hold the same bits."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_exported_stays_while_training_goes_on(make_model: Any, name: str) -> None:
    model = make_model(0)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    tensors, moments = export_tensors(model.named_parameters()), export_optimizer(optimizer)
    as_they_were = copy.deepcopy((tensors, moments))

    train(model, optimizer, 1)

    assert not same(export_tensors(model.named_parameters()), tensors)
    assert same([tensors, moments], list(as_they_were))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_joiner_goes_on_bit_for_bit_like_its_donor(make_model: Any, name: str) -> None:
    donor, joiner = make_model(0), make_model(1)
    donors, joiners = OPTIMIZERS[name](donor.parameters()), OPTIMIZERS[name](joiner.parameters())
    train(donor, donors, 3)
    train(joiner, joiners, 1)

    load_tensors(joiner.named_parameters(), export_tensors(donor.named_parameters()))
    load_optimizer(joiners, export_optimizer(donors))
    assert same(export_optimizer(joiners), export_optimizer(donors))
    for model, optimizer in ((donor, donors), (joiner, joiners)):
        train(model, optimizer, 2)

    assert same(export_tensors(joiner.named_parameters()), export_tensors(donor.named_parameters()))
    assert same(export_optimizer(joiners), export_optimizer(donors))


def test_a_loaded_state_shares_no_memory_with_its_source(make_model: Any) -> None:
    model = make_model(0)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, 1)
    tensors, moments = export_tensors(model.named_parameters()), export_optimizer(optimizer)
    load_tensors(model.named_parameters(), tensors)
    load_optimizer(optimizer, moments)
    as_they_were = copy.deepcopy((tensors, moments))

    train(model, optimizer, 1)

    assert same([tensors, moments], list(as_they_were))


def test_moments_are_sharded_like_their_parameters(make_model: Any) -> None:
    model = make_model(0)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, 1)
    load_optimizer(optimizer, export_optimizer(optimizer))

    for parameter in model.parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert type(moment) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
        assert getattr(moment, "placements", None) == getattr(parameter, "placements", None)


def test_a_donor_that_has_not_stepped_gives_no_moments(make_model: Any) -> None:
    donor, joiner = make_model(0), make_model(1)
    donors, joiners = OPTIMIZERS["AdamW"](donor.parameters()), OPTIMIZERS["AdamW"](joiner.parameters())
    train(joiner, joiners, 1)

    load_optimizer(joiners, export_optimizer(donors))

    assert not joiners.state


def change_shape(source: dict[str, torch.Tensor]) -> None:
    source["2.weight"] = torch.zeros(3, 8)


def change_type(source: dict[str, torch.Tensor]) -> None:
    source["2.weight"] = source["2.weight"].double()


def remove(source: dict[str, torch.Tensor]) -> None:
    del source["2.weight"]


def add(source: dict[str, torch.Tensor]) -> None:
    source["3.weight"] = torch.zeros(1)


@pytest.mark.parametrize("damage", [change_shape, change_type, remove, add])
def test_tensors_that_do_not_fit_leave_everything_as_it_was(make_model: Any, damage: Any) -> None:
    model = make_model(0)
    before = export_tensors(model.named_parameters())
    source = export_tensors(make_model(1).named_parameters())
    damage(source)

    with pytest.raises(StateMismatch, match=r"\d\.weight"):
        load_tensors(model.named_parameters(), source)

    assert same(export_tensors(model.named_parameters()), before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda source: source.pop(), r"the optimizer has 4 parameters, the peer's 3"),
        (lambda source: source[-1].update(exp_avg=torch.zeros(5)), r"exp_avg has shape \(5,\), not \(2,\)"),
    ],
)
def test_moments_that_do_not_fit_leave_everything_as_it_was(make_model: Any, damage: Any, message: str) -> None:
    donor, joiner = make_model(0), make_model(1)
    donors, joiners = OPTIMIZERS["AdamW"](donor.parameters()), OPTIMIZERS["AdamW"](joiner.parameters())
    train(donor, donors, 2)
    train(joiner, joiners, 1)
    before = export_optimizer(joiners)
    source = export_optimizer(donors)
    damage(source)

    with pytest.raises(StateMismatch, match=message):
        load_optimizer(joiners, source)

    assert same(export_optimizer(joiners), before)


def test_local_is_a_view(mesh: dist.DeviceMesh) -> None:
    sharded = DTensor.from_local(torch.zeros(3), mesh)

    local(sharded)[0] = 7

    assert sharded.full_tensor().tolist() == [7, 0, 0]


TENSORS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.tuples(
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    ).map(lambda drawn: torch.tensor(drawn[0]).view(drawn[1])),
    min_size=1,
    max_size=3,
)


@given(tensors=TENSORS, data=st.data())
def test_every_bit_counts_in_the_hash(tensors: dict[str, torch.Tensor], data: st.DataObject) -> None:
    before = hash_tensors(tensors)
    name = data.draw(st.sampled_from(sorted(tensors)))
    bytes_of_it = tensors[name].view(torch.uint8)
    place = data.draw(st.integers(0, bytes_of_it.numel() - 1))

    bytes_of_it[place] ^= 1 << data.draw(st.integers(0, 7))

    assert hash_tensors(tensors) != before


@given(TENSORS)
def test_the_hash_depends_on_content_alone(tensors: dict[str, torch.Tensor]) -> None:
    again = {name: tensors[name].clone() for name in reversed(tensors)}

    assert hash_tensors(again) == hash_tensors(tensors)
    assert -(2**63) <= hash_tensors(tensors) < 2**63


def test_the_hash_knows_names_and_strides() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)

    assert hash_tensors({"a": matrix}) != hash_tensors({"b": matrix})
    assert hash_tensors({"a": matrix.T}) == hash_tensors({"a": matrix.T.contiguous()})
    assert hash_tensors({"a": matrix.T}) != hash_tensors({"a": matrix})


def test_scalars_and_empty_shards_have_hashes() -> None:
    """A rank's part of a parameter with fewer rows than there are ranks is empty."""
    assert hash_tensors({"a": torch.tensor(1.0)}) != hash_tensors({"a": torch.tensor(2.0)})
    assert hash_tensors({"a": torch.empty(0, 4)}) != hash_tensors({})


HASHES = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(HASHES, min_size=2, max_size=8, unique=True))
def test_a_replicas_hash_depends_on_the_order_of_its_ranks(hashes: list[int]) -> None:
    assert combine_hashes(hashes) != combine_hashes(hashes[::-1])
    assert combine_hashes(hashes) == combine_hashes(tuple(hashes))
    assert combine_hashes(hashes) != combine_hashes(hashes[:-1])


def test_tensor_bytes_counts_tensors_at_any_depth() -> None:
    state = {"a": torch.zeros(3), "b": [{"c": torch.zeros(2, 2, dtype=torch.bfloat16)}, (torch.zeros(1),)], "d": 5}

    assert tensor_bytes(state) == 12 + 8 + 4
