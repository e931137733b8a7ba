"""torchtitan's sections, with the names, types and defaults of its last TOML release (v0.2.2).

People have these files on disk, so they load as they are. Where a default differs, the key says why. What
torchtitan no longer offers is still accepted while it is switched off; `support` knows those keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_train.config.flavors import Flavor
from elastic_train.config.section import (
    Count,
    Decay,
    Fraction,
    Name,
    NonNegative,
    Positive,
    PositiveInt,
    StringLists,
    Strings,
    section,
)


@section
class JobConfig:
    """What this run is called and where it writes."""

    config_file: str | None = None
    """The config file; named on the command line instead."""

    dump_folder: Name = "./outputs"
    """Folder under which every run gets a folder of its own."""

    description: str = "default job"
    """A sentence about the run, for people."""

    print_config: bool = False
    """Write the whole resolved config to the log at the start."""

    save_config_file: str | None = None
    """Further file, under the run's folder, to save the trainer's config into."""

    custom_config_module: str = ""
    """Python module that extends torchtitan's own config."""


@section
class ProfilingConfig:
    """Traces of where time and memory go."""

    enable_profiling: bool = False
    """Record traces with torch's profiler."""

    save_traces_folder: Name = "profile_traces"
    """Where the traces go, under the run's folder."""

    profile_freq: PositiveInt = 10
    """Inner steps from one profiling cycle to the next."""

    profiler_active: PositiveInt = 1
    """Inner steps that are recorded in each cycle."""

    profiler_warmup: Count = 3
    """Inner steps in each cycle in which the profiler runs but records nothing."""

    enable_memory_snapshot: bool = False
    """Record snapshots of the accelerator's memory."""

    save_memory_snapshot_folder: Name = "memory_snapshot"
    """Where the memory snapshots go, under the run's folder."""


@section
class MetricsConfig:
    """What is measured while training and where it is shown."""

    log_freq: PositiveInt = 10
    """Inner steps from one logged step to the next; the first is always logged."""

    enable_tensorboard: bool = False
    """Write TensorBoard files."""

    disable_color_printing: bool = False
    """Print without colours."""

    save_tb_folder: Name = "tb"
    """Where the TensorBoard files go, under the run's folder."""

    save_for_all_ranks: bool = False
    """Write metrics of every rank, not only of the one that has the loss."""

    enable_wandb: bool = False
    """Send metrics to Weights & Biases, which reads its settings from its usual environment variables."""


@section
class ModelConfig:
    """Which model is trained."""

    name: Literal["llama3"] = "llama3"
    """The family of models."""

    flavor: Flavor = "debugmodel"
    """The size within the family: torchtitan's flavors, and a tiny one for tests."""

    hf_assets_path: str = ""
    """Folder with the tokenizer's files as Hugging Face ships them; empty: a byte-level BPE trained on the
    embedded corpus. torchtitan's default is a folder of its own repository."""

    tokenizer_path: str | None = None
    """Old name of model.hf_assets_path."""

    converters: Strings = ()
    """Rewrites of the model's layers, such as float8."""

    print_after_conversion: bool = False
    """Print the model once its converters have run."""


@section
class OptimizerConfig:
    """The inner optimizer, which every replica steps by itself."""

    name: Literal["Adam", "AdamW"] = "AdamW"
    """Which optimizer."""

    lr: NonNegative = 8e-4
    """Highest learning rate, reached after the warmup."""

    beta1: Decay = 0.9
    """How much of the old mean of the gradients each step keeps."""

    beta2: Decay = 0.95
    """How much of the old mean of the squared gradients each step keeps."""

    eps: NonNegative = 1e-8
    """Added to the denominator against division by zero."""

    weight_decay: NonNegative = 0.1
    """How strongly weights are pulled to zero."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the step is computed: one fused kernel, horizontally fused, or parameter by parameter."""

    early_step_in_backward: bool = False
    """Step each parameter as soon as its gradient is there."""


