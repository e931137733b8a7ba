import pytest
import torch
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


def test_fragments_are_strides_of_the_layers() -> None:
    model = Model(5)

    found = owners(model, split([model], 2))

    assert {name: where[0] for name, where in found.items() if name.endswith("weight")} == {
        "tok_embeddings.weight": 0,
        "layers.0.weight": 0,
        "layers.1.weight": 1,
        "layers.2.weight": 0,
        "layers.3.weight": 1,
        "layers.4.weight": 0,
        "norm.weight": 1,
        "lm_head.weight": 1,
    }
    assert {len(where) for where in found.values()} == {1}


def test_layers_go_on_counting_over_the_parts_of_a_pipeline() -> None:
    first, last = Model(1), Model(2)
    del first.norm, first.lm_head, last.tok_embeddings

    groups = split([first, last], 3)

    assert owners(first, groups)["layers.0.weight"] == [0]
    assert owners(last, groups)["layers.0.weight"] == [1]
    assert owners(last, groups)["layers.1.weight"] == [2]
    assert owners(last, groups)["lm_head.weight"] == [2]


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_tied_embeddings_sync_once(fragments: int) -> None:
    model = Model(3, tied=True)

    assert owners(model, split([model], fragments))["tok_embeddings.weight"] == [0]


def test_one_fragment_is_the_whole_model_in_its_own_order() -> None:
    model = Model(3)

    [whole] = split([model], 1)

    assert [name for name, _ in whole.named_parameters()] == [f"0.{name}" for name, _ in model.named_parameters()]


def test_more_fragments_than_layers() -> None:
    with pytest.raises(ValueError, match=r"diloco\.fragments = 4, but the model has 3 layers"):
        split([Model(3)], 4)
