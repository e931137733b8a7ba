import tomllib

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import RunConfig, load_config, to_toml
from elastic_train.config.lines import lines_of_keys
from elastic_train.config.toml_text import value_text

texts = st.text(st.characters(codec="utf-8"))
scalars = st.one_of(
    st.booleans(),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.floats(allow_nan=False),
    texts,
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


@given(values)
def test_every_value_reads_back(value):
    assert tomllib.loads(f"value = {value_text(value)}") == {"value": value}


@given(st.dictionaries(texts.filter(bool), scalars, max_size=3))
def test_tables_read_back(table):
    assert tomllib.loads(f"value = {value_text(table)}") == {"value": table}


def test_the_default_config_loads_back_equal(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(to_toml(RunConfig()))
    loaded = load_config(file, {}, {})
    assert loaded.config == RunConfig()
    assert loaded.notes == ()


def test_a_resolved_config_loads_back_equal(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        """
        [fault_tolerance]
        enable = true
        semi_sync_method = "diloco"
        sync_steps = 30
        group_size = 4
        process_group_timeout_ms = 20000
        [model]
        tokenizer_path = "some/folder"
        """
    )
    flags = {
        "debug.seed": "7",
        "faults.at": '["0.0@70:kill"]',
        "job.description": 'quotes " and \\ and ü',
        "parallelism.module_fqns_per_model_part": '[["a", "b"], ["c"]]',
        "lr_scheduler.decay_ratio": "0.5",
        "fault_tolerance.sync_steps": "40",
    }
    loaded = load_config(file, flags, {"TORCHFT_TIMEOUT_SEC": "30", "TORCHFT_LIGHTHOUSE": "http://head:29510"})
    assert loaded.config.diloco.sync_every == 40
    assert loaded.config.diloco.timeout_s == 30.0
    assert loaded.config.lighthouse.address == "http://head:29510"
    again = tmp_path / "again.toml"
    again.write_text(to_toml(loaded.config))
    reloaded = load_config(again, {}, {})
    assert reloaded.config == loaded.config
    assert reloaded.notes == ()


FILE = '''\
# a comment with [brackets] and key = value
top.dotted = 1
[job]
description = """
[diloco]
sync_every = 3
"""
"dump_folder" = "x"  # [metrics]

[ training . dataloader ]
virtual_shards = 8
[parallelism]
module_fqns_per_model_part = [
  ["model"],
  ["a]", "b"],  # ]
]
tensor_parallel_degree = 2
[[faults]]
at = []
one_line = """[model]"""
[model]
'''


def test_lines_of_keys_and_tables():
    lines = lines_of_keys(FILE)
    assert lines["top.dotted"] == lines["top"] == 2
    assert lines["job"] == 3
    assert lines["job.description"] == 4
    assert lines["job.dump_folder"] == 8
    assert lines["training.dataloader"] == 10
    assert lines["training.dataloader.virtual_shards"] == 11
    assert lines["parallelism.tensor_parallel_degree"] == 17
    assert lines["faults.at"] == 19
    assert lines["model"] == 21
    assert "diloco" not in lines
    assert "metrics" not in lines


@given(st.text())
def test_any_text_is_searched_without_failing(text):
    assert all(number >= 1 for number in lines_of_keys(text).values())
