"""The outer state by parameter and flat: one is the other, in any number of fragments."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from elastic_train.diloco.flat import flatten
from elastic_train.diloco.fragments import split
from elastic_train.replica.durable.content import OuterContent
from elastic_train.replica.durable.outer import by_parameter, into_flat, like_parameters
from elastic_train.replica.outer.elastic import _fill


class Model(nn.Module):
    """Four layers, and something around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in range(4)})
        self.scale = nn.Parameter(torch.randn(()))


def flats(model: Model, fragments: int) -> dict[str, torch.Tensor]:
    made = flatten(split([model], fragments), device=torch.device("cpu"), pin_memory=False)
    return {str(index): fragment.committed.anchor for index, fragment in enumerate(made)}


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_an_anchor_is_its_parameters(fragments: int) -> None:
    model = Model()

    named = by_parameter([model], fragments, flats(model, fragments))

    assert named.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(named[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("written", "read"), [(1, 4), (4, 2), (2, 1)])
def test_what_was_written_in_some_fragments_is_read_in_others(written: int, read: int) -> None:
    source, target = Model(), Model()
    into = flats(target, read)

    into_flat([target], read, by_parameter([source], written, flats(source, written)), into)

    assert all(torch.equal(into[index], flat) for index, flat in flats(source, read).items())


def test_names_are_those_of_a_checkpoint_and_numbers_are_float32() -> None:
    model = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(2, 2, dtype=torch.bfloat16)})

    named = like_parameters([model])

    assert sorted(named) == ["bias", "weight"]
    assert {tensor.dtype for tensor in named.values()} == {torch.float32}


@pytest.mark.parametrize("fragments", [1, 2])
def test_who_goes_on_from_an_anchor_starts_at_it(fragments: int) -> None:
    source, target = Model(), Model()
    anchor = by_parameter([source], fragments, flats(source, fragments))
    momentum = {name: torch.full_like(tensor, 2.0) for name, tensor in anchor.items()}
    filled = flatten(split([target], fragments), device=torch.device("cpu"), pin_memory=False)

    trainer = SimpleNamespace(model_parts=[target])
    _fill(filled, trainer, OuterContent(momentum=momentum, anchor=anchor))  # type: ignore[arg-type]

    assert all(torch.equal(p, anchor[name]) for name, p in target.named_parameters())
    wanted = flats(source, fragments)
    assert all(torch.equal(f.committed.anchor, wanted[str(index)]) for index, f in enumerate(filled))
    assert all(bool((f.committed.momentum == 2.0).all()) for f in filled)
