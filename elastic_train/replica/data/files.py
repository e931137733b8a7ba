"""Reads documents out of text and JSON files, one at a time, with errors that name the file and the line.

``datasets`` has readers of its own, but its text reader knows only lines, paragraphs or whole files, and its
JSON reader fails on records that do not all have the same fields. Its cache is filled from this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from elastic_train.config import EnvironmentProblem

TEXT_COLUMN = "text"

# Long texts are cut, so that one large file reaches every virtual shard and a restart re-tokenizes little.
DOCUMENT_CHARS = 32_768


def cut(lines: Iterable[str], limit: int = DOCUMENT_CHARS) -> Iterator[str]:
    """Join lines into documents of at most ``limit`` characters, cut at the ends of lines.

    A single line that is longer than that is cut where it reaches the limit. Nothing is lost or added.
    """
    held: list[str] = []
    size = 0
    for line in lines:
        if held and size + len(line) > limit:
            yield "".join(held)
            held, size = [], 0
        while len(line) > limit:
            yield line[:limit]
            line = line[limit:]  # noqa: PLW2901 - what is left of the line
        if line:
            held.append(line)
            size += len(line)
    if held:
        yield "".join(held)


def read_text(path: Path, limit: int = DOCUMENT_CHARS) -> Iterator[str]:
    """The documents of a UTF-8 text file: the whole file, cut if it is long."""
    try:
        with path.open(encoding="utf-8") as lines:
            yield from cut(lines, limit)
    except UnicodeDecodeError as error:
        raise EnvironmentProblem(f"{path} is not UTF-8 ({error.reason}): convert or remove it") from error


def read_json(path: Path) -> Iterator[str]:
    """The texts of a JSON file, one object a line or one array of objects; a text that is null is empty."""
    try:
        with path.open(encoding="utf-8") as lines:
            filled = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
            for index, (number, line) in enumerate(filled):
                if index == 0 and line.lstrip().startswith("["):
                    yield from _texts_of_array(path, line + lines.read())
                    return
                place = f"{path}, line {number}"
                yield _text_of(place, _parse(place, line))
    except UnicodeDecodeError as error:
        raise EnvironmentProblem(f"{path} is not UTF-8 ({error.reason}): convert or remove it") from error


def _texts_of_array(path: Path, content: str) -> Iterator[str]:
    for number, record in enumerate(_parse(str(path), content), start=1):
        yield _text_of(f"{path}, record {number}", record)


def _parse(place: str, content: str) -> Any:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise EnvironmentProblem(
            f"{place}: not JSON ({error.msg}); write one object a line, or one array of objects"
        ) from error


def _text_of(place: str, record: Any) -> str:
    if not isinstance(record, dict) or TEXT_COLUMN not in record:
        raise EnvironmentProblem(f'{place}: no "{TEXT_COLUMN}" field; every record needs one')
    text = record[TEXT_COLUMN]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise EnvironmentProblem(f'{place}: "{TEXT_COLUMN}" is no string but {type(text).__name__}')
    return text