@section
class LRSchedulerConfig:
    """How the inner learning rate moves over the run: warmup, stable, decay."""

    warmup_steps: Count = 200
    """Inner steps over which the learning rate rises to optimizer.lr."""

    total_steps: PositiveInt | None = None
    """Length of the schedule in inner steps; not set: training.steps."""

    decay_ratio: Fraction | None = None
    """Part of the schedule, at its end, in which the learning rate falls; not set: it falls from the warmup
    on."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """The shape of the fall."""

    min_lr_factor: Fraction = 0.0
    """Where the fall ends, as a part of optimizer.lr."""


@section
class DataLoaderConfig:
    """How a replica reads its part of the data."""

    num_workers: Count = 0
    """Processes that prepare data."""

    persistent_workers: bool = False
    """Keep those processes from one epoch to the next."""

    pin_memory: bool = False
    """Put batches into page-locked memory, from which an accelerator copies faster."""

    prefetch_factor: PositiveInt | None = None
    """Batches that each of those processes prepares ahead."""

    virtual_shards: PositiveInt = 64
    """Parts into which the data is cut, whatever the number of replicas; each part has a position of its own,
    so this must not change while a dataset is being trained on."""

    log_samples: bool = False
    """Write a line for each sample that is drawn into the run's folder, so that scripts/check_samples.py can tell
    whether each one was trained on exactly once."""


@section
class TrainingConfig:
    """What one inner step is and how many there are."""

    dataset: Name = "stdlib"
    """What to train on: stdlib, the embedded corpus of the Python standard library's sources, which needs no
    download; a file or a folder of text (.txt, .md, .py), JSON (.jsonl, .json) or Parquet (.parquet); the name
    of a dataset with a text column on the Hugging Face hub, as org/name; or torchtitan's c4, c4_test,
    c4_validation. torchtitan's default is c4_test."""

    dataset_path: str = ""
    """Another place of c4, c4_test or c4_validation, only for these; empty: the usual one."""

    local_batch_size: PositiveInt = 8
    """Sequences in one forward pass of one data-parallel rank."""

    global_batch_size: int = -1
    """Sequences in one inner step of one replica, in several passes if need be; -1: one pass of every rank.
    """

    seq_len: PositiveInt = 2048
    """Tokens in a sequence."""

    max_norm: Positive = 1.0
    """Gradients whose norm is above this are scaled down to it."""

    steps: PositiveInt = 10000
    """Inner steps of the whole run, counted once for all replicas."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of parameters, gradients and optimizer state."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type that parameters are cast to for forward and backward; on a CPU always float32."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are reduced inside the replica."""

    gc_freq: PositiveInt = 50
    """Inner steps from one collection of Python's garbage to the next."""

    gc_debug: bool = False
    """Collect garbage in every step and report reference cycles."""

    dataloader: DataLoaderConfig = DataLoaderConfig()
    """How a replica reads its part of the data."""


@section
class ParallelismConfig:
    """How the ranks of one replica share the work; the product of the degrees is
    orchestrator.procs_per_replica."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the sharded model inside a replica (HSDP)."""

    data_parallel_shard_degree: int = -1
    """Ranks over which the parameters are sharded (FSDP); -1: all that the other degrees leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after the forward pass; default: where it pays."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks that share each layer's matrices."""

    disable_loss_parallel: bool = False
    """Compute the loss on gathered logits under tensor parallelism."""

    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with its matrix products; needs the model to be compiled.
    """

    pipeline_parallel_degree: PositiveInt = 1
    """Ranks over which the layers are split into stages."""

    module_fqns_per_model_part: StringLists | None = None
    """Modules of each pipeline stage by their full names; not set: split by the number of layers."""

    pipeline_parallel_first_stage_less_layers: Count = 1
    """Layers that the first stage has less, for the embedding that it also holds."""

    pipeline_parallel_last_stage_less_layers: Count = 1
    """Layers that the last stage has less, for the output layer that it also holds."""

    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Layers in each stage; not set: as the schedule and the number of stages have it."""

    pipeline_parallel_schedule: Name = "1F1B"
    """Name of one of torch's pipeline schedules."""

    pipeline_parallel_schedule_csv: str = ""
    """File with a schedule of one's own; empty: none."""

    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences in one micro-batch of the pipeline."""

    pipeline_parallel_expert_parallel_overlap: bool = True
    """Overlap expert and pipeline communication; Llama 3 has no experts, so it changes nothing."""

    context_parallel_degree: PositiveInt = 1
    """Ranks that share each sequence."""

    context_parallel_load_balancer: Literal["headtail", "ptrr", ""] = "headtail"
    """How a sequence is dealt to the ranks so that each has equal work; empty: in order."""

    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values travel between those ranks."""

    expert_parallel_degree: PositiveInt = 1
    """Ranks that share the experts; Llama 3 has none."""

    expert_tensor_parallel_degree: PositiveInt = 1
    """Ranks that share each expert's matrices; Llama 3 has no experts, so it changes nothing."""

    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    """How tokens travel to experts; Llama 3 has none, so it changes nothing."""


