"""The 8B model of ``configs/llama3_8b.toml``, built and sharded as rank 3 of 8 does it, without memory or peers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.programs import finished

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, pathlib, sys
from elastic_train.replica import titan_fixes
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend

from elastic_train.config import load_config
from elastic_train.diloco.fragments import split
from elastic_train.replica.titan import translate

config = load_config(pathlib.Path(sys.argv[1]), {"model.hf_assets_path": "/none"}, {}).config
titan = translate(config, slot=1, run_dir=pathlib.Path("/none"))
ranks = config.orchestrator.procs_per_replica
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=ranks)
set_spmd_backend(titan.parallelism.spmd_backend)
titan.model_spec.model.update_from_config(config=titan)
with torch.device("meta"):
    model = titan.model_spec.model.build()
sizes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
titan.model_spec.parallelize_fn(
    model,
    parallel_dims=ParallelDims.from_config(titan.parallelism, ranks),
    training=titan.training,
    parallelism=titan.parallelism,
    compile_config=titan.compile,
    ac_config=titan.activation_checkpoint,
    dump_folder=titan.dump_folder,
)
plain = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
print(json.dumps({
    "ranks": ranks,
    "layers": len(model.layers),
    "sizes": sizes,
    "shards": {name: list(p.to_local().shape) for name, p in plain.items() if isinstance(p, DTensor)},
    "devices": sorted({t.device.type for t in (*model.parameters(), *model.buffers())}),
    "recomputing": sum("checkpoint" in type(layer).__name__.lower() for layer in model.layers.values()),
    "fragments": [sum(p.numel() for p in group.parameters()) for group in split([model], 4)],
}))
"""


@pytest.fixture(scope="module")
def built() -> Any:
    done = finished(PROGRAM, ROOT / "configs" / "llama3_8b.toml")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_the_8b_model(built: Any) -> None:
    assert built["layers"] == 32
    assert sum(map(math.prod, built["sizes"].values())) == 8_030_261_248
    assert built["sizes"]["tok_embeddings.weight"] == [128256, 4096]
    assert built["sizes"]["layers.31.feed_forward.w2.weight"] == [4096, 14336]


def test_every_parameter_is_sharded_by_rows_over_eight_ranks(built: Any) -> None:
    assert built["ranks"] == 8
    assert built["shards"] == {
        name: [rows // 8, *columns] for name, (rows, *columns) in built["sizes"].items() if rows % 8 == 0
    }
    assert built["shards"].keys() == built["sizes"].keys()


def test_nothing_is_allocated(built: Any) -> None:
    assert built["devices"] == ["meta"]


def test_every_layer_recomputes_its_activations(built: Any) -> None:
    assert built["recomputing"] == 32


def test_its_fragments_hold_the_whole_model(built: Any) -> None:
    assert sum(built["fragments"]) == 8_030_261_248
    assert built["fragments"][1] == built["fragments"][2] < built["fragments"][0]
