import pytest

from elastic_train.config import ConfigError, FaultSpec, Loaded, load_config
from elastic_train.config.support import UNSUPPORTED
from elastic_train.config.toml_text import value_text


@pytest.fixture
def load(tmp_path):
    def load(flags: dict[str, str]) -> Loaded:
        file = tmp_path / "run.toml"
        file.write_text("")
        return load_config(file, flags, {})

    return load


@pytest.fixture
def refusal(load):
    def refusal(flags: dict[str, str]) -> str:
        with pytest.raises(ConfigError) as caught:
            load(flags)
        return str(caught.value)

    return refusal


STOCK = {"diloco.engine": "torchft", "diloco.weighting": "uniform", "peer_ckpt.transport": "http"}

CONTRADICTIONS = {
    "tick and heartbeat": (
        {"lighthouse.quorum_tick_ms": "5000"},
        "lighthouse.quorum_tick_ms = 5000 must be shorter than lighthouse.heartbeat_timeout_ms = 5000: ",
    ),
    "heartbeat and join": (
        {"lighthouse.heartbeat_timeout_ms": "600000"},
        "lighthouse.heartbeat_timeout_ms = 600000 must be shorter than lighthouse.join_timeout_ms = 600000: ",
    ),
    "join and quorum": (
        {"lighthouse.join_timeout_ms": "3600000"},
        "lighthouse.join_timeout_ms = 3600000 must be shorter than diloco.quorum_timeout_s = 3600.0: ",
    ),
    "connect and quorum": (
        {"diloco.connect_timeout_s": "3600"},
        "diloco.connect_timeout_s = 3600.0 must be shorter than diloco.quorum_timeout_s = 3600.0: ",
    ),
    "operation and hang": (
        {"diloco.timeout_s": "90"},
        "diloco.timeout_s = 90.0 must be shorter than recovery.hang_timeout_s = 90.0: ",
    ),
    "hang and operations inside the replica": (
        {"recovery.hang_timeout_s": "100"},
        "recovery.hang_timeout_s = 100.0 must be shorter than comm.train_timeout_seconds = 100: ",
    ),
    "hang and join": (
        {"lighthouse.join_timeout_ms": "90000"},
        "recovery.hang_timeout_s = 90.0 must be shorter than lighthouse.join_timeout_ms = 90000: ",
    ),
    "hang and first step": (
        {"recovery.first_step_hang_timeout_s": "90"},
        "recovery.hang_timeout_s = 90.0 must be shorter than recovery.first_step_hang_timeout_s = 90.0: ",
    ),
    "evaluation and join": (
        {"validation.enable": "true", "recovery.evaluate_hang_timeout_s": "600"},
        "recovery.evaluate_hang_timeout_s = 600.0 must be shorter than lighthouse.join_timeout_ms = 600000: ",
    ),
    "silence and hang": (
        {"recovery.silence_timeout_s": "90"},
        "recovery.silence_timeout_s = 90.0 must be shorter than recovery.hang_timeout_s = 90.0: ",
    ),
    "heal and start": (
        {"peer_ckpt.timeout_s": "600"},
        "peer_ckpt.timeout_s = 600.0 must be shorter than recovery.start_hang_timeout_s = 600.0: ",
    ),
    "step and hang": (
        {"debug.min_step_s": "90", "diloco.sync_every": "1"},
        "debug.min_step_s = 90.0 must be shorter than recovery.hang_timeout_s = 90.0: ",
    ),
    "join and intervals": (
        {"debug.min_step_s": "15"},
        "lighthouse.join_timeout_ms = 600000 must be longer than two intervals, which take at least 600 s",
    ),
    "backoff": (
        {"recovery.backoff_initial_s": "31"},
        "recovery.backoff_initial_s = 31.0 is longer than recovery.backoff_max_s = 30.0",
    ),
    "fragments and layers": (
        {"diloco.fragments": "10"},
        'diloco.fragments = 10 is more than 6 layers of model.flavor = "debugmodel"',
    ),
    "fragments and interval": (
        {"diloco.fragments": "3"},
        "diloco.sync_every = 20 is not divisible by diloco.fragments = 3",
    ),
    "overlap and interval": (
        {"diloco.overlap_steps": "10", "diloco.fragments": "2"},
        "diloco.overlap_steps = 10 must be below diloco.sync_every / diloco.fragments = 10",
    ),
    "merge without overlap": (
        {"diloco.merge_alpha": "0.5"},
        "diloco.merge_alpha = 0.5 has no meaning with diloco.overlap_steps = 0",
    ),
    "nesterov without momentum": (
        {"diloco.outer_momentum": "0"},
        "diloco.outer_nesterov = true has no meaning with diloco.outer_momentum = 0.0",
    ),
    "torchft and weights": (
        {"diloco.engine": "torchft", "peer_ckpt.transport": "http"},
        'diloco.weighting = "tokens" is not supported by diloco.engine = "torchft", which weighs all replicas alike: '
        'set it to "uniform"',
    ),
    "torchft and the wire": (
        STOCK | {"peer_ckpt.transport": "tcp"},
        'peer_ckpt.transport = "tcp" is not supported by diloco.engine = "torchft", which takes a state inside the ',
    ),
    "torchft and encryption": (
        STOCK | dict.fromkeys(["peer_ckpt.tls_certificate", "peer_ckpt.tls_key", "peer_ckpt.tls_authority"], "a.pem"),
        'peer_ckpt.tls_certificate = "a.pem" is not supported by diloco.engine = "torchft", which sends states by ',
    ),
    "our engine and torchft's wire": (
        {"peer_ckpt.transport": "http"},
        'peer_ckpt.transport = "http" is torchft\'s transport, which takes diloco.engine = "torchft": set ',
    ),
    "donors": ({"peer_ckpt.donors": "9"}, "peer_ckpt.donors = 9 is too much: set it to 8 at most"),
    "streams": ({"peer_ckpt.streams": "17"}, "peer_ckpt.streams = 17 is too much: set it to 16 at most"),
    "snapshots": ({"peer_ckpt.snapshots": "3"}, "peer_ckpt.snapshots = 3 is too much: set it to 2 at most"),
    "a certificate without a key": (
        {"peer_ckpt.tls_certificate": "a.pem", "peer_ckpt.tls_authority": "ca.pem"},
        "TLS between peers needs all of peer_ckpt.tls_certificate, peer_ckpt.tls_key, peer_ckpt.tls_authority: "
        "set peer_ckpt.tls_key",
    ),
    "process groups and encryption": (
        {"peer_ckpt.transport": "process_group"}
        | dict.fromkeys(["peer_ckpt.tls_certificate", "peer_ckpt.tls_key", "peer_ckpt.tls_authority"], "a.pem"),
        'peer_ckpt.transport = "process_group" sends states by a collective library, which does not encrypt, but ',
    ),
    "process groups and torchft": (
        STOCK | {"peer_ckpt.transport": "process_group"},
        'peer_ckpt.transport = "process_group" is not supported by diloco.engine = "torchft", which takes a state ',
    ),
    "silence and transfer": (
        {"peer_ckpt.idle_timeout_s": "300"},
        "peer_ckpt.idle_timeout_s = 300.0 must be shorter than peer_ckpt.timeout_s = 300.0: another donor must ",
    ),
    "torchft and time": (
        STOCK | {"diloco.interval": "time"},
        'diloco.interval = "time" is not supported by diloco.engine = "torchft", which counts inner steps alone: ',
    ),
    "torchft and compression": (
        STOCK | {"diloco.compression": "bf16"},
        'diloco.compression = "bf16" is not supported by diloco.engine = "torchft", which exchanges what there is ',
    ),
    "torchft and the accelerator": (
        STOCK | {"diloco.anchor_device": "device"},
        'diloco.anchor_device = "device" is not supported by diloco.engine = "torchft", which keeps its anchor on ',
    ),
    "minimum and replicas": (
        {"lighthouse.min_replicas": "3"},
        "lighthouse.min_replicas = 3 is more than orchestrator.replicas = 2",
    ),
    "readers and shards": (
        {"orchestrator.replicas": "9", "orchestrator.procs_per_replica": "8"},
        "training.dataloader.virtual_shards = 64 is too few: 9 replicas of 8 data-parallel ranks are 72 readers",
    ),
    "manager port": (
        {"diloco.manager_port": "29512"},
        "diloco.manager_port = 29512 can serve only one replica on a machine",
    ),
    "manager port on a shared host": (
        {"diloco.manager_port": "29512", "scheduler.kind": "ssh", "scheduler.hosts": '["a"]'},
        "diloco.manager_port = 29512 can serve only one replica on a machine",
    ),
    "host and isolation": (
        {"recovery.host_timeout_s": "20"},
        "recovery.isolation_timeout_s = 25.0 must be longer than twice recovery.host_timeout_s = 20.0 and a second: ",
    ),
    "host and Monarch": (
        {"recovery.host_timeout_s": "29", "recovery.isolation_timeout_s": "90"},
        "recovery.host_timeout_s = 29.0 is more than 28: Monarch gives up by then",
    ),
    "hosts of the local scheduler": (
        {"scheduler.hosts": '["a"]'},
        'scheduler.hosts = ["a"] has no meaning with scheduler.kind = "local"',
    ),
    "no hosts": (
        {"scheduler.kind": "ssh"},
        'scheduler.kind = "ssh" needs at least one host in scheduler.hosts',
    ),
    "an option for a host": (
        {"scheduler.kind": "ssh", "scheduler.hosts": '["-oProxyCommand=x"]'},
        'scheduler.hosts: "-oProxyCommand=x" is no host',
    ),
    "a user without a host": (
        {"scheduler.kind": "ssh", "scheduler.hosts": '["me@"]'},
        'scheduler.hosts: "me@" is no host',
    ),
    "a host twice": (
        {"scheduler.kind": "ssh", "scheduler.hosts": '["a", "a"]'},
        'scheduler.hosts names "a" more than once',
    ),
    "more replicas than places": (
        {
            "scheduler.kind": "ssh",
            "scheduler.hosts": '["a", "b"]',
            "scheduler.replicas_per_host": "1",
            "orchestrator.replicas": "3",
        },
        "scheduler.replicas_per_host = 1 on 2 hosts are 2 replicas at most, but orchestrator.replicas = 3",
    ),
    "loopback for other hosts": (
        {"scheduler.kind": "ssh", "scheduler.hosts": '["a"]', "lighthouse.host": "127.0.0.1"},
        'lighthouse.host = "127.0.0.1" is not reached from other hosts',
    ),
    "one name for several hosts": (
        {"scheduler.kind": "ssh", "scheduler.hosts": '["a"]', "peer_ckpt.advertise_host": "a"},
        'peer_ckpt.advertise_host = "a" can be the name of one host only',
    ),
    "the fault of the controller's host": (
        {"faults.at": '["0.0@5:host"]'},
        'faults.at: "0.0@5:host" would end this machine',
    ),
    "random faults of the controller's host": (
        {"faults.kinds": '["host"]'},
        'faults.kinds: "host" would end this machine',
    ),
    "address": (
        {"lighthouse.address": "head:29510"},
        'lighthouse.address = "head:29510" is no address: write http://host:port',
    ),
    "address without a port": (
        {"lighthouse.address": "http://head"},
        'lighthouse.address = "http://head" is no address: write http://host:port',
    ),
    "address with a port that is none": (
        {"lighthouse.address": "http://head:x"},
        'lighthouse.address = "http://head:x" is no address: write http://host:port',
    ),
    "ranks and degrees": (
        {"parallelism.data_parallel_shard_degree": "2", "parallelism.tensor_parallel_degree": "2"},
        "orchestrator.procs_per_replica = 1 is not the product of the degrees, 4: "
        "parallelism.data_parallel_shard_degree = 2 with parallelism.tensor_parallel_degree = 2",
    ),
    "ranks and the shard degree alone": (
        {"parallelism.data_parallel_shard_degree": "2"},
        "orchestrator.procs_per_replica = 1 is not the product of the degrees, 2",
    ),
    "ranks that are left": (
        {"orchestrator.procs_per_replica": "3", "parallelism.tensor_parallel_degree": "2"},
        "orchestrator.procs_per_replica = 3 is not divisible by parallelism.tensor_parallel_degree = 2",
    ),
    "shard degree": (
        {"parallelism.data_parallel_shard_degree": "0"},
        "parallelism.data_parallel_shard_degree = 0 must be at least 1, or -1",
    ),
    "tensor parallel and heads": (
        {
            "orchestrator.procs_per_replica": "3",
            "parallelism.tensor_parallel_degree": "3",
            "training.seq_len": "300",
        },
        'parallelism.tensor_parallel_degree = 3 does not divide 16 heads of model.flavor = "debugmodel"',
    ),
    "tensor parallel and key-value heads": (
        {
            "orchestrator.procs_per_replica": "16",
            "parallelism.tensor_parallel_degree": "16",
            "model.flavor": "8B",
        },
        'parallelism.tensor_parallel_degree = 16 does not divide 8 key-value heads of model.flavor = "8B"',
    ),
    "pipeline and layers": (
        {"orchestrator.procs_per_replica": "8", "parallelism.pipeline_parallel_degree": "8"},
        'parallelism.pipeline_parallel_degree = 8 is more than 6 layers of model.flavor = "debugmodel"',
    ),
    "pipeline and batch": (
        {
            "orchestrator.procs_per_replica": "2",
            "parallelism.pipeline_parallel_degree": "2",
            "parallelism.pipeline_parallel_microbatch_size": "3",
        },
        "training.local_batch_size = 8 is not divisible by parallelism.pipeline_parallel_microbatch_size = 3",
    ),
    "context parallel and sequence": (
        {
            "orchestrator.procs_per_replica": "2",
            "parallelism.context_parallel_degree": "2",
            "training.seq_len": "2046",
        },
        "training.seq_len = 2046 is not divisible by 4",
    ),
    "async tensor parallel": (
        {"parallelism.enable_async_tensor_parallel": "true"},
        "parallelism.enable_async_tensor_parallel = true needs compile.enable = true",
    ),
    "global batch": (
        {"training.global_batch_size": "12"},
        "training.global_batch_size = 12 must be -1 or a multiple of training.local_batch_size = 8 times 1",
    ),
    "no global batch": (
        {"training.global_batch_size": "0"},
        "training.global_batch_size = 0 must be -1 or a multiple",
    ),
    "selective checkpointing": (
        {"activation_checkpoint.selective_ac_option": "layers"},
        'activation_checkpoint.selective_ac_option = "layers" must be "op" or a number in quotes',
    ),
    "memory budget": (
        {
            "activation_checkpoint.mode": "memory_budget",
            "compile.enable": "true",
            "compile.components": '["loss"]',
        },
        'activation_checkpoint.mode = "memory_budget" needs compile.enable = true and "model"',
    ),
    "profiling cycle": (
        {"profiling.enable_profiling": "true", "profiling.profile_freq": "3"},
        "profiling.profile_freq = 3 must be at least profiling.profiler_warmup = 3 plus profiling.profiler_active = 1",
    ),
    "validation steps": (
        {"validation.enable": "true", "validation.steps": "0"},
        "validation.steps = 0 must be at least 1, or -1",
    ),
    "validation batch": (
        {"validation.enable": "true", "validation.local_batch_size": "4"},
        "validation.local_batch_size = 4 differs from training.local_batch_size = 8",
    ),
    "validation sequence": (
        {"validation.enable": "true", "validation.seq_len": "4"},
        "validation.seq_len = 4 differs from training.seq_len = 2048",
    ),
    "fault form": (
        {"faults.at": '["0.0:kill"]'},
        'faults.at: "0.0:kill" is no fault: write replica.rank@step[/point]:kind',
    ),
    "fault replica": (
        {"faults.at": '["2.0@5:kill"]'},
        'faults.at: "2.0@5:kill" strikes replica 2, but orchestrator.replicas = 2; they count from 0',
    ),
    "fault rank": (
        {"faults.at": '["0.1@5:kill"]'},
        'faults.at: "0.1@5:kill" strikes rank 1, but orchestrator.procs_per_replica = 1; they count from 0',
    ),
    "fault after the end": (
        {"faults.at": '["0.0@101:kill"]', "training.steps": "100"},
        'faults.at: "0.0@101:kill" comes after the end of the run: training.steps = 100',
    ),
    "random fault kind": (
        {"faults.kinds": '["kil"]'},
        'faults.kinds: fault kind "kil" is unknown (did you mean "kill"?)',
    ),
    "random faults of no kind": (
        {"faults.every_s": "60", "faults.kinds": "[]"},
        "faults.every_s = 60.0 needs at least one kind in faults.kinds",
    ),
}


