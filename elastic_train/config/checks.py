"""What the keys of a config must be to each other. Every rule here stops a run before it starts.

The bounds of a single key stand with its type in the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from urllib.parse import urlsplit

from elastic_train.config.errors import ConfigError
from elastic_train.config.faults import FaultSpec, check_kind
from elastic_train.config.flavors import SHAPES
from elastic_train.config.keys import value_of
from elastic_train.config.problem import Problem
from elastic_train.config.schema import RunConfig
from elastic_train.config.support import unsupported
from elastic_train.config.toml_text import value_text

# The first must run out before the second, or the second decides what the first is there to decide.
_SHORTER: tuple[tuple[str, str, str], ...] = (
    (
        "lighthouse.quorum_tick_ms",
        "lighthouse.heartbeat_timeout_ms",
        "the Lighthouse must look more often than replicas may be silent",
    ),
    (
        "lighthouse.heartbeat_timeout_ms",
        "lighthouse.join_timeout_ms",
        "a dead replica must be known as dead before a quorum stops waiting for it",
    ),
    (
        "lighthouse.join_timeout_ms",
        "diloco.quorum_timeout_s",
        "a request for a quorum must outlast the wait for stragglers",
    ),
    (
        "lighthouse.silence_timeout_s",
        "diloco.quorum_timeout_s",
        "a Lighthouse that hangs must be replaced while replicas still wait for it",
    ),
    (
        "diloco.connect_timeout_s",
        "diloco.quorum_timeout_s",
        "a request for a quorum includes the connection",
    ),
    (
        "diloco.timeout_s",
        "recovery.hang_timeout_s",
        "a sync that fails is tried again, but a process that hangs is ended",
    ),
    (
        "recovery.hang_timeout_s",
        "comm.train_timeout_seconds",
        "the rank that hangs must be ended, not the ranks of its replica that wait for it",
    ),
    (
        "recovery.hang_timeout_s",
        "lighthouse.join_timeout_ms",
        "a replica that hangs but still sends heartbeats must be ended while a quorum waits for it",
    ),
    (
        "recovery.hang_timeout_s",
        "recovery.first_step_hang_timeout_s",
        "the first inner step is a step that also warms up and compiles",
    ),
    (
        "recovery.silence_timeout_s",
        "recovery.hang_timeout_s",
        "a process that has stopped must be found before it counts as hanging",
    ),
    (
        "peer_ckpt.timeout_s",
        "recovery.start_hang_timeout_s",
        "a replica must not be ended while it still may receive its state",
    ),
    (
        "peer_ckpt.idle_timeout_s",
        "peer_ckpt.timeout_s",
        "another donor must get the time to take over",
    ),
    (
        "debug.min_step_s",
        "recovery.hang_timeout_s",
        "a step must not count as hanging",
    ),
)

_LONGEST_HOST_TIMEOUT_S = 28.0

# What torchft's DiLoCo does whatever it is told, and how.
_STOCK: tuple[tuple[str, str, str], ...] = (
    ("diloco.weighting", "uniform", "weighs all replicas alike"),
    ("diloco.interval", "steps", "counts inner steps alone"),
    ("diloco.compression", "none", "exchanges what there is unrounded"),
    ("diloco.anchor_device", "host", "keeps its anchor on the host"),
    ("peer_ckpt.transport", "http", "takes a state inside the quorum, by torchft's own transport"),
    ("peer_ckpt.tls_certificate", "", "sends states by torchft's own transport, which does not encrypt"),
)

_ITS_OWN_HOST = "would end this machine, the controller with it: it takes a scheduler.kind that gives other hosts"

# Far above what helps, and below what hurts.
_AT_MOST: tuple[tuple[str, int], ...] = (
    ("peer_ckpt.donors", 8),
    ("peer_ckpt.streams", 16),
    ("peer_ckpt.snapshots", 2),
)


def check(config: RunConfig) -> list[Problem]:
    """Everything that is wrong with a config whose values are all of the right type."""
    return [
        *unsupported(config),
        *_timeouts(config),
        *_outer_sync(config),
        *_peer_ckpt(config),
        *_replicas(config),
        *_scheduler(config),
        *_parallelism(config),
        *_training(config),
        *_faults(config),
    ]


def _timeouts(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    for shorter, longer, why in _SHORTER:
        if _seconds(config, shorter) >= _seconds(config, longer):
            yield Problem(
                (shorter, longer),
                f"{said(shorter)} must be shorter than {said(longer)}: {why}",
            )
    host, isolation = "recovery.host_timeout_s", "recovery.isolation_timeout_s"
    if _seconds(config, host) > _LONGEST_HOST_TIMEOUT_S:
        yield Problem((host,), f"{said(host)} is more than {_LONGEST_HOST_TIMEOUT_S:g}: Monarch gives up by then")
    if 2 * _seconds(config, host) + 1 > _seconds(config, isolation):
        yield Problem(
            (host, isolation),
            f"{said(isolation)} must be longer than twice {said(host)} and a second: a replica that hears late that it "
            "was heard must not end itself before anybody has taken its host for lost",
        )
    evaluation, join = "recovery.evaluate_hang_timeout_s", "lighthouse.join_timeout_ms"
    if config.validation.enable and _seconds(config, evaluation) >= _seconds(config, join):
        yield Problem(
            (evaluation, join),
            f"{said(evaluation)} must be shorter than {said(join)}: a replica that hangs in an evaluation but still "
            "sends heartbeats must be ended while a quorum waits for it",
        )
    two_intervals = 2 * config.diloco.sync_every * config.debug.min_step_s
    if config.lighthouse.join_timeout_ms / 1000 <= two_intervals:
        yield Problem(
            ("lighthouse.join_timeout_ms", "debug.min_step_s", "diloco.sync_every"),
            f"{said('lighthouse.join_timeout_ms')} must be longer than two intervals, which take at least "
            f"{two_intervals:g} s with {said('diloco.sync_every')} and {said('debug.min_step_s')}",
        )
    if config.recovery.backoff_initial_s > config.recovery.backoff_max_s:
        yield Problem(
            ("recovery.backoff_initial_s", "recovery.backoff_max_s"),
            f"{said('recovery.backoff_initial_s')} is longer than {said('recovery.backoff_max_s')}",
        )


def _outer_sync(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    diloco = config.diloco
    layers = SHAPES[config.model.flavor].layers
    if diloco.fragments > layers:
        yield Problem(
            ("diloco.fragments", "model.flavor"),
            f"{said('diloco.fragments')} is more than {layers} layers of {said('model.flavor')}",
        )
    if diloco.sync_every % diloco.fragments:
        yield Problem(
            ("diloco.sync_every", "diloco.fragments"),
            f"{said('diloco.sync_every')} is not divisible by {said('diloco.fragments')}: every fragment "
            "syncs once per interval, at equal distances",
        )
    elif diloco.overlap_steps >= diloco.sync_every // diloco.fragments:
        yield Problem(
            ("diloco.overlap_steps", "diloco.sync_every", "diloco.fragments"),
            f"{said('diloco.overlap_steps')} must be below diloco.sync_every / diloco.fragments = "
            f"{diloco.sync_every // diloco.fragments}: one sync must end before the next begins",
        )
    if diloco.merge_alpha and not diloco.overlap_steps:
        yield Problem(
            ("diloco.merge_alpha", "diloco.overlap_steps"),
            f"{said('diloco.merge_alpha')} has no meaning with diloco.overlap_steps = 0: without overlap "
            "there is nothing newer to merge with",
        )
    if diloco.outer_nesterov and not diloco.outer_momentum:
        yield Problem(
            ("diloco.outer_nesterov", "diloco.outer_momentum"),
            "diloco.outer_nesterov = true has no meaning with diloco.outer_momentum = 0.0",
        )
    if diloco.engine == "torchft":
        for key, only, what in _STOCK:
            if value_of(config, key) != only:
                yield Problem(
                    (key, "diloco.engine"),
                    f'{said(key)} is not supported by diloco.engine = "torchft", which {what}: '
                    f"set it to {value_text(only)}",
                )


def _peer_ckpt(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    for key, most in _AT_MOST:
        if value_of(config, key) > most:
            yield Problem((key,), f"{said(key)} is too much: set it to {most} at most")
    if config.diloco.engine == "elastic" and config.peer_ckpt.transport == "http":
        yield Problem(
            ("peer_ckpt.transport", "diloco.engine"),
            f'{said("peer_ckpt.transport")} is torchft\'s transport, which takes diloco.engine = "torchft": '
            'set peer_ckpt.transport = "tcp"',
        )
    if config.peer_ckpt.transport == "process_group" and config.peer_ckpt.tls_certificate:
        yield Problem(
            ("peer_ckpt.transport", "peer_ckpt.tls_certificate"),
            f"{said('peer_ckpt.transport')} sends states by a collective library, which does not encrypt, but "
            f'{said("peer_ckpt.tls_certificate")}: set peer_ckpt.transport = "tcp", or leave out peer_ckpt.tls_*',
        )
    files = ("peer_ckpt.tls_certificate", "peer_ckpt.tls_key", "peer_ckpt.tls_authority")
    missing = [key for key in files if not value_of(config, key)]
    if 0 < len(missing) < len(files):
        yield Problem(files, f"TLS between peers needs all of {', '.join(files)}: set {', '.join(missing)}")


def _replicas(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    replicas = config.orchestrator.replicas
    if config.lighthouse.min_replicas > replicas:
        yield Problem(
            ("lighthouse.min_replicas", "orchestrator.replicas"),
            f"{said('lighthouse.min_replicas')} is more than {said('orchestrator.replicas')}",
        )
    shards = config.training.dataloader.virtual_shards
    readers = replicas * config.data_parallel_degree
    if readers > shards:
        yield Problem(
            ("training.dataloader.virtual_shards", "orchestrator.replicas"),
            f"{said('training.dataloader.virtual_shards')} is too few: {replicas} replicas of "
            f"{config.data_parallel_degree} data-parallel ranks are {readers} readers",
        )
    if config.diloco.manager_port and replicas > 1 and config.replicas_per_host > 1:
        yield Problem(
            ("diloco.manager_port", "orchestrator.replicas"),
            f"{said('diloco.manager_port')} can serve only one replica on a machine, but "
            f"{said('orchestrator.replicas')}; leave it at 0",
        )
    if config.lighthouse.address and not _is_address(config.lighthouse.address):
        yield Problem(
            ("lighthouse.address",),
            f"{said('lighthouse.address')} is no address: write http://host:port",
        )


def _scheduler(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    scheduler = config.scheduler
    if scheduler.kind == "local":
        for key in ("scheduler.hosts", "scheduler.replicas_per_host"):
            if value_of(config, key):
                yield Problem(
                    (key, "scheduler.kind"),
                    f'{said(key)} has no meaning with scheduler.kind = "local": set scheduler.kind = "ssh"',
                )
        return
    if not scheduler.hosts:
        yield Problem(
            ("scheduler.hosts", "scheduler.kind"),
            f"{said('scheduler.kind')} needs at least one host in scheduler.hosts",
        )
    if wrong := [host for host in scheduler.hosts if not _is_host(host)]:
        yield Problem(("scheduler.hosts",), f'scheduler.hosts: "{wrong[0]}" is no host: write name or user@name')
    if twice := [host for host in scheduler.hosts if scheduler.hosts.count(host) > 1]:
        yield Problem(
            ("scheduler.hosts",),
            f'scheduler.hosts names "{twice[0]}" more than once: scheduler.replicas_per_host says how many replicas it '
            "may have",
        )
    places = config.replicas_per_host * len(scheduler.hosts)
    if scheduler.hosts and config.orchestrator.replicas > places:
        yield Problem(
            ("scheduler.replicas_per_host", "scheduler.hosts", "orchestrator.replicas"),
            f"{said('scheduler.replicas_per_host')} on {len(scheduler.hosts)} hosts are {places} replicas at most, but "
            f"{said('orchestrator.replicas')}",
        )
    for key in ("orchestrator.advertise_host", "lighthouse.host"):
        if _is_loopback(value_of(config, key)):
            yield Problem(
                (key, "scheduler.kind"),
                f"{said(key)} is not reached from other hosts: leave it empty, or give this machine's address",
            )
    if config.peer_ckpt.advertise_host:
        yield Problem(
            ("peer_ckpt.advertise_host", "scheduler.kind"),
            f"{said('peer_ckpt.advertise_host')} can be the name of one host only: leave it empty",
        )


def _parallelism(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    parallelism, procs = config.parallelism, config.orchestrator.procs_per_replica
    shape, flavor = SHAPES[config.model.flavor], said("model.flavor")
    others = {
        f"parallelism.{name}": getattr(parallelism, name)
        for name in (
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "pipeline_parallel_degree",
            "context_parallel_degree",
        )
    }
    used = [key for key, degree in others.items() if degree > 1]
    product = " * ".join(said(key) for key in used) or "no other degree"
    if parallelism.data_parallel_shard_degree == -1:
        if procs % prod(others.values()):
            yield Problem(
                ("orchestrator.procs_per_replica", *used),
                f"{said('orchestrator.procs_per_replica')} is not divisible by {product}",
            )
    elif parallelism.data_parallel_shard_degree < 1:
        yield Problem(
            ("parallelism.data_parallel_shard_degree",),
            f"{said('parallelism.data_parallel_shard_degree')} must be at least 1, or -1 for what is left",
        )
    elif procs != parallelism.data_parallel_shard_degree * prod(others.values()):
        yield Problem(
            ("orchestrator.procs_per_replica", "parallelism.data_parallel_shard_degree", *used),
            f"{said('orchestrator.procs_per_replica')} is not the product of the degrees, "
            f"{parallelism.data_parallel_shard_degree * prod(others.values())}: "
            f"{said('parallelism.data_parallel_shard_degree')} with {product}",
        )
    tensor, pipeline, context = (
        parallelism.tensor_parallel_degree,
        parallelism.pipeline_parallel_degree,
        parallelism.context_parallel_degree,
    )
    undivided = [
        f"{count} {what}"
        for count, what in ((shape.heads, "heads"), (shape.kv_heads, "key-value heads"))
        if count % tensor
    ]
    if undivided:
        yield Problem(
            ("parallelism.tensor_parallel_degree", "model.flavor"),
            f"{said('parallelism.tensor_parallel_degree')} does not divide {undivided[0]} of {flavor}",
        )
    if pipeline > shape.layers:
        yield Problem(
            ("parallelism.pipeline_parallel_degree", "model.flavor"),
            f"{said('parallelism.pipeline_parallel_degree')} is more than {shape.layers} layers of {flavor}",
        )
    microbatch = parallelism.pipeline_parallel_microbatch_size
    if pipeline > 1 and config.training.local_batch_size % microbatch:
        yield Problem(
            ("parallelism.pipeline_parallel_microbatch_size", "training.local_batch_size"),
            f"{said('training.local_batch_size')} is not divisible by "
            f"{said('parallelism.pipeline_parallel_microbatch_size')}",
        )
    divisor = tensor * (2 * context if context > 1 else 1)
    if config.training.seq_len % divisor:
        yield Problem(
            ("training.seq_len", "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"),
            f"{said('training.seq_len')} is not divisible by {divisor}, which "
            f"{said('parallelism.tensor_parallel_degree')} and "
            f"{said('parallelism.context_parallel_degree')} need",
        )
    if parallelism.enable_async_tensor_parallel and not _compiles_model(config):
        yield Problem(
            ("parallelism.enable_async_tensor_parallel", "compile.enable", "compile.components"),
            'parallelism.enable_async_tensor_parallel = true needs compile.enable = true and "model" in '
            "compile.components",
        )


def _training(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    training, validation = config.training, config.validation
    batch = training.local_batch_size * config.data_parallel_degree
    if training.global_batch_size != -1 and (training.global_batch_size < 1 or training.global_batch_size % batch):
        yield Problem(
            ("training.global_batch_size", "training.local_batch_size"),
            f"{said('training.global_batch_size')} must be -1 or a multiple of "
            f"{said('training.local_batch_size')} times {config.data_parallel_degree} data-parallel ranks",
        )
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        yield Problem(
            ("activation_checkpoint.selective_ac_option",),
            f'{said("activation_checkpoint.selective_ac_option")} must be "op" or a number in quotes',
        )
    if config.activation_checkpoint.mode == "memory_budget" and not _compiles_model(config):
        yield Problem(
            ("activation_checkpoint.mode", "compile.enable", "compile.components"),
            'activation_checkpoint.mode = "memory_budget" needs compile.enable = true and "model" in '
            "compile.components",
        )
    profiling = config.profiling
    if profiling.enable_profiling and profiling.profile_freq < profiling.profiler_warmup + profiling.profiler_active:
        yield Problem(
            ("profiling.profile_freq", "profiling.profiler_warmup", "profiling.profiler_active"),
            f"{said('profiling.profile_freq')} must be at least {said('profiling.profiler_warmup')} "
            f"plus {said('profiling.profiler_active')}",
        )
    if validation.enable:
        if validation.steps != -1 and validation.steps < 1:
            yield Problem(
                ("validation.steps",),
                f"{said('validation.steps')} must be at least 1, or -1 for all",
            )
        for name in ("local_batch_size", "seq_len"):
            own = getattr(validation, name)
            if own is not None and own != getattr(training, name):
                yield Problem(
                    (f"validation.{name}", f"training.{name}"),
                    f"{said(f'validation.{name}')} differs from {said(f'training.{name}')}, with which "
                    "torchtitan evaluates; leave it out",
                )


def _faults(config: RunConfig) -> Iterator[Problem]:
    said = partial(_said, config)
    faults = config.faults
    for text in faults.at:
        try:
            fault = FaultSpec.parse(text)
        except ConfigError as error:
            yield Problem(("faults.at",), f"faults.at: {error}")
            continue
        for number, key in (
            (fault.replica, "orchestrator.replicas"),
            (fault.rank, "orchestrator.procs_per_replica"),
        ):
            if number >= value_of(config, key):
                what = "replica" if key == "orchestrator.replicas" else "rank"
                yield Problem(
                    ("faults.at", key),
                    f'faults.at: "{text}" strikes {what} {number}, but {said(key)}; they count from 0',
                )
        if fault.kind == "host" and config.scheduler.kind == "local":
            yield Problem(("faults.at", "scheduler.kind"), f'faults.at: "{text}" {_ITS_OWN_HOST}')
        if fault.step > config.training.steps:
            yield Problem(
                ("faults.at", "training.steps"),
                f'faults.at: "{text}" comes after the end of the run: {said("training.steps")}',
            )
    for kind in faults.kinds:
        try:
            check_kind(kind)
        except ConfigError as error:
            yield Problem(("faults.kinds",), f"faults.kinds: {error}")
        if kind == "host" and config.scheduler.kind == "local":
            yield Problem(("faults.kinds", "scheduler.kind"), f'faults.kinds: "host" {_ITS_OWN_HOST}')
    if faults.every_s and not faults.kinds:
        yield Problem(
            ("faults.kinds", "faults.every_s"),
            f"{said('faults.every_s')} needs at least one kind in faults.kinds",
        )


def _compiles_model(config: RunConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False


def _is_host(host: str) -> bool:
    user, at, name = host.rpartition("@")
    # What begins with a hyphen would be an option of the remote shell.
    return bool(name) and bool(user) == bool(at) and not host.startswith("-") and not any(map(str.isspace, host))


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _said(config: RunConfig, key: str) -> str:
    return f"{key} = {value_text(value_of(config, key))}"


def _seconds(config: RunConfig, key: str) -> float:
    value: float = value_of(config, key)
    return value / 1000 if key.endswith("_ms") else value
