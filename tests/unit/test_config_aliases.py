import pytest

from elastic_train.config import ConfigError, Loaded, load_config
from elastic_train.config.keys import value_of

ENABLED = '[fault_tolerance]\nenable = true\nsemi_sync_method = "diloco"\n'


@pytest.fixture
def load(tmp_path):
    def load(text: str, flags: dict[str, str] | None = None) -> Loaded:
        file = tmp_path / "run.toml"
        file.write_text(text)
        return load_config(file, flags or {}, {})

    return load


@pytest.fixture
def refusal(load):
    def refusal(text: str, flags: dict[str, str] | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, flags)
        return str(caught.value)

    return refusal


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("sync_steps = 40", "diloco.sync_every", 40),
        ("num_fragments = 4", "diloco.fragments", 4),
        ("fragment_sync_delay = 3", "diloco.overlap_steps", 3),
        ("min_replica_size = 2", "lighthouse.min_replicas", 2),
        ("group_size = 5", "orchestrator.replicas", 5),
        ('process_group = "nccl"', "diloco.backend", "nccl"),
        ("process_group_timeout_ms = 15000", "diloco.timeout_s", 15.0),
    ],
)
def test_an_alias_is_taken_as_our_key_with_a_note(load, line, key, value):
    loaded = load(f"{ENABLED}{line}\n[diloco]\n{'' if key == 'diloco.sync_every' else 'sync_every = 20'}")
    assert value_of(loaded.config, key) == value
    alias, given = line.split(" = ")
    assert any(note.startswith(f"fault_tolerance.{alias} = {given} is taken as {key} = ") for note in loaded.notes)
    assert getattr(loaded.config.fault_tolerance, alias) is None


def test_the_merge_weight_is_an_alias_too(load):
    loaded = load(f"{ENABLED}sync_steps = 20\nfragment_sync_delay = 2\nfragment_update_alpha = 0.5\n")
    assert loaded.config.diloco.merge_alpha == 0.5


@pytest.mark.parametrize(("given", "meant"), [("true", "int8"), ("false", "none")])
def test_quantizing_is_a_compression(load, given, meant):
    loaded = load(f"{ENABLED}sync_steps = 20\nshould_quantize = {given}\n")
    assert loaded.config.diloco.compression == meant
    assert loaded.config.fault_tolerance.should_quantize is None
    assert f'fault_tolerance.should_quantize = {given} is taken as diloco.compression = "{meant}"' in loaded.notes


def test_quantizing_and_compression_must_agree(load, refusal):
    text = f"{ENABLED}sync_steps = 20\nshould_quantize = true\n"
    assert load(f'{text}[diloco]\ncompression = "int8"\n').config.diloco.compression == "int8"
    assert 'is another name of diloco.compression, which is given as "bf16"' in refusal(
        f'{text}[diloco]\ncompression = "bf16"\n'
    )


def test_a_flag_switches_the_quantizing_of_the_file_off(load):
    text = f"{ENABLED}sync_steps = 20\nshould_quantize = true\n"
    assert load(text, {"fault_tolerance.should_quantize": "false"}).config.diloco.compression == "none"


def test_quantizing_is_not_for_torchfts_engine(refusal):
    stock = '[diloco]\nengine = "torchft"\nweighting = "uniform"\n[peer_ckpt]\ntransport = "http"\n'
    text = f"{ENABLED}should_quantize = true\n{stock}"
    assert refusal(text).endswith(
        ':4: diloco.compression = "int8" is not supported by diloco.engine = "torchft", which exchanges what there is '
        'unrounded: set it to "none"'
    )


def test_the_replica_id_is_the_orchestrators(load):
    loaded = load(f"{ENABLED}sync_steps = 20\nreplica_id = 3\n")
    assert "fault_tolerance.replica_id = 3 is not used: the orchestrator numbers the replicas" in loaded.notes


def test_a_group_size_of_zero_is_not_set(load):
    loaded = load(f"{ENABLED}sync_steps = 20\ngroup_size = 0\n")
    assert loaded.config.orchestrator.replicas == 2
    assert not any("group_size" in note for note in loaded.notes)