@pytest.mark.parametrize(("flags", "said"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradictions_are_refused_with_both_keys(refusal, flags, said):
    message = refusal(flags)
    assert said in message
    assert message.startswith("--")
    assert "; --" not in message


POSSIBLE = [
    {"diloco.fragments": "2", "diloco.overlap_steps": "9", "diloco.merge_alpha": "0.5"},
    STOCK | {"diloco.fragments": "2", "diloco.overlap_steps": "9", "diloco.merge_alpha": "0.5"},
    {"diloco.weighting": "uniform"},
    {"diloco.interval": "time", "debug.min_step_s": "0.1"},
    {
        "diloco.compression": "int4",
        "diloco.interval": "time",
        "diloco.anchor_device": "device",
        "diloco.fragments": "2",
        "diloco.overlap_steps": "9",
        "diloco.merge_alpha": "0.5",
    },
    {"diloco.sync_every": "1"},
    {"diloco.sync_every": "500", "training.steps": "100"},
    {"diloco.outer_momentum": "0", "diloco.outer_nesterov": "false"},
    {"orchestrator.replicas": "8", "orchestrator.procs_per_replica": "8"},
    {"orchestrator.replicas": "1", "diloco.manager_port": "29512"},
    {
        "orchestrator.procs_per_replica": "16",
        "parallelism.tensor_parallel_degree": "2",
        "parallelism.pipeline_parallel_degree": "2",
        "parallelism.context_parallel_degree": "2",
        "parallelism.data_parallel_replicate_degree": "2",
    },
    {"training.global_batch_size": "32"},
    {"compile.enable": "true", "activation_checkpoint.mode": "memory_budget"},
    {"lighthouse.address": "http://[::1]:29510"},
    {"validation.enable": "true", "validation.seq_len": "2048"},
    {"profiling.profile_freq": "1"},
    {"faults.at": '["1.0@100/reduce:stop"]', "training.steps": "100"},
    {"lr_scheduler.warmup_steps": "200", "training.steps": "10"},
]


@pytest.mark.parametrize("flags", POSSIBLE, ids=" ".join)
def test_what_goes_together_is_accepted(load, flags):
    load(flags)


# What switches each unsupported key on, and the key that it depends on.
ON = {
    "job.config_file": "other.toml",
    "job.custom_config_module": "my.module",
    "model.converters": '["quantize.linear.float8"]',
    "model.print_after_conversion": "true",
    "optimizer.early_step_in_backward": "true",
    "training.dataloader.num_workers": "2",
    "training.dataloader.persistent_workers": "true",
    "training.dataloader.prefetch_factor": "2",
    "validation.dataloader.num_workers": "2",
    "validation.dataloader.persistent_workers": "true",
    "validation.dataloader.prefetch_factor": "2",
    "validation.dataloader.log_samples": "true",
    "parallelism.disable_loss_parallel": "true",
    "parallelism.context_parallel_rotate_method": "alltoall",
    "parallelism.expert_parallel_degree": "2",
    "checkpoint.enable_ft_dataloader_checkpoints": "false",
    "checkpoint.initial_load_path": "/somewhere",
    "checkpoint.initial_load_in_hf": "true",
    "checkpoint.initial_load_in_hf_quantized": "true",
    "checkpoint.load_step": "10",
    "checkpoint.exclude_from_loading": '["optimizer"]',
    "checkpoint.load_only": "true",
    "checkpoint.create_seed_checkpoint": "true",
    "checkpoint.last_save_in_hf": "true",
    "checkpoint.enable_first_step_checkpoint": "true",
    "activation_checkpoint.early_stop": "true",
    "comm.mode": "fake_backend",
    "memory_estimation.enable": "true",
    "fault_tolerance.semi_sync_method": "local_sgd",
    "fault_tolerance.module_fqns_per_model_fragment": '[["layers.0"]]',
    "experimental.custom_import": "my.module",
    "experimental.custom_args_module": "my.module",
    "debug.moe_force_load_balance": "true",
}


def test_the_table_above_is_complete():
    assert ON.keys() == UNSUPPORTED.keys()


def switched_on(key: str) -> dict[str, str]:
    switch = UNSUPPORTED[key].switch
    on = {switch: "true"} if switch else {}
    if switch == "fault_tolerance.enable":
        on["fault_tolerance.semi_sync_method"] = "diloco"
    return on


@pytest.mark.parametrize("key", ON)
def test_what_cannot_be_honoured_is_refused_when_it_is_on(refusal, key):
    message = refusal(switched_on(key) | {key: ON[key]})
    row = UNSUPPORTED[key]
    assert f"{key} = " in message
    assert f"is not supported: {row.why}" in message
    assert message.endswith("leave it out" if row.off is None else f"leave it at {value_text(row.off)}")


@pytest.mark.parametrize("key", [key for key, row in UNSUPPORTED.items() if row.off is not None])
def test_what_cannot_be_honoured_is_accepted_at_its_off_value(load, key):
    off = UNSUPPORTED[key].off
    load(switched_on(key) | {key: value_text(off)})


@pytest.mark.parametrize("key", [key for key, row in UNSUPPORTED.items() if row.switch])
def test_what_cannot_be_honoured_is_accepted_while_its_section_is_off(load, key):
    load({key: ON[key]})


def test_fault_tolerance_needs_to_say_diloco(refusal):
    assert 'set it to "diloco"' in refusal({"fault_tolerance.enable": "true"})


def test_saving_checkpoints_is_honoured(load):
    config = load({"checkpoint.enable": "true", "checkpoint.interval": "40"}).config
    assert config.checkpoint.enable


def test_layer_counts_of_old_files_are_accepted_with_a_note(load):
    (note,) = load({"activation_checkpoint.selective_ac_option": "2"}).notes
    assert 'selective_ac_option = "2"' in note
    assert load({"activation_checkpoint.selective_ac_option": "2", "activation_checkpoint.mode": "none"}).notes == ()


def test_hosts_are_shared_out_evenly(load):
    hosts = {"scheduler.kind": "ssh", "scheduler.hosts": '["a", "me@b"]', "faults.at": '["0.0@5:host"]'}
    shares = {
        replicas: load(hosts | {"orchestrator.replicas": str(replicas)}).config.replicas_per_host
        for replicas in (1, 2, 3, 5)
    }
    assert shares == {1: 1, 2: 1, 3: 2, 5: 3}
    assert load({"orchestrator.replicas": "3"}).config.replicas_per_host == 3


def test_the_size_of_buckets_is_noted_where_there_are_none(load):
    assert load(STOCK).notes == load({"diloco.bucket_mb": "64"}).notes == ()
    assert load(STOCK | {"diloco.bucket_mb": "64"}).notes == (
        'not in force with diloco.engine = "torchft", which makes no buckets: diloco.bucket_mb',
    )


def test_float8_settings_without_a_converter_are_accepted_with_a_note(load):
    (note,) = load({"quantize.linear.float8.enable_fsdp_float8_all_gather": "true"}).notes
    assert "not in force" in note


def test_shipped_kinds_are_accepted(load):
    kinds = ["kill", "exit", "segfault", "exception", "comms", "hang", "stop"]
    kinds += ["nan", "bitflip", "slow", "replica_actor", "lighthouse", "host"]
    faults = [f"0.0@5:{kind}" for kind in kinds]
    hosts = {"scheduler.kind": "ssh", "scheduler.hosts": '["a"]'}
    config = load(hosts | {"faults.at": value_text(faults), "faults.kinds": value_text(kinds)}).config
    assert [FaultSpec.parse(text).kind for text in config.faults.at] == kinds
