"""What is trained in a world: a few layers, moved by numbers that anybody can compute again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_train.diloco.fragments import split

Arrays = dict[str, np.ndarray]

_LAYERS = 4
_MOVE = 0.01


class Model(nn.Module):
    """As torchtitan's are built: ``layers``, and something around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleDict({str(number): nn.Linear(width, width) for number in range(_LAYERS)})
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 2 * width, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for layer in self.layers.values():
            hidden = hidden + torch.tanh(layer(hidden))
        output: torch.Tensor = self.output(self.norm(hidden))
        return output


def build(width: int, ranks: int) -> Model:
    """The same parameters in every process; from two ranks on sharded over them."""
    torch.manual_seed(0)
    model = Model(width)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def parameters(width: int) -> Arrays:
    """All parameters at the start, float32, by name."""
    return {name: p.detach().numpy() for name, p in build(width, 1).named_parameters()}


def fragment_names(width: int, fragments: int) -> list[list[str]]:
    """The names of each fragment's parameters, in the order in which they lie in its flat range."""
    model = build(width, 1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in fragment.parameters()] for fragment in split([model], fragments)]


def move(shapes: Mapping[str, tuple[int, ...]], slot: int, incarnation: int, step: int) -> Arrays:
    """What that inner step of that incarnation adds to each parameter, float32."""
    chance = np.random.default_rng((slot, incarnation, step))
    return {name: chance.standard_normal(shape, dtype=np.float32) * np.float32(_MOVE) for name, shape in shapes.items()}


def shard(whole: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """What FSDP gives to a rank: an equal part along the first dimension."""
    rows = whole.shape[0] // ranks
    return whole[rank * rows : (rank + 1) * rows]
