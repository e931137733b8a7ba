"""What a run refuses before it starts anything: one line that names the key, and nothing heavy imported."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_train.config import RunConfig
from elastic_train.orchestrator.run import _with_seed
from tests.programs import finished

# Tries one config after the other, each given as a mapping of keys to values.
PROGRAM = """
import json, pathlib, sys
from elastic_train.config import EnvironmentProblem, load_config
from elastic_train.orchestrator.run import run

folder = pathlib.Path(sys.argv[1])
(folder / "run.toml").write_text("")
for overrides in json.loads(sys.argv[2]):
    loaded = load_config(folder / "run.toml", overrides, {})
    try:
        run(loaded.config, loaded.notes, name="run", run_dir=folder / "run", resume=folder / "none", view=None)
    except EnvironmentProblem as problem:
        heavy = sorted({"torch", "monarch", "torchft", "torchtitan", "datasets", "numpy"} & sys.modules.keys())
        print(json.dumps({"text": str(problem), "heavy": heavy, "made": (folder / "run").exists()}))
"""


@pytest.fixture(scope="module")
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def refusals(taken_port: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "empty.txt").write_text("")
    (folder / "file").write_text("")
    reasons = {
        "port": {"lighthouse.port": str(taken_port)},
        "host": {"lighthouse.port": "29510", "lighthouse.host": '"192.0.2.1"'},
        "dataset": {"training.dataset": '"/no/such/data"'},
        "empty dataset": {"training.dataset": f'"{folder}/empty.txt"'},
        "validation dataset": {"validation.enable": "true", "validation.dataset": '"/no/validation"'},
        "tokenizer": {"model.hf_assets_path": '"/no/such/tokenizer"'},
        "backend": {"diloco.backend": '"nccl"'},
        "resume": {},
    }
    done = finished(PROGRAM, folder, json.dumps(list(reasons.values())), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stderr) == (0, "")
    return dict(zip(reasons, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("port", "lighthouse.port = {port} cannot be used on 127.0.0.1 (Address already in use): choose another port"),
        ("backend", 'diloco.backend = "nccl" needs accelerators, and this machine shows none'),
        ("host", "lighthouse.port = 29510 cannot be used on 192.0.2.1 (Cannot assign requested address)"),
        ("dataset", 'training.dataset "/no/such/data"'),
        ("empty dataset", "holds nothing: its files are empty"),
        ("validation dataset", 'validation.dataset "/no/validation"'),
        ("tokenizer", 'model.hf_assets_path "/no/such/tokenizer" is no folder with a tokenizer.json'),
        ("resume", "none: there is no such run folder to resume from"),
    ],
)
def test_refused_in_one_line_and_at_once(
    refusals: dict[str, dict[str, Any]], taken_port: int, reason: str, text: str
) -> None:
    refusal = refusals[reason]

    assert text.format(port=taken_port) in refusal["text"]
    assert "\n" not in refusal["text"]
    assert refusal["heavy"] == []
    assert not refusal["made"]


def test_replicas_share_a_seed_that_was_drawn_once() -> None:
    without = RunConfig()
    drawn = [_with_seed(without).debug.seed for _ in range(4)]

    assert without.debug.seed is None
    assert len(set(drawn)) > 1
    assert all(seed is not None and 0 <= seed < 2**31 for seed in drawn)


def test_a_seed_that_was_given_stays() -> None:
    config = _with_seed(RunConfig())

    assert _with_seed(config) is config
