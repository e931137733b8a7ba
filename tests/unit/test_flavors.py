from elastic_train.replica.titan import fixes  # isort: skip  (must come before the rest of torchtitan)

import pytest
import torch
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

from elastic_train.config import ConfigError
from elastic_train.device import Device
from elastic_train.replica.titan.flavors import TINY_VOCABULARY, model_spec

SHAPES = {
    "tiny": (2, 64, TINY_VOCABULARY),
    "debugmodel": (6, 256, 2048),
    "1B": (16, 2048, 128256),
    "3B": (28, 3072, 128256),
    "8B": (32, 4096, 128256),
    "70B": (80, 8192, 128256),
    "405B": (126, 16384, 128256),
}


def test_every_flavor_of_torchtitan_can_be_named() -> None:
    assert SHAPES.keys() == {"tiny", *llama3_configs}


@pytest.mark.parametrize("flavor", SHAPES)
def test_shape(flavor: str) -> None:
    spec = model_spec(flavor)

    model = spec.model
    assert (len(model.layers), model.dim, model.vocab_size) == SHAPES[flavor]
    assert (spec.name, spec.flavor) == ("llama3", flavor)


@pytest.mark.parametrize(("kind", "trains_everywhere"), [("cpu", True), ("cuda", False)])
def test_attention_is_one_that_trains_on_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, trains_everywhere: bool
) -> None:
    monkeypatch.setattr(fixes, "DEVICE", Device(kind))  # type: ignore[arg-type]

    attention = {type(layer.attention.inner_attention) for layer in model_spec("tiny").model.layers}

    assert (attention == {ScaledDotProductAttention.Config}) == trains_everywhere


def test_tiny_is_smaller_than_all_of_torchtitans() -> None:
    def parameters(flavor: str) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in model_spec(flavor).model.build().parameters())

    assert 250_000 < parameters("tiny") < parameters("debugmodel") / 10


def test_tiny_learns() -> None:
    torch.manual_seed(0)
    model = model_spec("tiny").model.build()
    model.init_weights()
    tokens = torch.randint(TINY_VOCABULARY, (2, 17))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0] / 2


def test_a_flavor_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r'model\.flavor: no Llama 3 flavor "?\'?9B.*; there are tiny, debugmodel'):
        model_spec("9B")
