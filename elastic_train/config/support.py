"""Settings of torchtitan's files that cannot be honoured: accepted while they are off, refused when they are
on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from elastic_train.config.keys import value_of
from elastic_train.config.problem import Problem
from elastic_train.config.schema import RunConfig
from elastic_train.config.toml_text import value_text


class Unsupported(NamedTuple):
    """A key that must stay off."""

    key: str
    off: Any
    """The value that is accepted."""
    why: str
    switch: str = ""
    """Key without which this one is not in force, so that any value is as good as off."""


_IN_PROCESS = "data is read in the trainer's own process, which keeps its position exact"
_NO_LOADING = "a run starts from new parameters or, with --resume, where another one ended"
_NO_EXPERTS = "Llama 3 has no experts"

UNSUPPORTED: dict[str, Unsupported] = {
    row.key: row
    for row in (
        Unsupported("job.config_file", None, "name the file on the command line"),
        Unsupported("job.custom_config_module", "", "torchtitan's Python configs do not exist here"),
        Unsupported("model.converters", (), "low-precision training such as float8 is not available"),
        Unsupported("model.print_after_conversion", False, "no converter runs"),
        Unsupported("optimizer.early_step_in_backward", False, "torchtitan no longer has it"),
        *(
            Unsupported(f"{section}.dataloader.{key}", off, _IN_PROCESS, switch)
            for section, switch in (("training", ""), ("validation", "validation.enable"))
            for key, off in (
                ("num_workers", 0),
                ("persistent_workers", False),
                ("prefetch_factor", None),
            )
        ),
        Unsupported(
            "validation.dataloader.log_samples",
            False,
            "an evaluation reads the same data again and again, on purpose",
            "validation.enable",
        ),
        Unsupported("parallelism.disable_loss_parallel", False, "torchtitan no longer has it"),
        Unsupported("parallelism.context_parallel_rotate_method", "allgather", "torchtitan no longer has another"),
        Unsupported("parallelism.expert_parallel_degree", 1, _NO_EXPERTS),
        Unsupported(
            "checkpoint.enable_ft_dataloader_checkpoints",
            True,
            "the positions in the data are always part of the state",
            "checkpoint.enable",
        ),
        Unsupported("checkpoint.initial_load_path", None, _NO_LOADING, "checkpoint.enable"),
        Unsupported("checkpoint.initial_load_in_hf", False, _NO_LOADING, "checkpoint.enable"),
        Unsupported("checkpoint.initial_load_in_hf_quantized", False, _NO_LOADING, "checkpoint.enable"),
        Unsupported("checkpoint.load_step", -1, _NO_LOADING, "checkpoint.enable"),
        Unsupported("checkpoint.exclude_from_loading", (), _NO_LOADING, "checkpoint.enable"),
        Unsupported("checkpoint.load_only", False, _NO_LOADING, "checkpoint.enable"),
        Unsupported("checkpoint.create_seed_checkpoint", False, _NO_LOADING, "checkpoint.enable"),
        Unsupported(
            "checkpoint.last_save_in_hf",
            False,
            "the last state is written in torch's format",
            "checkpoint.enable",
        ),
        Unsupported(
            "checkpoint.enable_first_step_checkpoint",
            False,
            "snapshots are taken every checkpoint.interval steps",
            "checkpoint.enable",
        ),
        Unsupported("activation_checkpoint.early_stop", False, "torchtitan no longer has it"),
        Unsupported("comm.mode", "default", "replicas need real communication"),
        Unsupported("memory_estimation.enable", False, "torchtitan no longer has it"),
        Unsupported(
            "fault_tolerance.semi_sync_method",
            "diloco",
            "replicas come together by DiLoCo alone",
            "fault_tolerance.enable",
        ),
        Unsupported(
            "fault_tolerance.module_fqns_per_model_fragment",
            (),
            "the model is split by diloco.fragments",
            "fault_tolerance.enable",
        ),
        Unsupported("experimental.custom_import", "", "only elastic_train's own models are trained"),
        Unsupported("experimental.custom_args_module", "", "torchtitan's Python configs do not exist here"),
        Unsupported("debug.moe_force_load_balance", False, _NO_EXPERTS),
    )
}


def unsupported(config: RunConfig) -> Iterator[Problem]:
    """What the config switches on that cannot be honoured."""
    for key, off, why, switch in UNSUPPORTED.values():
        value = value_of(config, key)
        if value == off or (switch and not value_of(config, switch)):
            continue
        blamed = (key, switch) if switch else (key,)
        if value is None:
            yield Problem(blamed, f"{key} is not set: {why}; set it to {value_text(off)}")
        else:
            remedy = "leave it out" if off is None else f"leave it at {value_text(off)}"
            yield Problem(blamed, f"{key} = {value_text(value)} is not supported: {why}; {remedy}")


def differences(config: RunConfig) -> Iterator[str]:
    """What holds although a torchtitan file reads otherwise, and changes no result."""
    checkpointing = config.activation_checkpoint
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option != "op":
        yield (
            f"activation_checkpoint.selective_ac_option = {value_text(checkpointing.selective_ac_option)}: "
            'torchtitan no longer counts layers, so "op" holds; results are the same, memory differs'
        )
    float8 = config.quantize.linear.float8
    if float8.enable_fsdp_float8_all_gather or float8.precompute_float8_dynamic_scale_for_fsdp or float8.recipe_name:
        yield "quantize.linear.float8 is not in force: model.converters names no converter"
