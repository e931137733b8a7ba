import dataclasses
from pathlib import Path
from typing import Any

from elastic_train.replica.titan import fixes  # isort: skip  (must come before the rest of torchtitan)

import pytest
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import ParallelismConfig as TitanParallelism
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from elastic_train.config import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    DataLoaderConfig,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    OrchestratorConfig,
    ParallelismConfig,
    ProfilingConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from elastic_train.config.support import UNSUPPORTED
from elastic_train.device import Device
from elastic_train.replica.data.corpus import ensure_corpus
from elastic_train.replica.titan.translate import translate

RUN_DIR = Path("/runs/one")
# Given, so that the embedded tokenizer need not be made.
TINY = ModelConfig(flavor="tiny", hf_assets_path="/assets")


def titan(slot: int = 0, **sections: Any) -> Any:
    """torchtitan's config for ours with some sections set."""
    return translate(RunConfig(**{"model": TINY, **sections}), slot=slot, run_dir=RUN_DIR)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "DEVICE", Device("cuda"))


def assert_same(theirs: Any, ours: Any, without: tuple[str, ...] = ()) -> None:
    """Every key of our section has its value in torchtitan's, under its own name."""
    for field in dataclasses.fields(ours):
        if field.name not in without:
            assert getattr(theirs, field.name) == getattr(ours, field.name), field.name


