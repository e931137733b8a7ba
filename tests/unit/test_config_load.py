from pathlib import Path

import pytest

from elastic_train.config import ConfigError, Loaded, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.toml"


def load(file: Path, text: str, **flags: str) -> Loaded:
    file.write_bytes(text.encode())
    return load_config(file, {name.replace("__", "."): value for name, value in flags.items()}, {})


def refusal(file: Path, text: str, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, text, **flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_empty_file_is_all_defaults(file):
    config = load(file, "").config
    assert config.orchestrator.replicas == 2
    assert config.debug.seed is None


def test_the_file_holds_over_defaults_and_flags_over_the_file(file):
    loaded = load(file, "[diloco]\nsync_every = 50\nouter_lr = 0.5\n", diloco__sync_every="10")
    assert loaded.config.diloco.sync_every == 10
    assert loaded.config.diloco.outer_lr == 0.5
    assert loaded.config.diloco.outer_momentum == 0.9


def test_tables_may_be_dotted_or_inline(file):
    config = load(file, 'training.dataloader = {virtual_shards = 8}\nmodel.flavor = "tiny"\n').config
    assert config.training.dataloader.virtual_shards == 8
    assert config.model.flavor == "tiny"


def test_an_integer_is_a_number_and_an_array_is_kept_unchangeable(file):
    config = load(file, '[optimizer]\nlr = 1\n[faults]\nat = ["0.0@5:kill"]\n').config
    assert config.optimizer.lr == 1.0
    assert config.faults.at == ("0.0@5:kill",)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1", 1.0)],
)
def test_a_flag_is_a_toml_value(file, text, value):
    assert load(file, "", optimizer__lr=text).config.optimizer.lr == value


@pytest.mark.parametrize("text", ["8B", '"8B"', "'8B'"])
def test_a_bare_word_is_a_string(file, text):
    assert load(file, "", model__flavor=text).config.model.flavor == "8B"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", "2"),
        ("2026-11-30", "2026-11-30"),
        ("true", "true"),
        ('"2"', "2"),
        ("", ""),
        ("a\nb = 1", "a\nb = 1"),
    ],
)
def test_a_flag_for_a_string_is_its_text(file, text, value):
    assert load(file, "", job__description=text).config.job.description == value


def test_a_flag_may_be_written_with_dashes(file):
    file.write_text("")
    assert load_config(file, {"diloco.sync-every": "40"}, {}).config.diloco.sync_every == 40


def test_an_unknown_key_names_file_line_and_the_nearest(file):
    message = refusal(file, "# first line\n[diloco]\nsync_step = 5\n")
    assert message == f"{file}:3: diloco.sync_step is no known key, did you mean diloco.sync_every?"


def test_a_key_in_the_wrong_section_is_sought_in_all(file):
    assert "did you mean diloco.sync_every?" in refusal(file, "[training]\nsync_every = 5\n")


def test_an_alias_is_a_known_key_for_suggestions(file):
    assert "did you mean fault_tolerance.sync_steps?" in refusal(file, "[fault_tolerance]\nsync_step = 5\n")


def test_a_key_like_no_other_gets_no_suggestion(file):
    assert refusal(file, "[diloco]\nxyzzy_plugh = 5\n").endswith("diloco.xyzzy_plugh is no known key")


def test_an_unknown_section_names_line_and_the_nearest(file):
    message = refusal(file, "\n[dilocco]\nsync_every = 5\n")
    assert message == f"{file}:2: [dilocco] is no known section, did you mean [diloco]?"


def test_a_section_that_is_given_a_value(file):
    assert refusal(file, "diloco = 5\n") == f"{file}:1: diloco is a section, so write [diloco]"


def test_a_key_that_is_given_a_table(file):
    message = refusal(file, "[diloco.sync_every]\nsteps = 5\n")
    assert message == f'{file}:1: diloco.sync_every wants an integer of at least 1, got {{"steps" = 5}} (table)'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[diloco]\nsync_every = "20"',
            'diloco.sync_every wants an integer of at least 1, got "20" (string)',
        ),
        ("[diloco]\nsync_every = 20.0", "diloco.sync_every wants an integer of at least 1, got 20.0 (float)"),
        (
            "[diloco]\nsync_every = true",
            "diloco.sync_every wants an integer of at least 1, got true (boolean)",
        ),
        ("[diloco]\nsync_every = 0", "diloco.sync_every wants an integer of at least 1, got 0 (integer)"),
        ("[diloco]\nouter_lr = true", "diloco.outer_lr wants a number above 0, got true (boolean)"),
        ("[diloco]\nouter_lr = nan", "diloco.outer_lr wants a number above 0, got nan (float)"),
        ("[diloco]\nouter_lr = inf", "diloco.outer_lr wants a number above 0, got inf (float)"),
        (
            "[diloco]\nouter_momentum = 1",
            "diloco.outer_momentum wants a number from 0 to below 1, got 1 (integer)",
        ),
        ("[diloco]\nouter_nesterov = 1", "diloco.outer_nesterov wants true or false, got 1 (integer)"),
        (
            '[diloco]\nbackend = "mpi"',
            'diloco.backend wants one of "auto", "gloo", "nccl", got "mpi" (string)',
        ),
        (
            "[lighthouse]\nport = 70000",
            "lighthouse.port wants an integer from 0 to 65535, got 70000 (integer)",
        ),
        ("[job]\ndescription = 5", "job.description wants a string, got 5 (integer)"),
        ("[job]\ndescription = 2026-11-30", "job.description wants a string, got 2026-11-30 (date)"),
        ('[job]\ndump_folder = ""', 'job.dump_folder wants a string that is not empty, got "" (string)'),
        ('[faults]\nat = "0.0@1:kill"', 'faults.at wants an array of strings, got "0.0@1:kill" (string)'),
        ("[faults]\nat = [1]", "faults.at wants an array of strings, got [1] (array)"),
        (
            '[compile]\ncomponents = ["optimizer"]',
            'compile.components wants an array of "model" or "loss", got ["optimizer"] (array)',
        ),
        (
            '[parallelism]\nmodule_fqns_per_model_part = ["a"]',
            'parallelism.module_fqns_per_model_part wants an array of arrays of strings, got ["a"] (array)',
        ),
        (
            "[training.dataloader]\nvirtual_shards = 0",
            "training.dataloader.virtual_shards wants an integer of at least 1, got 0 (integer)",
        ),
        ("[training]\nsteps = 0", "training.steps wants an integer of at least 1, got 0 (integer)"),
        ("[debug]\nseed = -1", "debug.seed wants an integer of at least 0, got -1 (integer)"),
        (
            "[quantize.grouped_mm.mx]\nfqns = 5",
            "quantize.grouped_mm.mx.fqns wants an array of strings or a string, got 5 (integer)",
        ),
    ],
)
def test_a_wrong_type_says_what_is_wanted_and_what_was_given(file, text, said):
    assert refusal(file, text) == f"{file}:2: {said}"


