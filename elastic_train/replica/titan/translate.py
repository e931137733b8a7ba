"""Our config in torchtitan 0.3.0's words: the one place that knows both.

torchtitan has no TOML any more and renamed part of what its files said; what it no longer has, ``config`` has
refused before anything gets here.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from elastic_train.replica.titan import fixes  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from elastic_train.config import ActivationCheckpointConfig, DataLoaderConfig, OptimizerConfig, RunConfig
from elastic_train.replica.data.corpus import ensure_corpus
from elastic_train.replica.data.loader import ElasticDataLoader
from elastic_train.replica.titan.flavors import model_spec
from elastic_train.replica.titan.step_metrics import StepMetrics

logger = logging.getLogger(__name__)


def translate(config: RunConfig, *, slot: int, run_dir: Path) -> Trainer.Config:
    """The trainer's config of the replica in ``slot``. Traces, TensorBoard files and checkpoints go to ``run_dir``.

    Raises:
        ConfigError: the config names a model that does not exist.
    """
    spec = model_spec(config.model.flavor)
    training, parallelism, on_cpu = config.training, config.parallelism, fixes.DEVICE.kind == "cpu"
    if on_cpu and training.mixed_precision_param != "float32":
        logger.info("training in float32: bfloat16 has no fast kernels on a CPU")
    loss = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    pipelined = parallelism.pipeline_parallel_degree > 1
    return Trainer.Config(
        model_spec=spec,
        # The logits of a large vocabulary take more memory than the layers; in chunks they do not. A pipeline's
        # loss runs inside its schedule and stays whole.
        loss=loss if pipelined or on_cpu else ChunkedLossWrapper.Config(loss_fn=loss),
        hf_assets_path=config.model.hf_assets_path or str(ensure_corpus().tokenizer),
        dump_folder=str(run_dir),
        # Replicas number their ranks alike, so each needs folders of its own below the run's.
        profiler=Profiler.Config(
            **_fields(config.profiling, without=("save_traces_folder", "save_memory_snapshot_folder")),
            save_traces_folder=f"{config.profiling.save_traces_folder}/replica_{slot}",
            save_memory_snapshot_folder=f"{config.profiling.save_memory_snapshot_folder}/replica_{slot}",
        ),
        metrics=StepMetrics.Config(**_fields(config.metrics), replica=slot),
        dataloader=_dataloader(
            config.training.dataset,
            config.training.dataset_path,
            training.dataloader,
            replica=slot,
            replicas=config.orchestrator.replicas,
            infinite=True,
        ),
        optimizer=_optimizer(config.optimizer),
        lr_scheduler=LRSchedulersContainer.Config(**_fields(config.lr_scheduler)),
        training=TrainingConfig(
            **_fields(training, without=("dataset", "dataset_path", "dataloader", "mixed_precision_param")),
            mixed_precision_param="float32" if on_cpu else training.mixed_precision_param,
            # A captured graph cannot follow state that a peer's replaces, and there is none on a CPU.
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            **{
                key: value
                for key, value in _fields(parallelism).items()
                if key in {field.name for field in dataclasses.fields(ParallelismConfig)}
            }
            | {
                "module_fqns_per_model_part": _lists(parallelism.module_fqns_per_model_part),
                "context_parallel_load_balancer": parallelism.context_parallel_load_balancer or None,
            },
            spmd_backend="partial_dtensor",
        ),
        # Durable snapshots are written by this package, at an outer step (see replica.durable).
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=_activation_checkpoint(config.activation_checkpoint),
        compile=CompileConfig(
            enable=config.compile.enable,
            components=list(config.compile.components),
            backend=config.compile.backend,
            enable_async_tensor_parallel=parallelism.enable_async_tensor_parallel,
        ),
        comm=CommConfig(
            **_fields(config.comm, without=("trace_buf_size", "save_traces_folder")),
            save_traces_folder=f"{config.comm.save_traces_folder}/replica_{slot}",
            trace_buf_size=0 if on_cpu else config.comm.trace_buf_size,
        ),
        validator=Validator.Config(
            enable=config.validation.enable,
            freq=config.validation.freq,
            steps=config.validation.steps,
            dataloader=_dataloader(
                config.validation.dataset,
                config.validation.dataset_path,
                config.validation.dataloader,
                replica=0,
                replicas=1,
                infinite=False,
            ),
        ),
        debug=DebugConfig(
            **_fields(config.debug, without=("min_step_s",)),
            print_config=config.job.print_config,
            save_config_file=config.job.save_config_file,
            # It would write one more file per rank; the event log has what matters.
            enable_structured_logging=False,
        ),
    )


def _dataloader(
    dataset: str, path: str, settings: DataLoaderConfig, *, replica: int, replicas: int, infinite: bool
) -> ElasticDataLoader.Config:
    return ElasticDataLoader.Config(
        dataset=dataset,
        dataset_path=path or None,
        virtual_shards=settings.virtual_shards,
        pin_memory=settings.pin_memory,
        replica=replica,
        replicas=replicas,
        infinite=infinite,
    )


def _optimizer(config: OptimizerConfig) -> OptimizersContainer.Config:
    return OptimizersContainer.Config(
        implementation=config.implementation,
        param_groups=[
            ParamGroupConfig(
                pattern=r".*",
                optimizer_name=config.name,
                optimizer_kwargs={
                    "lr": config.lr,
                    "betas": (config.beta1, config.beta2),
                    "eps": config.eps,
                    "weight_decay": config.weight_decay,
                },
            )
        ],
    )


def _activation_checkpoint(config: ActivationCheckpointConfig) -> Any:
    common = {
        "preserve_rng_state": config.preserve_rng_state,
        "determinism_check": config.determinism_check,
        "debug": config.debug,
    }
    match config.mode:
        case "none":
            return None
        case "full":
            return FullAC.Config(**common)
        case "selective":
            return SelectiveAC.Config(
                force_recompute_mm_shapes_by_fqns=list(config.per_op_sac_force_recompute_mm_shapes_by_fqns),
                **common,
            )
        case "memory_budget":
            return MemoryBudgetAC.Config(
                memory_budget=config.memory_budget,
                visualize_memory_budget_pareto=config.visualize_memory_budget_pareto,
                **common,
            )


def _fields(section: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A section's keys and values, for a torchtitan config that has the same names."""
    return {
        field.name: getattr(section, field.name) for field in dataclasses.fields(section) if field.name not in without
    }


def _lists(value: tuple[tuple[str, ...], ...] | None) -> list[list[str]] | None:
    return None if value is None else [list(part) for part in value]
