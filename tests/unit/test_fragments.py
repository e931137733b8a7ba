import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from elastic_train.diloco.fragments import split
from elastic_train.replica.titan.flavors import model_spec


class Model(nn.Module):
    """As torchtitan's models are made: an embedding, layers by number, what comes after them."""

    def __init__(self, layers: int, *, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(8, 4)
        self.layers = nn.ModuleDict({str(n): nn.Linear(4, 4) for n in range(layers)})
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 8, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight


def owners(model: nn.Module, fragments: list[nn.Module]) -> dict[str, list[int]]:
    """The fragments in which each parameter of the model is, by the parameter's name."""
    inside = [{id(parameter) for parameter in fragment.parameters()} for fragment in fragments]
    return {
        name: [f for f, ids in enumerate(inside) if id(parameter) in ids]
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("fragments", [1, 2])
def test_every_parameter_of_a_llama_is_in_one_fragment(fragments: int) -> None:
    with torch.device("meta"):
        model = model_spec("tiny").model.build()

    groups = split([model], fragments)

    assert len(groups) == fragments
    assert {len(found) for found in owners(model, groups).values()} == {1}
    assert sum(p.numel() for group in groups for p in group.parameters()) == sum(p.numel() for p in model.parameters())


def weights(found: dict[str, list[int]]) -> dict[str, int]:
    """The fragment of each module's weight."""
    return {name.removesuffix(".weight"): where[0] for name, where in found.items() if name.endswith("weight")}


def test_fragments_are_strides_of_the_layers_filled_up_with_the_rest() -> None:
    model = Model(5)

    found = owners(model, split([model], 2))

    # 60 and 40 parameters in layers; then 32 of the embedding, 32 of the output and 8 of the norm.
    assert weights(found) == {
        "layers.0": 0,
        "layers.1": 1,
        "layers.2": 0,
        "layers.3": 1,
        "layers.4": 0,
        "tok_embeddings": 1,
        "lm_head": 0,
        "norm": 1,
    }
    assert {len(where) for where in found.values()} == {1}


@given(layers=st.integers(1, 9), fragments=st.integers(1, 6), tied=st.booleans())
def test_fragments_hold_everything_once_and_are_of_a_size(layers: int, fragments: int, tied: bool) -> None:
    fragments = min(fragments, layers)
    model, peer = Model(layers, tied=tied), Model(layers, tied=tied)

    groups = split([model], fragments)

    found = owners(model, groups)
    assert {len(where) for where in found.values()} == {1}
    assert found == owners(peer, split([peer], fragments))
    sizes = [sum(p.numel() for p in group.parameters()) for group in groups]
    assert sum(sizes) == sum(p.numel() for p in model.parameters())
    assert max(sizes) - min(sizes) <= 32 + 20, "no more apart than the largest module around the layers, and a layer"


def test_layers_go_on_counting_over_the_parts_of_a_pipeline() -> None:
    first, last = Model(1), Model(2)
    del first.norm, first.lm_head, last.tok_embeddings

    groups = split([first, last], 3)

    assert weights(owners(first, groups)) == {"layers.0": 0, "tok_embeddings": 0}
    assert weights(owners(last, groups)) == {"layers.0": 1, "layers.1": 2, "lm_head": 1, "norm": 2}


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_tied_embeddings_sync_once(fragments: int) -> None:
    model = Model(3, tied=True)

    groups = split([model], fragments)

    assert len(owners(model, groups)["tok_embeddings.weight"]) == 1
    assert sum(p.numel() for group in groups for p in group.parameters()) == sum(p.numel() for p in model.parameters())


def test_a_module_that_shares_only_some_parameters_stays_with_the_other() -> None:
    model = Model(3, tied=True)
    model.lm_head.bias = nn.Parameter(torch.zeros(8))

    found = owners(model, split([model], 2))

    assert {len(where) for where in found.values()} == {1}
    assert found["lm_head.bias"] == found["tok_embeddings.weight"]


def test_layers_that_share_parameters_cannot_sync_apart() -> None:
    model = Model(4)
    model.layers["2"].weight = model.layers["0"].weight
    assert {len(where) for where in owners(model, split([model], 2)).values()} == {1}

    model.layers["1"].weight = model.layers["0"].weight
    with pytest.raises(ValueError, match="Linear shares parameters with another fragment"):
        split([model], 2)


def test_parameters_of_the_model_itself_sync_too() -> None:
    model = Model(2)
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))

    groups = split([model], 2)

    assert {len(where) for where in owners(model, groups).values()} == {1}
    assert any(parameter is model.scale for group in groups for parameter in group.parameters())


def test_one_fragment_is_the_whole_model_in_its_own_order() -> None:
    model = Model(3)

    [whole] = split([model], 1)

    assert [name for name, _ in whole.named_parameters()] == [f"0.{name}" for name, _ in model.named_parameters()]


def test_more_fragments_than_layers() -> None:
    with pytest.raises(ValueError, match=r"diloco\.fragments = 4, but the model has 3 layers"):
        split([Model(3)], 4)
