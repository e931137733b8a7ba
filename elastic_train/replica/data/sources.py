"""Finds what ``training.dataset`` and ``model.hf_assets_path`` name, and says what is wrong with it.

The command line checks a run with this before it starts a process, so nothing heavy is imported here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data.files import TEXT_COLUMN, read_json, read_text

Kind = Literal["stdlib", "torchtitan", "hub", "text", "json", "parquet"]

STDLIB = "stdlib"
# torchtitan's registry, repeated because importing it takes seconds: names, and the folders that they need.
TITAN_DATASETS = {"c4": "", "c4_test": "tests/assets/c4_test", "c4_validation": ""}

SUFFIXES: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
# An array has to be read whole to be checked: above this size that is left to the run.
_CHECKED_JSON_BYTES = 8 << 20


class DataError(Exception):
    """The data cannot be read on: a record has no text, the dataset changed, its source does not answer."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset that was found. ``kind`` says how it is read."""

    kind: Kind
    name: str
    """As the user wrote it."""

    path: str = ""
    """Another place for one of torchtitan's datasets; empty: its own."""

    files: tuple[Path, ...] = ()
    """Of the kinds text, json and parquet, in the order in which they are read."""


def find_source(dataset: str, dataset_path: str) -> Source:
    """Find the dataset that ``training.dataset`` names; looks at names, not into files.

    Raises:
        EnvironmentProblem: nothing is there that can be read.
    """
    if dataset.lower() in TITAN_DATASETS:
        return _find_titan(dataset, dataset_path)
    if dataset_path:
        raise EnvironmentProblem(
            f'training.dataset_path "{dataset_path}" is another place for {_listed(TITAN_DATASETS)}, and '
            f'training.dataset is "{dataset}": write the path into training.dataset'
        )
    if dataset == STDLIB:
        return Source(kind="stdlib", name=dataset)
    path = Path(dataset).expanduser()
    if dataset and path.exists():
        kind, files = _find_files(dataset, path)
        return Source(kind=kind, name=dataset, files=files)
    if _may_be_on_hub(dataset):
        return Source(kind="hub", name=dataset)
    raise EnvironmentProblem(_unknown(dataset))


def check_dataset(dataset: str, dataset_path: str) -> None:
    """Find the dataset and look at its first record. What is on the hub is not asked for.

    Raises:
        EnvironmentProblem: nothing is there that can be read, or it has no text.
    """
    source = find_source(dataset, dataset_path)
    if not source.files:
        return
    filled = [path for path in source.files if path.stat().st_size]
    if not filled:
        raise EnvironmentProblem(f'training.dataset "{dataset}" holds nothing: its files are empty')
    try:
        _check_first_record(source.kind, filled[0])
    except OSError as error:
        raise EnvironmentProblem(f"{filled[0]} cannot be read: {error.strerror or error}") from error


def check_tokenizer(hf_assets_path: str) -> None:
    """Look for a tokenizer in the folder; an empty path stands for the embedded one.

    Raises:
        EnvironmentProblem: the folder has none that can be read.
    """
    if not hf_assets_path:
        return
    folder = Path(hf_assets_path).expanduser()
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        model = folder.name if "llama" in folder.name.lower() else "Llama-3.1-8B"
        raise EnvironmentProblem(
            f'model.hf_assets_path "{hf_assets_path}" is no folder with a tokenizer.json: get one with "hf '
            f"download meta-llama/{model} tokenizer.json tokenizer_config.json --local-dir {hf_assets_path}"
            '", or set model.hf_assets_path = "" for the embedded tokenizer'
        )
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file() and not _opens_like_json(tokenizer):
        raise EnvironmentProblem(
            f"{tokenizer} is no JSON (perhaps only a Git LFS pointer): download the file itself, "
            'or set model.hf_assets_path = "" for the embedded tokenizer'
        )


def _find_titan(dataset: str, dataset_path: str) -> Source:
    place = dataset_path or TITAN_DATASETS[dataset.lower()]
    if place and not Path(place).expanduser().exists() and not (dataset_path and _may_be_on_hub(place)):
        raise EnvironmentProblem(
            f'training.dataset "{dataset}" is read from "{place}", which does not exist: '
            "set training.dataset_path to where it is, "
            f'or training.dataset = "{STDLIB}" for the embedded corpus'
        )
    return Source(kind="torchtitan", name=dataset.lower(), path=dataset_path)


def _find_files(dataset: str, path: Path) -> tuple[Kind, tuple[Path, ...]]:
    supported = ", ".join(SUFFIXES)
    if not path.is_dir():
        if path.suffix.lower() not in SUFFIXES:
            raise EnvironmentProblem(
                f'training.dataset "{dataset}" has a suffix that is not read: use a file in {supported}'
            )
        return SUFFIXES[path.suffix.lower()], (path,)
    found: dict[Kind, list[Path]] = {}
    for file in _walk(path):
        found.setdefault(SUFFIXES[file.suffix.lower()], []).append(file)
    if not found:
        raise EnvironmentProblem(
            f'training.dataset "{dataset}" is a folder without documents: put files in {supported} there'
        )
    if len(found) > 1:
        raise EnvironmentProblem(
            f'training.dataset "{dataset}" holds {_listed(found)} files: keep one kind in the folder, '
            "or name a folder or a file in it"
        )
    kind, files = found.popitem()
    return kind, tuple(files)


def _walk(folder: Path) -> Iterator[Path]:
    """The files of a folder that may hold documents, in an order that is the same on every machine."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for name in sorted(names):
            # A data folder's README tells people about the data and is none of it.
            if name.startswith((".", "_", "README")) or Path(name).suffix.lower() not in SUFFIXES:
                continue
            yield Path(place, name)


def _may_be_on_hub(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and Path(name).suffix.lower() not in SUFFIXES


def _unknown(dataset: str) -> str:
    if "/" in dataset or Path(dataset).suffix.lower() in SUFFIXES:
        return f'training.dataset "{dataset}" does not exist: check the path (relative to {Path.cwd()})'
    known = [STDLIB, *TITAN_DATASETS]
    near = difflib.get_close_matches(dataset, known, n=1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    return (
        f'training.dataset "{dataset}" is no dataset and no path{hint}: use {_listed(known)}, a path to a '
        'file or a folder, or a name on the Hugging Face hub like "org/name"'
    )


def _check_first_record(kind: Kind, path: Path) -> None:
    if kind == "text":
        next(read_text(path), None)
    elif kind == "json":
        if path.stat().st_size <= _CHECKED_JSON_BYTES or not _opens_like_array(path):
            next(read_json(path), None)
    else:
        _check_parquet(path)


def _check_parquet(path: Path) -> None:
    # Takes a quarter of a second, so only for who has such a file.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
    except pa.ArrowException as error:
        raise EnvironmentProblem(f"{path} is no parquet file that can be read: replace it") from error
    schema = metadata.schema.to_arrow_schema()
    if TEXT_COLUMN not in schema.names:
        raise EnvironmentProblem(
            f'{path} has no "{TEXT_COLUMN}" column but {_listed(schema.names)}: rename the one with the text'
        )
    if not _is_text(schema.field(TEXT_COLUMN).type):
        raise EnvironmentProblem(
            f'{path}: the "{TEXT_COLUMN}" column is no string but {schema.field(TEXT_COLUMN).type}'
        )
    if not metadata.num_rows:
        raise EnvironmentProblem(f"{path} holds no rows: remove it or fill it")


def _is_text(kind: object) -> bool:
    return str(kind) in {"string", "large_string", "string_view"}


def _opens_like_json(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def _opens_like_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
