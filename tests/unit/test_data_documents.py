import json
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data.documents import Documents, open_documents
from elastic_train.replica.data.sources import DataError, find_source

TEXTS = ["one", "two\nlines", "three", "", "five"]


@pytest.fixture(autouse=True)
def huggingface_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` reads the environment when it is imported, so its folder is set here too."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "huggingface")


def open_at(path: Path | str, virtual_shards: int = 2, dataset_path: str = "") -> Documents:
    return open_documents(find_source(str(path), dataset_path), virtual_shards)


def all_texts(documents: Documents, epoch: int = 0) -> list[str]:
    return [text for shard in range(documents.virtual_shards) for text in documents.shard(shard).texts(epoch, 0)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def streamed(folder: Path, files: list[list[str]]) -> datasets.IterableDataset:
    paths = [str(write_jsonl(folder / f"{number}.jsonl", texts)) for number, texts in enumerate(files)]
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=True)


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 40_000 + "\nend\n")

    assert [len(text) for text in all_texts(open_at(path))] == [32_768, 40_000 - 32_768 + len("\nend\n")]


def test_jsonl_file_with_records_of_several_shapes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "meta": {"a": 1}}\n{"text": null}\n{"text": "three", "meta": "b"}\n')

    assert all_texts(open_at(path)) == ["one", "", "three"]


def test_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", None, "three"], "id": [1, 2, 3]}), path)

    assert all_texts(open_at(path)) == ["one", "", "three"]


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "b.jsonl", TEXTS[3:])
    write_jsonl(tmp_path / "data" / "a.jsonl", TEXTS[:3])

    assert all_texts(open_at(tmp_path / "data")) == TEXTS


def test_embedded_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_TRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _: os.path.join(os.path.dirname(os.__file__), "asyncio"))
    documents = open_at("stdlib", 64)

    assert documents.count is not None
    assert documents.count > 30
    assert any("class TaskGroup:" in text for text in all_texts(documents))


def test_dataset_of_torchtitan_at_another_path(tmp_path: Path) -> None:
    folder = tmp_path / "c4_test"
    folder.mkdir()
    write_jsonl(folder / "data.json", TEXTS)

    assert all_texts(open_at("c4_test", 2, str(folder))) == TEXTS


def test_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])
    assert all_texts(open_at(path)) == ["one"]

    write_jsonl(path, ["two"])
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    assert all_texts(open_at(path)) == ["two"]


def test_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    open_at(path)
    monkeypatch.setattr("elastic_train.replica.data.files._text_of", lambda *_: pytest.fail("read again"))

    assert all_texts(open_at(path)) == TEXTS


def test_corrupt_record_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])
    with path.open("a") as file:
        file.write("{oops\n")

    with pytest.raises(EnvironmentProblem, match=r"a\.jsonl, line 2: not JSON"):
        open_at(path)


def test_corrupt_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but not really")

    with pytest.raises(EnvironmentProblem, match=r"a\.parquet\" cannot be read"):
        open_at(path)


def test_parquet_file_without_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["one"]}), path)

    with pytest.raises(EnvironmentProblem, match=r"a\.parquet"):
        open_at(path)


def test_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n")

    with pytest.raises(EnvironmentProblem, match="no documents in"):
        open_at(path)


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(DataError, match=r'"nobody/nothing" cannot be reached'):
        open_at("nobody/nothing")


def test_hub_that_does_not_know_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)

    with pytest.raises(EnvironmentProblem, match=r'"nobody/nothing" is neither a path nor a dataset'):
        open_at("nobody/nothing")


@given(count=st.integers(0, 20), virtual_shards=st.integers(1, 8))
def test_shards_of_a_stored_dataset_share_it_out(count: int, virtual_shards: int) -> None:
    texts = [str(number) for number in range(count)]
    documents = Documents(datasets.Dataset.from_dict({"text": texts}), virtual_shards)
    sizes = [len(list(documents.shard(shard).texts(0, 0))) for shard in range(virtual_shards)]

    assert all_texts(documents) == texts
    assert max(sizes) - min(sizes) <= 1
    assert [documents.is_empty(shard) for shard in range(virtual_shards)] == [size == 0 for size in sizes]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_stored_shard_is_read_from_any_document(epoch: int) -> None:
    shard = Documents(datasets.Dataset.from_dict({"text": TEXTS}), 1).shard(0)
    whole = list(shard.texts(epoch, 0))

    assert sorted(whole) == sorted(TEXTS)
    assert (whole == TEXTS) == (epoch == 0)
    for first in range(len(TEXTS) + 1):
        assert list(shard.texts(epoch, first)) == whole[first:]
    with pytest.raises(DataError, match="not the one that the run began with"):
        list(shard.texts(epoch, len(TEXTS) + 1))


def test_shuffling_leaves_no_files(tmp_path: Path) -> None:
    documents = open_at(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    before = set((tmp_path / "huggingface").rglob("*"))
    all_texts(documents, epoch=1)

    assert set((tmp_path / "huggingface").rglob("*")) == before


@pytest.mark.parametrize("virtual_shards", [2, 4, 6])
def test_streamed_shards_read_in_turns_share_the_dataset_out(tmp_path: Path, virtual_shards: int) -> None:
    files = [[f"{name}{number}" for number in range(5)] for name in "abcd"]
    documents = Documents(streamed(tmp_path, files), virtual_shards)
    assert documents.count is None
    assert not documents.is_empty(virtual_shards - 1)

    shards = [documents.shard(index).texts(0, 0) for index in range(virtual_shards)]
    seen: list[list[str]] = [[] for _ in shards]
    for _ in range(20):
        for index, shard in enumerate(shards):
            seen[index] += [text for text in [next(shard, None)] if text is not None]

    assert sorted(text for texts in seen for text in texts) == sorted(text for texts in files for text in texts)
    for index, texts in enumerate(seen):
        later = list(documents.shard(index).texts(3, 0))
        assert sorted(later) == sorted(texts)
        for first in range(len(texts) + 1):
            assert list(documents.shard(index).texts(0, first)) == texts[first:]
            assert list(documents.shard(index).texts(3, first)) == later[first:]


def test_few_streamed_files_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Documents(streamed(tmp_path, [["a"], ["b"]]), 2)
    assert not caplog.records

    Documents(streamed(tmp_path, [["a"], ["b"]]), 3)
    assert "set training.dataloader.virtual_shards to at most" in caplog.text


def test_stream_that_breaks_off_is_a_data_error(tmp_path: Path) -> None:
    data = streamed(tmp_path, [["a"], ["b"]])
    (tmp_path / "1.jsonl").unlink()
    texts = Documents(data, 1).shard(0).texts(0, 0)

    assert next(texts) == "a"
    with pytest.raises(DataError, match="cannot be read on"):
        next(texts)


def test_streamed_record_without_text_is_a_data_error(tmp_path: Path) -> None:
    data = streamed(tmp_path, [["a"]]).rename_column("text", "content")

    with pytest.raises(DataError, match='no text in its "text" field'):
        next(Documents(data, 1).shard(0).texts(0, 0))
