import subprocess
import sys
import types
from pathlib import Path

import pytest

from elastic_train.cli import main
from elastic_train.config import EnvironmentProblem
from elastic_train.config.keys import keys, sections
from elastic_train.orchestrator.end import RunEnd

HEAVY = ("torch", "torchft", "torchtitan", "monarch", "datasets", "tokenizers", "numpy", "rich")

# Runs the command line and fails if it imported anything that takes long.
PROGRAM = f"""
import sys
from elastic_train.cli import main
try:
    main(sys.argv[1:])
finally:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    assert not heavy, heavy
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nflavor = "tiny"\n')
    return file


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def call(capsys):
    """Runs the command line in this process; gives exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return call


def stand_in(monkeypatch, name: str, **functions: object) -> None:
    module = types.ModuleType(name)
    for attribute, function in functions.items():
        setattr(module, attribute, function)
    monkeypatch.setitem(sys.modules, name, module)


class Runs(list):
    """What `run` was called with: config, notes, run_dir, name, resume."""

    end = RunEnd(status="succeeded")

    def run(self, config, notes, *, name, run_dir, resume, view):
        self.append((config, notes, run_dir, name, resume))
        return self.end


@pytest.fixture
def runs(monkeypatch):
    calls = Runs()
    stand_in(monkeypatch, "elastic_train.orchestrator.run", run=calls.run)
    stand_in(monkeypatch, "elastic_train.observe.summary", summary_lines=lambda fold: [])
    return calls


def test_help_comes_without_heavy_imports():
    done = command("run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--diloco.sync_every VALUE" in done.stdout


def test_a_config_error_comes_without_heavy_imports(config):
    config.write_text("[diloco]\nsync_step = 5\n")
    done = command("run", config)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"elastic-train: {config}:2: diloco.sync_step is no known key, did you mean diloco.sync_every?\n"
    )


def test_help_shows_every_key_with_meaning_and_default(call):
    code, out, _ = call("run", "-h")
    text = " ".join(out.split())
    assert code == 0
    for key in keys().values():
        assert f"--{key.path} VALUE" in text
    assert "Inner steps from one outer sync to the next. An integer of at least 1. [default: 20]" in text


def test_help_is_grouped_by_section(call):
    _, out, _ = call("run", "--help")
    heads = [line for line in out.splitlines() if line.startswith("[")]
    assert [head[1:].split("]")[0] for head in heads] == [
        section.path for section in sections().values() if section.keys
    ]


def test_flags_reach_the_config(call, config, runs):
    arguments = [
        "--diloco.sync_every",
        "50",
        "--training.steps=200",
        "--faults.at",
        '["0.0@70:kill"]',
        "--job.description=a b",
    ]
    assert call("run", config, *arguments) == (0, "", "")
    ((loaded, notes, run_dir, name, resume),) = runs
    assert loaded.diloco.sync_every == 50
    assert loaded.training.steps == 200
    assert loaded.faults.at == ("0.0@70:kill",)
    assert loaded.job.description == "a b"
    assert loaded.model.flavor == "tiny"
    assert notes == ()
    assert (run_dir, resume) == (None, None)
    assert name == "run"


@pytest.mark.parametrize("flag", ["--diloco.sync-every", "--diloco.sync_every"])
def test_dashes_and_underscores_are_equal(call, config, runs, flag):
    assert call("run", flag, "50", config) == (0, "", "")
    assert runs[0][0].diloco.sync_every == 50


def test_a_negative_number_is_a_value(call, config, runs):
    assert call("run", config, "--training.global_batch_size", "-1") == (0, "", "")


@pytest.mark.parametrize("flag", ["--run_dir", "--run-dir"])
def test_the_run_folder_may_be_named(call, config, runs, flag):
    call("run", config, flag, "some/folder")
    assert runs[0][2] == Path("some/folder")


def test_a_run_may_go_on_from_another(call, config, runs):
    call("run", config, "--resume", "some/folder")
    assert runs[0][4] == Path("some/folder")


def test_notes_reach_the_run(call, config, runs, monkeypatch):
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "30")
    call("run", config)
    assert runs[0][0].diloco.timeout_s == 30.0
    assert len(runs[0][1]) == 1


@pytest.mark.parametrize(
    ("end", "code", "last_line"),
    [
        (RunEnd(status="succeeded"), 0, ""),
        (RunEnd(status="interrupted"), 130, ""),
        (RunEnd(status="failed", cause="signal", reason="killed"), 1, "elastic-train: signal: killed\n"),
        (RunEnd(status="failed", cause="config_error", reason="no"), 2, "elastic-train: config_error: no\n"),
    ],
)
def test_the_exit_code_is_the_runs(call, config, runs, end, code, last_line):
    runs.end = end
    assert call("run", config) == (code, "", last_line)


