"""The loss of a state that a run has left, on data that is the same for all runs that are compared."""

from __future__ import annotations

from pathlib import Path

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before torchtitan)

import torch
import torch.distributed.checkpoint as dcp
from torch.nn import functional
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from elastic_train.config import RunConfig
from elastic_train.replica.data.corpus import ensure_corpus
from elastic_train.replica.data.loader import ElasticDataLoader
from elastic_train.replica.data.position import PositionTable, ShardPosition
from elastic_train.replica.titan.translate import translate

_ROWS = 16


@torch.no_grad()
def held_out_loss(config: RunConfig, state: Path, *, batches: int = 16) -> float:
    """Mean cross entropy over ``batches`` x 16 sequences of ``training.seq_len`` tokens.

    They are the first of the dataset's second epoch, which comes in another order than the first: a run that has read
    little of the dataset has seen next to none of them.

    Args:
        state: the folder of a checkpoint with the parameters.
    """
    titan = translate(config, slot=0, run_dir=state)
    assert titan.model_spec is not None
    titan.model_spec.model.update_from_config(config=titan)
    model = titan.model_spec.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    dcp.load(dict(model.state_dict()), storage_reader=dcp.FileSystemReader(state), no_dist=True)
    model.eval()
    assets = config.model.hf_assets_path or str(ensure_corpus().tokenizer)
    shards = config.training.dataloader.virtual_shards
    loader = ElasticDataLoader(
        ElasticDataLoader.Config(dataset=config.training.dataset, virtual_shards=shards),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=assets),
        seq_len=config.training.seq_len,
        local_batch_size=_ROWS,
    )
    loader.restore(PositionTable.start(shards).replace(dict.fromkeys(range(shards), ShardPosition(epoch=1))))
    losses = [
        functional.cross_entropy(model(batch["input"], batch["positions"]).flatten(0, 1).float(), labels.flatten())
        for (batch, labels), _ in zip(loader, range(batches), strict=False)
    ]
    return float(torch.stack(losses).mean())
