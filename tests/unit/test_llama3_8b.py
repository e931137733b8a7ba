"""The 8B model of ``configs/llama3_8b.toml``, built and sharded as rank 3 of 8 does it, without memory or peers."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend

from elastic_train.config import load_config
from elastic_train.diloco.fragments import split
from elastic_train.replica.titan.translate import translate

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.toml"
PARAMETERS = 8_030_261_248
RANKS, RANK = 8, 3


@dataclasses.dataclass(frozen=True)
class Built:
    model: nn.Module
    shapes: dict[str, torch.Size]
    """Of whole parameters, before they were sharded."""

    def parameters(self) -> dict[str, nn.Parameter]:
        wrapped = self.model.named_parameters()
        return {name.replace("_checkpoint_wrapped_module.", ""): parameter for name, parameter in wrapped}


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    config = load_config(CONFIG, {"model.hf_assets_path": "/none"}, {}).config
    titan = translate(config, slot=1, run_dir=Path("/none"))
    assert config.orchestrator.procs_per_replica == RANKS
    backend_before = get_spmd_backend()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    try:
        set_spmd_backend(titan.parallelism.spmd_backend)
        titan.model_spec.model.update_from_config(config=titan)
        with torch.device("meta"):
            model = titan.model_spec.model.build()
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        titan.model_spec.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(titan.parallelism, RANKS),
            training=titan.training,
            parallelism=titan.parallelism,
            compile_config=titan.compile,
            ac_config=titan.activation_checkpoint,
            dump_folder=titan.dump_folder,
        )
        yield Built(model, shapes)
    finally:
        set_spmd_backend(backend_before)
        dist.destroy_process_group()


def test_it_is_the_8b_model(built: Built) -> None:
    assert sum(map(math.prod, built.shapes.values())) == PARAMETERS
    assert len({name.split(".")[1] for name in built.shapes if name.startswith("layers.")}) == 32
    assert built.shapes["tok_embeddings.weight"] == (128256, 4096)
    assert built.shapes["layers.31.feed_forward.w2.weight"] == (4096, 14336)


def test_every_parameter_is_sharded_by_rows_over_eight_ranks(built: Built) -> None:
    shards = {
        name: tuple(parameter.to_local().shape)
        for name, parameter in built.parameters().items()
        if isinstance(parameter, DTensor)
    }

    assert shards == {name: (rows // RANKS, *columns) for name, (rows, *columns) in built.shapes.items()}


def test_nothing_is_allocated(built: Built) -> None:
    tensors = [*built.model.parameters(), *built.model.buffers()]

    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_every_layer_recomputes_its_activations(built: Built) -> None:
    recomputing = [
        module for name, module in built.model.named_modules() if name.endswith("_checkpoint_wrapped_module")
    ]

    assert len(recomputing) == 32


def test_its_fragments_hold_the_whole_model(built: Built) -> None:
    sizes = [sum(parameter.numel() for parameter in group.parameters()) for group in split([built.model], 4)]

    assert sum(sizes) == PARAMETERS
    # Nothing but the embedding and the output projection, which cannot be divided, stands between them.
    embedding = built.model.get_parameter("tok_embeddings.weight").numel()
    assert max(sizes) - min(sizes) <= embedding
