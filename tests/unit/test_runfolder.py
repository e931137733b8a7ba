import json
import os
import threading
from pathlib import Path

import pytest

from elastic_train.config import EnvironmentProblem, JobConfig, RunConfig, load_config
from elastic_train.orchestrator.runfolder import create


def config_below(folder: Path) -> RunConfig:
    return RunConfig(job=JobConfig(dump_folder=str(folder)))


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.orchestrator.runfolder.time.strftime", lambda form: "20260102-030405")


def test_a_run_gets_a_folder_of_its_own(tmp_path: Path, stopped_clock: None) -> None:
    config = config_below(tmp_path / "outputs")

    folder = create(config, "llama3_tiny", None)

    assert folder.path == tmp_path / "outputs" / "20260102-030405-llama3_tiny"
    assert load_config(folder.path / "config.toml", {}, {}).config == config
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.toml", "events.jsonl", "logs", "segments"]


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path: Path, stopped_clock: None) -> None:
    folders = [create(config_below(tmp_path), "run", None) for _ in range(3)]

    assert [folder.path.name for folder in folders] == [f"20260102-030405-run{end}" for end in ("", "-2", "-3")]


def test_runs_that_start_at_once_do_not_share_a_folder(tmp_path: Path, stopped_clock: None) -> None:
    made: list[Path] = []
    together = threading.Barrier(4)

    def start() -> None:
        together.wait()
        made.append(create(config_below(tmp_path), "run", None).path)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == len(set(made)) == 4


def test_a_name_becomes_a_file_name(tmp_path: Path, stopped_clock: None) -> None:
    folder = create(config_below(tmp_path), "a run/of ünusual name", None)

    assert folder.path == tmp_path / "20260102-030405-a-run-of-nusual-name"


def test_latest_points_to_the_last_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        folder = create(config_below(tmp_path), name, None)

        assert (tmp_path / "latest").resolve() == folder.path
        assert os.readlink(tmp_path / "latest") == folder.path.name
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_chosen_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    folder = create(config_below(tmp_path / "unused"), "run", Path("mine"))

    assert folder.path == tmp_path / "mine"
    assert (tmp_path / "latest").resolve() == folder.path
    assert not (tmp_path / "unused").exists()


def test_a_folder_that_was_prepared_is_taken(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "logs").mkdir(parents=True)

    assert create(config_below(tmp_path), "run", run_dir).path == run_dir


def test_a_folder_with_a_run_in_it_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    folder = create(config_below(tmp_path), "run", run_dir)
    folder.events.write_text('{"event":"run_started"}\n')
    (run_dir / "config.toml").write_text("old")

    with pytest.raises(EnvironmentProblem, match=rf"{run_dir} holds a run already: choose another --run_dir"):
        create(config_below(tmp_path), "run", run_dir)

    assert (run_dir / "config.toml").read_text() == "old"


@pytest.mark.parametrize("part", ["file/outputs", "x" * 300])
def test_a_folder_that_cannot_be_written(tmp_path: Path, part: str) -> None:
    (tmp_path / "file").write_text("no folder")
    problem = r"cannot write the run folder .*: set job\.dump_folder or --run_dir to a folder that you may write"

    with pytest.raises(EnvironmentProblem, match=problem):
        create(config_below(tmp_path / part), "run", None)
    with pytest.raises(EnvironmentProblem, match=problem):
        create(config_below(tmp_path), "run", tmp_path / part)


def test_the_controller_says_where_it_is(run_dir: Path, tmp_path: Path) -> None:
    folder = create(config_below(tmp_path), "run", run_dir)

    folder.announce_controller(Path("/tmp/first.sock"))
    folder.announce_controller(Path("/tmp/second.sock"))

    assert json.loads(folder.controller.read_text()) == {"pid": os.getpid(), "socket": "/tmp/second.sock"}
    assert not list(run_dir.glob("*.tmp"))