def test_alias_and_key_that_agree_are_fine(load):
    assert load(f"{ENABLED}sync_steps = 40\n[diloco]\nsync_every = 40\n").config.diloco.sync_every == 40


def test_alias_and_key_that_disagree_are_refused(refusal):
    message = refusal(f"{ENABLED}sync_steps = 40\n[diloco]\nsync_every = 20\n")
    assert message.endswith(
        ":4: fault_tolerance.sync_steps: fault_tolerance.sync_steps = 40 is another name of "
        "diloco.sync_every, which is given as 20; keep one of them"
    )


def test_a_flag_holds_over_an_alias_in_the_file(load):
    assert load(f"{ENABLED}sync_steps = 40\n", {"diloco.sync_every": "10"}).config.diloco.sync_every == 10


def test_an_alias_as_a_flag_holds_over_the_file(load):
    loaded = load(f"{ENABLED}[diloco]\nsync_every = 20\n", {"fault_tolerance.sync_steps": "40"})
    assert loaded.config.diloco.sync_every == 40


def test_the_switch_may_be_a_flag(load):
    text = '[fault_tolerance]\nsemi_sync_method = "diloco"\nsync_steps = 40\n'
    assert load(text, {"fault_tolerance.enable": "true"}).config.diloco.sync_every == 40
    assert load(f"{text}enable = true\n", {"fault_tolerance.enable": "false"}).config.diloco.sync_every == 20


def test_a_missing_sync_steps_is_pointed_out(load):
    (note,) = load(ENABLED).notes
    assert note == (
        "fault_tolerance.sync_steps is not set, so diloco.sync_every = 20 holds (torchtitan's default was 5)"
    )


def test_what_is_not_in_force_is_accepted_with_a_note(load):
    loaded = load("[fault_tolerance]\nsync_steps = 40\nsemi_sync_method = 'local_sgd'\nshould_quantize = true\n")
    assert loaded.config.diloco.sync_every == 20
    assert loaded.config.fault_tolerance.sync_steps == 40
    assert loaded.notes == (
        "not in force without fault_tolerance.enable = true: fault_tolerance.sync_steps, "
        "fault_tolerance.semi_sync_method, fault_tolerance.should_quantize",
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "group_size = false",
            "fault_tolerance.group_size wants an integer of at least 1, got false (boolean)",
        ),
        (
            'should_quantize = "int8"',
            'fault_tolerance.should_quantize wants true or false, got "int8" (string)',
        ),
        ("should_quantize = 1", "fault_tolerance.should_quantize wants true or false, got 1 (integer)"),
        ("sync_steps = 0", "fault_tolerance.sync_steps wants an integer of at least 1, got 0 (integer)"),
        ('sync_steps = "5"', 'fault_tolerance.sync_steps wants an integer of at least 1, got "5" (string)'),
        (
            'process_group_timeout_ms = "5"',
            'fault_tolerance.process_group_timeout_ms wants a number above 0, got "5" (string)',
        ),
        (
            'process_group = "mpi"',
            'fault_tolerance.process_group wants one of "auto", "gloo", "nccl", got "mpi" (string)',
        ),
    ],
)
def test_a_wrong_value_is_named_as_the_user_named_it(refusal, line, said):
    assert refusal(f"{ENABLED}{line}\n").endswith(f":4: {said}")


def test_the_tokenizers_old_name_is_taken_with_a_note(load):
    loaded = load('[model]\ntokenizer_path = "assets"\n')
    assert loaded.config.model.hf_assets_path == "assets"
    assert loaded.config.model.tokenizer_path is None
    assert loaded.notes == ('model.tokenizer_path = "assets" is taken as model.hf_assets_path = "assets"',)


def test_both_names_of_the_tokenizer_must_agree(refusal):
    assert "keep one of them" in refusal('[model]\ntokenizer_path = "a"\nhf_assets_path = "b"\n')