@pytest.mark.parametrize(("status", "told"), [("interrupted", True), ("failed", True), ("succeeded", False)])
def test_a_run_that_ends_early_says_how_to_go_on(call, config, runs, monkeypatch, status, told):
    def run(*_, view, **__):
        view.fold.apply({"t": 0.0, "event": "run_started", "replicas": 1, "run_dir": "some/run"})
        view.fold.apply({"t": 1.0, "event": "checkpoint_saved", "outer_step": 1, "path": "p"})
        return RunEnd(status=status)

    stand_in(monkeypatch, "elastic_train.orchestrator.run", run=run)
    line = "to go on: elastic-train run some/run/config.toml --resume some/run\n"
    assert call("run", config)[1] == (line if told else "")


def test_an_environment_problem_is_one_line(call, config, monkeypatch):
    def run(*_: object, **__: object) -> int:
        raise EnvironmentProblem("port 80 is in use:\nset lighthouse.port = 0")

    stand_in(monkeypatch, "elastic_train.orchestrator.run", run=run)
    assert call("run", config) == (2, "", "elastic-train: port 80 is in use: set lighthouse.port = 0\n")


def test_an_interrupt_has_its_own_exit_code(call, config, monkeypatch):
    def run(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    stand_in(monkeypatch, "elastic_train.orchestrator.run", run=run)
    assert call("run", config)[0] == 130


WRONG = {
    "no config": (["run"], "Missing argument 'CONFIG'."),
    "a misspelt flag": (
        ["run", "x.toml", "--diloco.sync-evry", "5"],
        "--diloco.sync_evry is no known flag, did you mean --diloco.sync_every?",
    ),
    "a flag without its section": (
        ["run", "x.toml", "--sync_every=5"],
        "--sync_every is no known flag, did you mean --diloco.sync_every?",
    ),
    "a flag like no other": (
        ["run", "x.toml", "--xyzzy_plugh", "5"],
        "--xyzzy_plugh is no known flag; see elastic-train run --help",
    ),
    "a flag at the end without a value": (
        ["run", "x.toml", "--diloco.sync_every"],
        "Option '--diloco.sync_every' requires an argument.",
    ),
    "a flag before another without a value": (
        ["run", "x.toml", "--compile.enable", "--training.steps", "5"],
        "Invalid value for '--compile.enable': a value is missing before --training.steps",
    ),
    "an argument too many": (["run", "x.toml", "y.toml"], "Got unexpected extra argument (y.toml)"),
    "a command that does not exist": (["rnu"], "No such command 'rnu'."),
    "a file that does not exist": (
        ["run", "x.toml"],
        "x.toml: there is no such file; name a TOML config, such as configs/llama3_debug.toml",
    ),
    "a run folder that does not exist": (
        ["status", "nowhere"],
        "nowhere: there is no such run folder; the newest one is <job.dump_folder>/latest",
    ),
    "a fault for a run that does not exist": (
        ["inject", "nowhere", "--replica", "0", "--rank", "0", "--kind", "kill"],
        "nowhere: there is no such run folder; the newest one is <job.dump_folder>/latest",
    ),
    "a fault without a kind": (
        ["inject", ".", "--replica", "0", "--rank", "0"],
        "Missing option '--kind'. Choose from:",
    ),
    "a fault at no replica": (
        ["inject", ".", "--replica", "-1", "--rank", "0", "--kind", "kill"],
        "Invalid value for '--replica': -1 is not in the range x>=0.",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_one_line_and_exit_code_2(call, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"elastic-train: {said}")


def test_without_a_command_the_help_is_shown(call):
    code, out, err = call()
    assert (code, err) == (2, "")
    assert "inject" in out


def test_status_shows_the_folder(call, tmp_path, monkeypatch):
    shown: list[tuple[object, ...]] = []
    stand_in(monkeypatch, "elastic_train.observe.status", show=lambda *given: shown.append(given))
    assert call("status", tmp_path) == (0, "", "")
    assert call("status", tmp_path, "--json") == (0, "", "")
    assert shown == [(tmp_path, False), (tmp_path, True)]


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_inject_asks_the_run_and_prints_its_answer(call, tmp_path, monkeypatch, ok, code):
    asked: list[tuple[object, ...]] = []

    def ask(run_dir: Path, request: dict[str, object]) -> dict[str, object]:
        asked.append((run_dir, request))
        return {"ok": ok, "text": "said"}

    stand_in(monkeypatch, "elastic_train.orchestrator.control", ask=ask)
    assert call("inject", tmp_path, "--replica", 1, "--rank", 0, "--kind", "stop") == (code, "said\n", "")
    assert call("inject", tmp_path, "--replica", 1, "--rank", 0, "--kind", "kill", "--point", "vote")[0] == code
    wanted = {"op": "inject", "replica": 1, "rank": 0}
    assert asked == [
        (tmp_path, wanted | {"kind": "stop", "point": "step"}),
        (tmp_path, wanted | {"kind": "kill", "point": "vote"}),
    ]


def test_version(call):
    assert call("--version") == (0, "elastic-train, version 0.1.0\n", "")
