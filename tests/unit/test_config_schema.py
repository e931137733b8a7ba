import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from elastic_train.config import DilocoConfig, ParallelismConfig, RunConfig, digest, load_config
from elastic_train.config.keys import keys, sections, value_of
from elastic_train.config.toml_text import value_text

DATA = Path(__file__).parents[1] / "data"

# Where a default is ours: no files of torchtitan's repository, and aliases stand for nothing until they are
# given.
OWN_DEFAULTS = {
    "model.hf_assets_path",
    "training.dataset",
    "training.dataset_path",
    "activation_checkpoint.selective_ac_option",
    "validation.dataset_path",
    "validation.local_batch_size",
    "validation.seq_len",
    "fault_tolerance.process_group",
    "fault_tolerance.process_group_timeout_ms",
    "fault_tolerance.replica_id",
    "fault_tolerance.group_size",
    "fault_tolerance.min_replica_size",
    "fault_tolerance.sync_steps",
    "fault_tolerance.should_quantize",
    "fault_tolerance.fragment_sync_delay",
    "fault_tolerance.fragment_update_alpha",
    "fault_tolerance.num_fragments",
}


@pytest.fixture(scope="module")
def titan_defaults() -> dict[str, object]:
    defaults: dict[str, object] = json.loads((DATA / "torchtitan_v0_2_2_defaults.json").read_text())
    return defaults


def test_every_key_of_torchtitans_last_toml_release_is_known(titan_defaults):
    assert titan_defaults.keys() <= keys().keys()


def test_defaults_are_torchtitans_but_for_those_we_chose(titan_defaults):
    ours = {key: json.loads(json.dumps(keys()[key].default)) for key in titan_defaults}
    assert {key for key in titan_defaults if ours[key] != titan_defaults[key]} == OWN_DEFAULTS


def test_a_file_with_every_torchtitan_key_at_its_default_loads(titan_defaults, tmp_path):
    file = tmp_path / "all.toml"
    lines = [f"{key} = {value_text(value)}" for key, value in titan_defaults.items() if value is not None]
    file.write_text("\n".join(lines))
    config = load_config(file, {}, {}).config
    assert config.training.dataset == "c4_test"
    assert config.activation_checkpoint.selective_ac_option == "2"


def test_torchtitans_llama3_8b_file_loads_unchanged():
    loaded = load_config(DATA / "torchtitan_llama3_8b.toml", {}, {})
    assert loaded.notes == ()
    assert loaded.config.model.flavor == "8B"
    assert loaded.config.optimizer.lr == 3e-4
    assert loaded.config.quantize.linear.float8.filter_fqns == ("output",)
    assert loaded.config.validation.steps == 1200


@pytest.mark.parametrize("path", list(keys()))
def test_every_key_has_a_sentence_and_a_type_in_words(path):
    key = keys()[path]
    assert key.doc.endswith((".", ")"))
    assert key.wanted


def test_every_section_says_what_it_is_for():
    assert all(section.doc.endswith(".") and "(" not in section.doc[:1] for section in sections().values())


def test_a_config_is_frozen_all_the_way_down():
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.diloco.sync_every = 5  # type: ignore[misc]
    assert isinstance(hash(config), int)


def test_a_config_travels_to_other_processes():
    config = RunConfig(diloco=DilocoConfig(sync_every=7))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("values", [{"sync_every": "20"}, {"sync_every": True}, {"sync_evry": 20}, {"outer_lr": "1"}])
def test_sections_are_strict_when_built_in_python_too(values):
    with pytest.raises(ValidationError):
        DilocoConfig(**values)


def test_keys_are_found_by_their_dotted_names():
    config = RunConfig()
    assert value_of(config, "training.dataloader.virtual_shards") == 64
    assert keys()["training.dataloader.virtual_shards"].section == "training.dataloader"


@pytest.mark.parametrize(
    ("shard", "replicate", "tensor", "procs", "degree"),
    [(-1, 1, 1, 8, 8), (-1, 2, 2, 8, 4), (4, 1, 2, 8, 4), (-1, 1, 8, 8, 1)],
)
def test_data_parallel_degree_is_what_the_other_degrees_leave(shard, replicate, tensor, procs, degree):
    config = RunConfig(
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=shard,
            data_parallel_replicate_degree=replicate,
            tensor_parallel_degree=tensor,
        ),
        orchestrator=dataclasses.replace(RunConfig().orchestrator, procs_per_replica=procs),
    )
    assert config.data_parallel_degree == degree


# What a value is replaced by, to see whether the digest notices.
OTHER = {
    "diloco.sync_every": 40,
    "diloco.outer_lr": 0.5,
    "diloco.interval": "time",
    "diloco.weighting": "uniform",
    "diloco.compression": "int8",
    "diloco.bucket_mb": 64,
    "diloco.anchor_device": "device",
    "diloco.engine": "torchft",
    "optimizer.lr": 1e-3,
    "training.seq_len": 64,
    "training.dataloader.virtual_shards": 32,
    "model.flavor": "tiny",
    "debug.seed": 1,
    "orchestrator.replicas": 3,
    "parallelism.tensor_parallel_degree": 2,
}
FREE = {
    "job.description": "another",
    "metrics.log_freq": 1,
    "profiling.profile_freq": 50,
    "faults.at": ("0.0@1:kill",),
    "recovery.restarts_in_place": 1,
    "orchestrator.start_timeout_s": 1.0,
    "diloco.timeout_s": 5.0,
    "lighthouse.port": 80,
    "debug.min_step_s": 0.1,
    "checkpoint.interval": 5,
}


def replaced(config: RunConfig, path: str, value: object) -> RunConfig:
    def descend(section: Any, parts: list[str]) -> Any:
        head, *rest = parts
        inner = descend(getattr(section, head), rest) if rest else value
        return dataclasses.replace(section, **{head: inner})

    result: RunConfig = descend(config, path.split("."))
    return result


@pytest.mark.parametrize(("path", "value"), OTHER.items())
def test_digest_changes_with_what_replicas_must_agree_on(path, value):
    assert digest(replaced(RunConfig(), path, value)) != digest(RunConfig())


@pytest.mark.parametrize(("path", "value"), FREE.items())
def test_digest_leaves_out_what_may_differ(path, value):
    assert digest(replaced(RunConfig(), path, value)) == digest(RunConfig())


def test_digest_is_short_hexadecimal():
    assert len(digest(RunConfig())) == 16
    int(digest(RunConfig()), 16)