def test_a_wrong_flag_value_is_named_as_the_flag(file):
    message = refusal(file, "", training__steps="ten")
    assert message == '--training.steps wants an integer of at least 1, got "ten" (string)'


def test_a_long_value_is_cut(file):
    assert len(refusal(file, f'[training]\nsteps = "{"x" * 500}"')) < 250


def test_an_unknown_flag_names_the_nearest(file):
    assert refusal(file, "", diloco__sync_evry="5") == (
        "--diloco.sync_evry: diloco.sync_evry is no known key, did you mean diloco.sync_every?"
    )


def test_all_problems_are_said_at_once_in_the_order_of_the_file(file):
    message = refusal(file, "[trainnig]\n[training]\nsteps = 0\nseq_len = -1\n[diloco]\nfoo = 1\n", optimizer__lr="x")
    assert [part.split(": ", 1)[-1].split(" ")[0] for part in message.split("; ")] == [
        "[trainnig]",
        "diloco.foo",
        "--optimizer.lr",
        "training.seq_len",
        "training.steps",
    ]


def test_a_contradiction_is_placed_at_the_line_that_made_it(file):
    message = refusal(file, "\n\n[diloco]\nsync_every = 21\nfragments = 2\n")
    assert message.startswith(f"{file}:4: diloco.sync_every = 21 is not divisible by diloco.fragments = 2")


def test_a_contradiction_is_placed_at_the_flag_that_made_it(file):
    message = refusal(file, "", lighthouse__min_replicas="3")
    assert message == "--lighthouse.min_replicas: lighthouse.min_replicas = 3 is more than orchestrator.replicas = 2"


def test_broken_toml_says_line_and_column(file):
    message = refusal(file, "[diloco]\nsync_every = = 5\n")
    assert message.startswith(f"{file}:2:14: this is no valid TOML: ")


def test_lines_end_as_on_windows_too(file):
    assert refusal(file, "[diloco]\r\nsync_step = 5\r\n").startswith(f"{file}:2: diloco.sync_step")


def test_an_array_of_tables_is_no_section(file):
    assert refusal(file, "[[diloco]]\nsync_every = 5\n") == f"{file}:1: diloco is a section, so write [diloco]"


def test_toml_that_ends_early(file):
    assert refusal(file, "[diloco").startswith(f"{file}")


def test_a_key_given_twice(file):
    assert refusal(file, "[diloco]\nsync_every = 5\nsync_every = 6\n").startswith(f"{file}:3:")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: there is no such file; name a TOML config"):
        load_config(tmp_path / "nowhere.toml", {}, {})


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="it cannot be read: Is a directory"):
        load_config(tmp_path, {}, {})


def test_a_file_that_is_no_text(file):
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        load_config(file, {}, {})


def test_settings_of_our_own_lighthouse_are_idle_with_another(file):
    loaded = load(file, '[lighthouse]\naddress = "http://head:29510"\nport = 1\n')
    assert loaded.notes == ("not in force with lighthouse.address, as that Lighthouse has its own: lighthouse.port",)


def test_the_registry_listens_at_lighthouse_host_whoever_runs_the_lighthouse(file):
    loaded = load(file, '[lighthouse]\naddress = "http://head:29510"\nhost = "node7"\n')
    assert loaded.notes == ()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configs_load_without_notes(path):
    assert load_config(path, {}, {}).notes == ()


def test_shipped_configs_are_what_the_documentation_says():
    tiny = load_config(CONFIGS / "llama3_tiny.toml", {}, {}).config
    assert (tiny.orchestrator.replicas, tiny.orchestrator.procs_per_replica, tiny.metrics.log_freq) == (
        3,
        1,
        1,
    )
    assert (tiny.model.flavor, tiny.debug.min_step_s) == ("tiny", 0.1)
    debug = load_config(CONFIGS / "llama3_debug.toml", {}, {}).config
    assert (debug.orchestrator.replicas, debug.orchestrator.procs_per_replica, debug.diloco.sync_every) == (
        2,
        2,
        10,
    )
    assert debug.faults.at
    large = load_config(CONFIGS / "llama3_8b.toml", {}, {}).config
    assert (large.orchestrator.replicas, large.orchestrator.procs_per_replica, large.diloco.sync_every) == (
        4,
        8,
        20,
    )
    assert large.data_parallel_degree == 8
