"""torchtitan's trainer beside ours: the same work for a rank, and checkpoints with every rank's place in the data."""

from pathlib import Path

import pytest
import torch

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.components.tokenizer import BaseTokenizer

from elastic_train.config import ModelConfig, OrchestratorConfig, RunConfig, TrainingConfig
from elastic_train.replica.titan.translate import translate
from scripts.checkpoint_trainer import RankDataLoader, trainer_config
from tests.unit.test_data_loader import CharTokenizer, reading

# Given, so that the embedded tokenizer need not be made.
TINY = ModelConfig(flavor="tiny", hf_assets_path="/assets")
CHECKPOINTS = Path("/checkpoints")


@pytest.mark.parametrize(("of_a_replica", "of_all"), [(-1, -1), (8, 24)])
def test_a_rank_has_as_many_tokens_a_step_as_in_a_replica(of_a_replica: int, of_all: int) -> None:
    config = RunConfig(
        model=TINY,
        orchestrator=OrchestratorConfig(replicas=3, procs_per_replica=2),
        training=TrainingConfig(local_batch_size=2, global_batch_size=of_a_replica),
    )

    told = trainer_config(config, run_dir=Path("/run"), checkpoints=CHECKPOINTS, interval=20)
    alone = translate(config, slot=0, run_dir=Path("/run"))

    assert told.training.local_batch_size == alone.training.local_batch_size
    assert told.training.global_batch_size == of_all
    assert told.parallelism.data_parallel_replicate_degree == 3
    assert told.parallelism.data_parallel_shard_degree == alone.parallelism.data_parallel_shard_degree
    assert told.model_spec.flavor == "tiny"
    assert told.dataloader.replicas == 1
    assert (told.checkpoint.enable, told.checkpoint.interval) == (True, 20)
    assert (told.checkpoint.folder, told.checkpoint.async_mode) == (str(CHECKPOINTS), "disabled")


def loader(rank: int, tokenizer: BaseTokenizer) -> RankDataLoader:
    config = RankDataLoader.Config(virtual_shards=8)
    made: RankDataLoader = config.build(
        dp_world_size=2, dp_rank=rank, tokenizer=tokenizer, seq_len=4, local_batch_size=1
    )
    return made


def drawn(loader: RankDataLoader, batches: int) -> list[torch.Tensor]:
    iterator = iter(loader)
    return [next(iterator)[0]["input"] for _ in range(batches)]


def test_every_rank_goes_on_from_its_own_position() -> None:
    with reading([chr(ord("A") + number) * 30 for number in range(21)]):
        ranks = [loader(rank, CharTokenizer()) for rank in range(2)]
        for number, rank in enumerate(ranks):
            drawn(rank, 3 + number)
        saved = {name: rows for rank in ranks for name, rows in rank.state_dict().items()}

        resumed = [loader(rank, CharTokenizer()) for rank in range(2)]
        for rank in resumed:
            rank.load_state_dict(saved)

        for old, new in zip(ranks, resumed, strict=True):
            assert torch.equal(torch.stack(drawn(old, 5)), torch.stack(drawn(new, 5)))
