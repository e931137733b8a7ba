import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data.sources import (
    TITAN_DATASETS,
    Source,
    check_dataset,
    check_tokenizer,
    find_source,
)

HEAVY = ("torch", "torchtitan", "datasets", "tokenizers", "pyarrow", "numpy")


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def problem_of(dataset: str, dataset_path: str = "") -> str:
    with pytest.raises(EnvironmentProblem) as caught:
        check_dataset(dataset, dataset_path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_checks_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from elastic_train.replica.data.sources import check_dataset, check_tokenizer\n"
        "check_dataset('stdlib', ''); check_tokenizer('')\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_names_are_those_of_torchtitan() -> None:
    from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip
    from torchtitan.hf_datasets.text_datasets import DATASETS

    assert TITAN_DATASETS.keys() == DATASETS.keys()
    assert all(not place or DATASETS[name].path == place for name, place in TITAN_DATASETS.items())


@pytest.mark.parametrize("name", ["stdlib", "c4", "c4_validation", "org/name"])
def test_what_needs_no_file_passes(name: str) -> None:
    check_dataset(name, "")


def test_names_of_torchtitan_take_another_path(tmp_path: Path) -> None:
    assert find_source("C4_Test", str(tmp_path)) == Source(kind="torchtitan", name="c4_test", path=str(tmp_path))
    assert find_source("c4", "org/copy-of-c4").path == "org/copy-of-c4"


@pytest.mark.parametrize(
    ("dataset", "dataset_path", "says"),
    [
        ("c4_test", "", "set training.dataset_path"),
        ("c4", "/nowhere/c4", '"/nowhere/c4", which does not exist'),
        ("stdlib", "some/where", "write the path into training.dataset"),
        ("", "", "use stdlib, c4"),
        ("stdlb", "", 'did you mean "stdlib"'),
        ("./nowhere", "", "does not exist"),
        ("data/train.jsonl", "", "does not exist"),
        ("a/b/c", "", "does not exist"),
    ],
)
def test_unknown_names_and_missing_paths(dataset: str, dataset_path: str, says: str) -> None:
    assert says in problem_of(dataset, dataset_path)


def test_folder_is_read_in_order_without_what_is_no_data(tmp_path: Path) -> None:
    for name in ["b/2.md", "a.txt", "b/1.py", "README.md", ".git/x.txt", "_old/x.txt", "picture.png"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")

    source = find_source(str(tmp_path), "")

    assert source.kind == "text"
    assert [path.relative_to(tmp_path).as_posix() for path in source.files] == ["a.txt", "b/1.py", "b/2.md"]
    check_dataset(str(tmp_path), "")


def test_folder_without_documents(tmp_path: Path) -> None:
    assert "folder without documents" in problem_of(str(tmp_path))


def test_folder_with_two_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}')

    assert "holds text, json files" in problem_of(str(tmp_path))


def test_unsupported_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")

    assert ".jsonl" in problem_of(str(tmp_path / "a.csv"))


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()

    assert "holds nothing" in problem_of(str(tmp_path))


def test_first_json_record_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "a"}\n')
    assert 'line 1: no "text" field' in problem_of(str(path))

    path.write_text(json.dumps([{"content": "a"}]))
    assert 'record 1: no "text" field' in problem_of(str(path))

    path.write_text('{"text": "a"}\n{oops\n')
    check_dataset(str(path), "")


def test_parquet_schema_is_looked_at(tmp_path: Path) -> None:
    check_dataset(str(write_parquet(tmp_path / "good.parquet", {"text": ["a"], "id": [1]})), "")

    other = write_parquet(tmp_path / "other.parquet", {"content": ["a"], "id": [1]})
    assert 'no "text" column but content, id' in problem_of(str(other))
    number = write_parquet(tmp_path / "number.parquet", {"text": [1]})
    assert "is no string but int64" in problem_of(str(number))
    empty = write_parquet(tmp_path / "empty.parquet", {"text": pa.array([], pa.string())})
    assert "holds no rows" in problem_of(str(empty))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 but not really")
    assert "no parquet file that can be read" in problem_of(str(broken))


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_folder_with_a_tokenizer_passes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")

    check_tokenizer(str(tmp_path))


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        check_tokenizer(str(tmp_path / "Llama-3.1-8B"))

    assert "hf download meta-llama/Llama-3.1-8B tokenizer.json" in str(caught.value)
    assert 'model.hf_assets_path = ""' in str(caught.value)


def test_pointer_in_place_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")

    with pytest.raises(EnvironmentProblem, match="Git LFS pointer"):
        check_tokenizer(str(tmp_path))
