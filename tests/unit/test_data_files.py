import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data.files import cut, read_json, read_text

LINES = st.lists(st.text(alphabet="ab \n", max_size=12), max_size=20)


@given(lines=LINES, limit=st.integers(1, 15))
def test_cut_loses_nothing_and_keeps_the_limit(lines: list[str], limit: int) -> None:
    documents = list(cut(lines, limit))

    assert "".join(documents) == "".join(lines)
    assert all(0 < len(document) <= limit for document in documents)


def test_cut_prefers_the_end_of_a_line() -> None:
    assert list(cut(["aaa\n", "bb\n", "cccc\n"], limit=7)) == ["aaa\nbb\n", "cccc\n"]


def test_text_file_is_one_document_until_it_is_long(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first\nsecond\n")

    assert list(read_text(path)) == ["first\nsecond\n"]
    assert list(read_text(path, limit=7)) == ["first\n", "second\n"]


@pytest.mark.parametrize("layout", ["lines", "array"])
def test_json_gives_the_texts_and_ignores_other_fields(tmp_path: Path, layout: str) -> None:
    records = [{"text": "one", "meta": {"a": 1}}, {"text": None}, {"id": 7, "text": "[two"}]
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(records, indent=2) if layout == "array" else "\n\n".join(map(json.dumps, records)) + "\n"
    )

    assert list(read_json(path)) == ["one", "", "[two"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{oops", "line 2: not JSON"),
        ('["text"]', 'line 2: no "text" field'),
        ('{"txt": "a"}', 'line 2: no "text" field'),
        ('{"text": 3}', 'line 2: "text" is no string but int'),
    ],
)
def test_bad_json_record_is_named_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')

    records = read_json(path)
    assert next(records) == "fine"
    with pytest.raises(EnvironmentProblem, match=complaint):
        next(records)


@pytest.mark.parametrize("read", [read_text, read_json])
def test_file_in_another_encoding_is_named(tmp_path: Path, read) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes('{"text": "gr\xfcn"}'.encode("latin-1"))

    with pytest.raises(EnvironmentProblem, match=r"a\.txt is not UTF-8"):
        list(read(path))
