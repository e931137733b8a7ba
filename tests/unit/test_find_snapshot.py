"""What a run goes on from, and what it refuses to go on from."""

import re
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config import (
    CheckpointConfig,
    ConfigError,
    DilocoConfig,
    EnvironmentProblem,
    RunConfig,
    TrainingConfig,
)
from elastic_train.orchestrator.resume import find_snapshot
from elastic_train.replica.durable.folder import Facts, finish, staging_folder
from elastic_train.replica.durable.origin import origin_of


def left_by_a_run(
    run_dir: Path, *, step: int, outer_step: int, whole: bool = True, origin: dict[str, Any] | None = None
) -> Path:
    staging = staging_folder(run_dir / "ckpt", 0, 0)
    staging.mkdir(parents=True)
    (staging / "__0_0.distcp").write_text("tensors")
    facts = Facts(
        step=step,
        outer_step=outer_step,
        state_hash="00ff",
        whole=whole,
        origin={**origin_of(config()), **(origin or {})},
    )
    return finish(staging, facts, keep=0).path


def config(steps: int = 100, **diloco: Any) -> RunConfig:
    return RunConfig(
        checkpoint=CheckpointConfig(folder="ckpt"),
        training=TrainingConfig(steps=steps),
        diloco=DilocoConfig(**{"sync_every": 20, **diloco}),
    )


def test_the_newest_that_is_sound(tmp_path: Path) -> None:
    sound = left_by_a_run(tmp_path, step=40, outer_step=2)
    (left_by_a_run(tmp_path, step=60, outer_step=3) / "__0_0.distcp").write_text("tensor")

    snapshot, passed = find_snapshot(config(), tmp_path)

    assert (snapshot.path, snapshot.facts.outer_step) == (sound, 2)
    assert len(passed) == 1
    assert "step-60/__0_0.distcp has 6 bytes, not 7" in passed[0]


def test_without_one_it_says_what_to_do(tmp_path: Path) -> None:
    left_by_a_run(tmp_path, step=40, outer_step=2, whole=False)

    with pytest.raises(EnvironmentProblem, match=r"holds no snapshot .*parameters alone.* checkpoint\.enable"):
        find_snapshot(config(), tmp_path)
    with pytest.raises(EnvironmentProblem, match="no_such_run: there is no such run folder to resume from"):
        find_snapshot(config(), tmp_path / "no_such_run")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (config(steps=40), "is of step 40 and training.steps is 40: raise training.steps"),
        (config(sync_every=10), "2 outer steps, which are 20 steps here, and no older one fits: diloco.sync_every and"),
        (config(engine="torchft"), '--resume needs diloco.engine = "elastic", not "torchft"'),
    ],
)
def test_a_config_that_does_not_go_on_there_is_refused(other: RunConfig, words: str, tmp_path: Path) -> None:
    left_by_a_run(tmp_path, step=40, outer_step=2)

    with pytest.raises(ConfigError, match=words):
        find_snapshot(other, tmp_path)


def test_where_training_steps_cut_the_last_interval_short_the_one_before_is_taken(tmp_path: Path) -> None:
    before = left_by_a_run(tmp_path, step=90, outer_step=3)
    left_by_a_run(tmp_path, step=100, outer_step=4)

    snapshot, passed = find_snapshot(config(steps=200, sync_every=30), tmp_path)

    assert snapshot.path == before
    assert len(passed) == 1
    assert "step-100 was passed over: it is of step 100 after 4 outer steps, which are 120 steps here" in passed[0]


def test_if_no_older_one_fits_it_names_what_may_have_cut_it_short(tmp_path: Path) -> None:
    left_by_a_run(tmp_path, step=100, outer_step=4)

    with pytest.raises(ConfigError, match=r"step-100 .* no older one fits.* diloco\.sync_every .*training\.steps"):
        find_snapshot(config(steps=200, sync_every=30), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.dataset", "other.txt"),
        ("training.dataset_path", "/elsewhere"),
        ("training.seq_len", 17),
        ("training.dataloader.virtual_shards", 3),
        ("model.hf_assets_path", "/tokenizer"),
        ("model.flavor", "8B"),
    ],
)
def test_where_the_numbers_mean_something_else_the_keys_are_named(key: str, value: Any, tmp_path: Path) -> None:
    left_by_a_run(tmp_path, step=40, outer_step=2, origin={key: value})

    with pytest.raises(ConfigError, match=re.escape(f"of a run with another config ({key} was {value!r} and is ")):
        find_snapshot(config(), tmp_path)


def test_one_without_the_outer_momentum_is_refused(tmp_path: Path) -> None:
    left_by_a_run(tmp_path, step=40, outer_step=2, origin={"diloco.engine": "torchft"})

    with pytest.raises(ConfigError, match=r'with diloco\.engine = "torchft": it lacks the outer momentum'):
        find_snapshot(config(), tmp_path)


def test_a_run_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by_a_run(tmp_path / "run", step=40, outer_step=2)
    monkeypatch.chdir(tmp_path)

    assert find_snapshot(config(), Path("run"))[0].path == path
