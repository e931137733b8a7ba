import pytest

from elastic_train.config import ConfigError, Loaded, load_config
from elastic_train.config.keys import value_of


@pytest.fixture
def load(tmp_path):
    def load(environ: dict[str, str], flags: dict[str, str] | None = None) -> Loaded:
        file = tmp_path / "run.toml"
        file.write_text("[diloco]\ntimeout_s = 50.0\n")
        return load_config(file, flags or {}, environ)

    return load


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("TORCHFT_LIGHTHOUSE", "http://head:29510", "lighthouse.address", "http://head:29510"),
        ("TORCHFT_TIMEOUT_SEC", "30", "diloco.timeout_s", 30.0),
        ("TORCHFT_QUORUM_TIMEOUT_SEC", "1800", "diloco.quorum_timeout_s", 1800.0),
        ("TORCHFT_CONNECT_TIMEOUT_SEC", "20", "diloco.connect_timeout_s", 20.0),
        ("TORCHFT_QUORUM_RETRIES", "5", "diloco.quorum_retries", 5),
    ],
)
def test_a_variable_sets_its_key_with_a_note(load, variable, text, key, value):
    loaded = load({variable: text})
    assert value_of(loaded.config, key) == value
    (note,) = loaded.notes
    assert note.startswith(f"{variable} in the environment sets {key} = ")


def test_the_managers_port_is_read(load):
    loaded = load({"TORCHFT_MANAGER_PORT": "29512"}, {"orchestrator.replicas": "1"})
    assert loaded.config.diloco.manager_port == 29512


def test_a_variable_holds_over_file_and_flags_as_in_torchft(load):
    loaded = load({"TORCHFT_TIMEOUT_SEC": "30"}, {"diloco.timeout_s": "40"})
    assert loaded.config.diloco.timeout_s == 30.0
    assert loaded.notes == ("TORCHFT_TIMEOUT_SEC in the environment sets diloco.timeout_s = 30 (the config has 40)",)


@pytest.mark.parametrize("text", ["", "ten", "1.5", "-3", "²"])
def test_what_torchft_could_not_read_is_refused(load, text):
    with pytest.raises(ConfigError, match="TORCHFT_TIMEOUT_SEC in the environment wants a whole number, got"):
        load({"TORCHFT_TIMEOUT_SEC": text})


def test_an_empty_lighthouse_is_none(load):
    loaded = load({"TORCHFT_LIGHTHOUSE": ""})
    assert loaded.config.lighthouse.address == ""
    assert loaded.notes == ()


def test_a_value_out_of_bounds_is_named_as_the_variable(load):
    with pytest.raises(ConfigError, match=r"^TORCHFT_TIMEOUT_SEC wants a number above 0, got 0"):
        load({"TORCHFT_TIMEOUT_SEC": "0"})


def test_a_variable_is_checked_against_the_other_keys(load):
    with pytest.raises(ConfigError, match=r"^TORCHFT_TIMEOUT_SEC: diloco.timeout_s = 500.0 must be shorter than"):
        load({"TORCHFT_TIMEOUT_SEC": "500"})


def test_other_variables_are_left_alone(load):
    assert load({"TORCHFT_USE_OTEL": "true", "HOME": "/"}).notes == ()
