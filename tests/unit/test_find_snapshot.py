"""What a run goes on from, and what it refuses to go on from."""

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


def left_by_a_run(run_dir: Path, *, step: int, outer_step: int, whole: bool = True) -> Path:
    staging = staging_folder(run_dir / "ckpt", 0, 0)
    staging.mkdir(parents=True)
    (staging / "__0_0.distcp").write_text("tensors")
    return finish(staging, Facts(step=step, outer_step=outer_step, state_hash="00ff", whole=whole), keep=0).path


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
    with pytest.raises(EnvironmentProblem, match="no_such_run/ckpt holds no snapshot that a run can go on from: name"):
        find_snapshot(config(), tmp_path / "no_such_run")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (config(steps=40), "is of step 40 and training.steps is 40: raise training.steps"),
        (config(sync_every=10), "40 after 2 outer steps, which are 20 steps here: diloco.sync_every and"),
        (config(engine="torchft"), '--resume needs diloco.engine = "elastic", not "torchft"'),
    ],
)
def test_a_config_that_does_not_go_on_there_is_refused(other: RunConfig, words: str, tmp_path: Path) -> None:
    left_by_a_run(tmp_path, step=40, outer_step=2)

    with pytest.raises(ConfigError, match=words):
        find_snapshot(other, tmp_path)


def test_a_run_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left_by_a_run(tmp_path / "run", step=40, outer_step=2)
    monkeypatch.chdir(tmp_path)

    assert find_snapshot(config(), Path("run"))[0].path == path