@section
class CheckpointConfig:
    """Durable snapshots on disk, which ``elastic-train run --resume`` goes on from. A replica that returns does not
    read them: it gets its state from a peer."""

    enable: bool = False
    """Write a snapshot every checkpoint.interval steps; the last state is written in any case."""

    enable_ft_dataloader_checkpoints: bool = True
    """Save the positions in the data as well."""

    folder: Name = "checkpoint"
    """Where snapshots go, under the run's folder."""

    interval: PositiveInt = 500
    """Inner steps from one snapshot to the next; it is taken at the next outer sync, by the lowest slot in the
    quorum, and written while that trains on."""

    initial_load_path: str | None = None
    """Checkpoint to start from."""

    initial_load_model_only: bool = True
    """Take only the parameters from that checkpoint."""

    initial_load_in_hf: bool = False
    """That checkpoint is in Hugging Face's format."""

    initial_load_in_hf_quantized: bool = False
    """That checkpoint is quantized."""

    last_save_model_only: bool = True
    """Leave everything but the parameters out of the last save."""

    last_save_in_hf: bool = False
    """Write the last save in Hugging Face's format."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the parameters in the last save."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """How torchtitan overlapped saving with training; here a snapshot is always written beside the training, whatever
    the value."""

    keep_latest_k: Count = 10
    """How many snapshots to keep; 0: all."""

    load_step: int = -1
    """Step of the checkpoint to load; -1: the newest."""

    exclude_from_loading: Strings = ()
    """Parts of the state that loading leaves out."""

    enable_first_step_checkpoint: bool = False
    """Save after the first step too."""

    create_seed_checkpoint: bool = False
    """Only write the initial parameters, then end."""

    load_only: bool = False
    """Load but never save."""


@section
class ActivationCheckpointConfig:
    """Computing activations again in the backward pass, to save memory."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """What is computed again: some operations, whole layers, what the compiler finds within a budget, or
    nothing."""

    selective_ac_option: str = "op"
    """What selective means: op decides by operation. torchtitan's default was 2, every second layer, which it
    no longer has; a number is accepted, decides by operation too, and gives the same results with another use
    of memory."""

    per_op_sac_force_recompute_mm_shapes_by_fqns: Strings = ("moe.router.gate",)
    """Modules whose matrix products are always computed again."""

    early_stop: bool = False
    """Stop computing again once all that is needed is there."""

    memory_budget: Fraction = 0.5
    """For mode memory_budget: 0 saves the most memory, 1 the most time."""

    visualize_memory_budget_pareto: bool = False
    """For mode memory_budget: draw what each budget would cost."""

    preserve_rng_state: bool = True
    """Compute again with the same random numbers."""

    determinism_check: str = "default"
    """How torch compares what was computed again; see torch.utils.checkpoint."""

    debug: bool = False
    """Record what is computed again, slowly."""


@section
class CompileConfig:
    """torch.compile."""

    enable: bool = False
    """Compile the components below."""

    components: Annotated[tuple[Literal["model", "loss"], ...], Field(strict=False)] = ("model", "loss")
    """What is compiled: model, loss or both."""

    backend: Name = "inductor"
    """The compiler's backend."""


@section
class Float8LinearConfig:
    """Float8 in linear layers."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather parameters in float8."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute all scales in one reduction."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """How values are scaled."""

    filter_fqns: Strings = ()
    """Modules that stay as they are."""

    emulate: bool = False
    """Emulate float8 where the hardware has none."""


@section
class MXLinearConfig:
    """MXFP8 in linear layers."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Which kernel casts along the first dimension."""

    recipe_name: str = "mxfp8_cublas"
    """How values are scaled."""

    filter_fqns: Strings = ("output",)
    """Modules that stay as they are."""


@section
class QuantizeLinearConfig:
    """Low precision in linear layers."""

    float8: Float8LinearConfig = Float8LinearConfig()
    """Float8 in linear layers."""

    mx: MXLinearConfig = MXLinearConfig()
    """MXFP8 in linear layers."""


@section
class Float8GroupedMMConfig:
    """Float8 in the experts' grouped products."""

    fqns: Strings | str = ()
    """Modules that are converted."""


@section
class MXGroupedMMConfig:
    """MXFP8 in the experts' grouped products."""

    recipe_name: Literal["mxfp8"] = "mxfp8"
    """How values are scaled."""

    fqns: Strings | str = ()
    """Modules that are converted."""


@section
class QuantizeGroupedMMConfig:
    """Low precision in the experts' grouped products."""

    float8: Float8GroupedMMConfig = Float8GroupedMMConfig()
    """Float8 in the experts' grouped products."""

    mx: MXGroupedMMConfig = MXGroupedMMConfig()
    """MXFP8 in the experts' grouped products."""