def test_optimizer() -> None:
    made = titan(
        optimizer=OptimizerConfig(
            name="Adam", lr=1e-3, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.3, implementation="foreach"
        )
    ).optimizer

    [group] = made.param_groups
    assert (group.pattern, group.optimizer_name) == (".*", "Adam")
    assert group.optimizer_kwargs == {"lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3}
    assert made.implementation == "foreach"


def test_learning_rate_schedule() -> None:
    ours = LRSchedulerConfig(warmup_steps=7, total_steps=80, decay_ratio=0.4, decay_type="cosine", min_lr_factor=0.1)

    assert_same(titan(lr_scheduler=ours).lr_scheduler, ours)


def test_training(on_gpu: None) -> None:
    ours = TrainingConfig(
        local_batch_size=3,
        global_batch_size=12,
        seq_len=96,
        max_norm=0.5,
        steps=77,
        dtype="bfloat16",
        mixed_precision_param="bfloat16",
        mixed_precision_reduce="float32",
        enable_cpu_offload=True,
        gc_freq=11,
        gc_debug=True,
    )

    assert_same(titan(training=ours).training, ours, without=("dataset", "dataset_path", "dataloader"))


def test_parallelism() -> None:
    ours = ParallelismConfig(
        data_parallel_replicate_degree=2,
        data_parallel_shard_degree=4,
        fsdp_reshard_after_forward="always",
        tensor_parallel_degree=8,
        pipeline_parallel_degree=2,
        module_fqns_per_model_part=(("tok_embeddings", "layers.0"), ("layers.1", "norm", "lm_head")),
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=2,
        pipeline_parallel_layers_per_stage=3,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_schedule_csv="schedule.csv",
        pipeline_parallel_microbatch_size=5,
        context_parallel_degree=3,
    )
    theirs = titan(parallelism=ours, training=TrainingConfig(local_batch_size=5)).parallelism
    other_names = {field.name for field in dataclasses.fields(ours)} - {
        field.name for field in dataclasses.fields(TitanParallelism)
    }

    assert_same(theirs, ours, without=(*other_names, "module_fqns_per_model_part"))
    assert theirs.module_fqns_per_model_part == [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    assert theirs.spmd_backend == "partial_dtensor"


def test_keys_that_torchtitan_no_longer_has_are_refused_or_without_effect() -> None:
    gone = {field.name for field in dataclasses.fields(ParallelismConfig)} - {
        field.name for field in dataclasses.fields(TitanParallelism)
    }
    elsewhere = {"enable_async_tensor_parallel"}
    # Only models with experts have a use for them, and parallelism.expert_parallel_degree is refused.
    for_experts = {name for name in gone if "expert" in name}

    assert "parallelism.expert_parallel_degree" in UNSUPPORTED
    assert {f"parallelism.{name}" for name in gone - elsewhere - for_experts} <= UNSUPPORTED.keys()


@pytest.mark.parametrize(("ours", "theirs"), [("headtail", "headtail"), ("ptrr", "ptrr"), ("", None)])
def test_context_parallel_load_balancer(ours: Any, theirs: str | None) -> None:
    config = ParallelismConfig(context_parallel_load_balancer=ours)

    assert titan(parallelism=config).parallelism.context_parallel_load_balancer == theirs


def test_each_replica_profiles_into_a_folder_of_its_own() -> None:
    ours = ProfilingConfig(
        enable_profiling=True,
        save_traces_folder="traces",
        profile_freq=9,
        enable_memory_snapshot=True,
        save_memory_snapshot_folder="memory",
    )
    made = titan(slot=2, profiling=ours).profiler

    assert_same(made, ours, without=("save_traces_folder", "save_memory_snapshot_folder"))
    assert (made.save_traces_folder, made.save_memory_snapshot_folder) == ("traces/replica_2", "memory/replica_2")


def test_metrics_of_a_replica() -> None:
    ours = MetricsConfig(log_freq=3, enable_tensorboard=True, save_tb_folder="board", save_for_all_ranks=True)
    made = titan(slot=2, metrics=ours)

    assert_same(made.metrics, ours)
    assert made.metrics.replica == 2
    assert made.dump_folder == str(RUN_DIR)


def test_data_is_shared_out_over_the_replicas() -> None:
    training = TrainingConfig(dataset="c4_test", dataset_path="/data", dataloader=DataLoaderConfig(virtual_shards=12))

    made = titan(slot=2, training=training, orchestrator=OrchestratorConfig(replicas=3)).dataloader

    assert (made.dataset, made.dataset_path, made.virtual_shards) == ("c4_test", "/data", 12)
    assert (made.replica, made.replicas, made.infinite) == (2, 3, True)


def test_every_replica_validates_on_all_of_the_validation_data() -> None:
    made = titan(
        slot=2,
        orchestrator=OrchestratorConfig(replicas=3),
        validation=ValidationConfig(
            enable=True, dataset="c4_validation", freq=5, steps=6, dataloader=DataLoaderConfig(virtual_shards=4)
        ),
    ).validator

    assert (made.enable, made.freq, made.steps) == (True, 5, 6)
    data = made.dataloader
    assert (data.dataset, data.dataset_path, data.virtual_shards) == ("c4_validation", None, 4)
    assert (data.replica, data.replicas, data.infinite) == (0, 1, False)


def test_torchtitan_writes_no_checkpoints_of_its_own() -> None:
    assert not titan(checkpoint=CheckpointConfig(enable=True, interval=5)).checkpoint.enable


COMPILED = CompileConfig(enable=True, components=("model",))


def test_no_activation_checkpoint() -> None:
    assert titan(activation_checkpoint=ActivationCheckpointConfig(mode="none")).activation_checkpoint is None


@pytest.mark.parametrize(
    ("mode", "kind"), [("full", FullAC), ("selective", SelectiveAC), ("memory_budget", MemoryBudgetAC)]
)
def test_activation_checkpoint(mode: Any, kind: Any) -> None:
    ours = ActivationCheckpointConfig(mode=mode, preserve_rng_state=False, determinism_check="none", debug=True)
    made = titan(activation_checkpoint=ours, compile=COMPILED).activation_checkpoint

    assert type(made) is kind.Config
    assert (made.preserve_rng_state, made.determinism_check, made.debug) == (False, "none", True)


def test_details_of_activation_checkpoint() -> None:
    def made(**keys: Any) -> Any:
        ours = ActivationCheckpointConfig(**keys)
        return titan(activation_checkpoint=ours, compile=COMPILED).activation_checkpoint

    selective = made(mode="selective", per_op_sac_force_recompute_mm_shapes_by_fqns=("a", "b"))
    assert selective.force_recompute_mm_shapes_by_fqns == ["a", "b"]
    budget = made(mode="memory_budget", memory_budget=0.25, visualize_memory_budget_pareto=True)
    assert (budget.memory_budget, budget.visualize_memory_budget_pareto) == (0.25, True)


def test_compilation() -> None:
    made = titan(
        compile=CompileConfig(enable=True, components=("model",), backend="eager"),
        parallelism=ParallelismConfig(enable_async_tensor_parallel=True),
    ).compile

    assert (made.enable, made.components, made.backend) == (True, ["model"], "eager")
    assert made.enable_async_tensor_parallel


def test_timeouts_inside_a_replica() -> None:
    ours = CommConfig(init_timeout_seconds=33, train_timeout_seconds=22, save_traces_folder="flights")
    made = titan(slot=2, comm=ours).comm

    assert (made.init_timeout_seconds, made.train_timeout_seconds) == (33, 22)
    assert made.save_traces_folder == "flights/replica_2"


def test_debugging() -> None:
    ours = DebugConfig(seed=7, deterministic=True, min_step_s=1.0)
    made = titan(debug=ours, job=JobConfig(print_config=True, save_config_file="titan.json")).debug

    assert_same(made, ours, without=("min_step_s",))
    assert (made.print_config, made.save_config_file) == (True, "titan.json")
    assert not made.enable_structured_logging


def test_on_a_cpu_what_has_no_kernel_there_is_replaced() -> None:
    made = titan(training=TrainingConfig(mixed_precision_param="bfloat16"), comm=CommConfig(trace_buf_size=20_000))

    assert made.training.mixed_precision_param == "float32"
    assert made.training.disable_cuda_graphs
    assert made.comm.trace_buf_size == 0
    assert isinstance(made.loss, CrossEntropyLoss.Config)
    assert {type(layer.attention.inner_attention).__qualname__ for layer in made.model_spec.model.layers} == {
        "ScaledDotProductAttention.Config"
    }


def test_on_a_gpu_it_is_as_the_config_says(on_gpu: None) -> None:
    made = titan(training=TrainingConfig(mixed_precision_param="bfloat16"), comm=CommConfig(trace_buf_size=20_000))

    assert made.training.mixed_precision_param == "bfloat16"
    assert made.training.disable_cuda_graphs
    assert made.comm.trace_buf_size == 20_000
    assert isinstance(made.loss, ChunkedLossWrapper.Config)
    assert made.loss.loss_fn.global_vocab_size == made.model_spec.model.vocab_size
    assert "ScaledDotProductAttention.Config" not in {
        type(layer.attention.inner_attention).__qualname__ for layer in made.model_spec.model.layers
    }


def test_a_pipelines_loss_is_whole(on_gpu: None) -> None:
    made = titan(parallelism=ParallelismConfig(pipeline_parallel_degree=2))

    assert isinstance(made.loss, CrossEntropyLoss.Config)


def test_the_embedded_tokenizer_is_used_when_none_is_named() -> None:
    made = titan(model=ModelConfig(flavor="tiny", hf_assets_path=""))

    assert made.hf_assets_path == str(ensure_corpus().tokenizer)
    assert titan().hf_assets_path == "/assets"