@section
class QuantizeConfig:
    """Low-precision training; in force only with model.converters, which must be empty."""

    linear: QuantizeLinearConfig = QuantizeLinearConfig()
    """Low precision in linear layers."""

    grouped_mm: QuantizeGroupedMMConfig = QuantizeGroupedMMConfig()
    """Low precision in the experts' grouped products."""


@section
class CommConfig:
    """Communication between the ranks of one replica."""

    init_timeout_seconds: PositiveInt = 300
    """Bound on one operation until the first inner step is done."""

    train_timeout_seconds: PositiveInt = 100
    """Bound on one operation from then on."""

    trace_buf_size: Count = 20000
    """Entries in torch's flight recorder; 0: off, as on a CPU whatever the value."""

    save_traces_folder: Name = "comm_traces"
    """Where the flight recorder writes, under the run's folder."""

    save_traces_file_prefix: str = "rank_"
    """How the flight recorder's files begin."""

    mode: Literal["default", "fake_backend", "local_tensor"] = "default"
    """Real communication, or one of torchtitan's dry runs."""


@section
class MemoryEstimationConfig:
    """torchtitan's estimate of memory instead of a run."""

    enable: bool = False
    """Estimate memory and end."""

    disable_fake_mode: bool = False
    """Estimate with real tensors."""


@section
class FaultToleranceConfig:
    """torchtitan's torchft settings. With enable = true they stand for keys of ours; a key that is not set
    stands for nothing, so our defaults hold."""

    enable: bool = False
    """Take the keys below as other names of ours; replicas are fault tolerant in any case."""

    process_group: Literal["gloo", "nccl"] | None = None
    """Other name of diloco.backend."""

    process_group_timeout_ms: PositiveInt | None = None
    """Other name of diloco.timeout_s, in milliseconds."""

    replica_id: Count | None = None
    """Which replica this is; the orchestrator assigns it."""

    group_size: Count | None = None
    """Other name of orchestrator.replicas; 0 is as good as not set."""

    min_replica_size: Count | None = None
    """Other name of lighthouse.min_replicas."""

    semi_sync_method: Literal["diloco", "local_sgd"] | None = None
    """How replicas come together; only diloco."""

    sync_steps: Count | None = None
    """Other name of diloco.sync_every; torchtitan's default was 5."""

    should_quantize: bool | None = None
    """Other name of diloco.compression: true is "int8", false is "none"."""

    fragment_sync_delay: Count | None = None
    """Other name of diloco.overlap_steps."""

    fragment_update_alpha: Fraction | None = None
    """Other name of diloco.merge_alpha."""

    module_fqns_per_model_fragment: StringLists = ()
    """Modules of each fragment by their full names."""

    num_fragments: Count | None = None
    """Other name of diloco.fragments."""


@section
class ExperimentalConfig:
    """torchtitan's hooks for code of one's own."""

    custom_import: str = ""
    """Python module to import at the start."""

    custom_args_module: str = ""
    """Old name of job.custom_config_module."""


@section
class ValidationConfig:
    """Evaluation on held-out data in the course of training."""

    enable: bool = False
    """Evaluate at all. An evaluation must end within recovery.evaluate_hang_timeout_s."""

    dataset: Name = "c4_validation"
    """What to evaluate on; the same names as training.dataset."""

    dataset_path: str = ""
    """Another place of c4, c4_test or c4_validation, only for these; empty: the usual one."""

    local_batch_size: PositiveInt | None = None
    """Sequences in one pass of one data-parallel rank; torchtitan evaluates with training.local_batch_size,
    so it is that or not set."""

    seq_len: PositiveInt | None = None
    """Tokens in a sequence; torchtitan evaluates with training.seq_len, so it is that or not set."""

    freq: PositiveInt = 10
    """Inner steps from one evaluation to the next."""

    steps: int = -1
    """Batches of each rank in one evaluation; -1: all."""

    dataloader: DataLoaderConfig = DataLoaderConfig()
    """How that data is read."""


@section
class DebugConfig:
    """For finding out what goes wrong, and for tests."""

    seed: Count | None = None
    """Where all random numbers of the run start; not set: drawn once at the start and recorded in the run's
    folder."""

    deterministic: bool = False
    """Use only operations that give the same result every time."""

    deterministic_warn_only: bool = False
    """Warn where there is no such operation, do not fail."""

    moe_force_load_balance: bool = False
    """Deal tokens to experts in turn; Llama 3 has none."""

    min_step_s: NonNegative = 0.0
    """Least seconds per inner step: a sleep in the place of an accelerator, so that several replicas can
    share a few cores as if each had its own. Overhead is never measured with it."""
