"""The embedded corpus and its tokenizer: training data that is on every machine and needs no download.

The documents are the Python standard library's own sources, with a byte-level BPE tokenizer trained on them.
Both are built once per machine and Python version, in a few seconds, and opened in milliseconds from then on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data.files import TEXT_COLUMN, cut

logger = logging.getLogger(__name__)

# Part of the folder's name: raise it when what is built below changes.
FORMAT_VERSION = 1

CACHE_VARIABLE = "ELASTIC_TRAIN_CACHE"

VOCAB_SIZE = 2048
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"

# Tests and installed packages differ between installations of one version; the rest are tables, not code.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
_LEAST_CHARS = 200
# Shorter than documents elsewhere: there are few for many shards, and a restart re-tokenizes one of each.
_MOST_CHARS = 16_384
_BATCH = 64
# A build takes seconds; this bounds the wait for another process that builds.
_LOCK_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class CorpusPaths:
    """Where the embedded corpus lies."""

    documents: Path
    """An Arrow stream with one column, "text", for ``datasets.Dataset.from_file``."""

    tokenizer: Path
    """A folder that torchtitan's tokenizer reads."""


def cache_folder() -> Path:
    """``$ELASTIC_TRAIN_CACHE``, or the user's cache folder on this platform."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else platformdirs.user_cache_path("elastic_train")


def tokenizer_folder(hf_assets_path: str) -> Path:
    """Where the tokenizer lies that ``model.hf_assets_path`` stands for; empty: the embedded one."""
    return Path(hf_assets_path).expanduser() if hf_assets_path else ensure_corpus().tokenizer


def ensure_corpus() -> CorpusPaths:
    """Build the embedded corpus if this machine does not have it yet, and say where it is.

    Any number of processes may call this at once: one builds, the others wait. What a killed builder left is
    thrown away by the next.

    Raises:
        EnvironmentProblem: the cache folder cannot be written, or this Python comes without its sources.
    """
    cache = cache_folder()
    home = cache / f"stdlib-{platform.python_version()}-{FORMAT_VERSION}"
    # It appears by a rename, so if it is there it is whole; and a finished cache may be read-only.
    if not home.is_dir():
        try:
            _build_once(cache, home)
        except filelock.Timeout as error:
            raise EnvironmentProblem(
                f"another process has been building the embedded corpus in {cache} for "
                f"{_LOCK_TIMEOUT_S:.0f} s: end it, or set {CACHE_VARIABLE} to another folder"
            ) from error
        except OSError as error:
            raise EnvironmentProblem(
                f"the embedded corpus cannot be written to {cache} ({error.strerror or error}): "
                f"set {CACHE_VARIABLE} to a folder that can be written"
            ) from error
    return CorpusPaths(documents=home / "documents.arrow", tokenizer=home / "tokenizer")


def _build_once(cache: Path, home: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / f"{home.name}.lock", timeout=_LOCK_TIMEOUT_S):
        if home.is_dir():
            return
        unfinished = f".{home.name}."
        for left in cache.glob(f"{unfinished}*"):
            shutil.rmtree(left, ignore_errors=True)
        logger.info("building the embedded corpus in %s", home)
        work = Path(tempfile.mkdtemp(prefix=unfinished, dir=cache))
        try:
            _build(work)
            # mkdtemp lets only its owner in; a shared cache is read by others.
            work.chmod(0o755)
            work.rename(home)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _build(folder: Path) -> None:
    documents = _documents(Path(sysconfig.get_path("stdlib")))
    if not documents:
        raise EnvironmentProblem(
            "the embedded corpus is made of the standard library's sources, and this Python comes without "
            "them: set training.dataset and model.hf_assets_path"
        )
    _write_documents(documents, folder / "documents.arrow")
    _write_tokenizer(documents, folder / "tokenizer")
    for file in folder.rglob("*"):
        _flush(file)


def _documents(stdlib: Path) -> list[str]:
    """The sources in an order that mixes the packages, so that every shard gets some of everything."""
    found = []
    for name, path in _modules(stdlib):
        try:
            with path.open(encoding="utf-8") as lines:
                found += [(f"{name}:{part}", text) for part, text in enumerate(cut(lines, _MOST_CHARS))]
        except UnicodeDecodeError:
            continue
    found.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
    return [text for _, text in found if len(text) >= _LEAST_CHARS]


def _modules(stdlib: Path) -> Iterator[tuple[str, Path]]:
    for place, folders, names in os.walk(stdlib):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = Path(place, name)
                yield path.relative_to(stdlib).as_posix(), path


def _write_documents(documents: list[str], path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema([(TEXT_COLUMN, pa.string())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for start in range(0, len(documents), _BATCH):
            stream.write_batch(pa.record_batch([documents[start : start + _BATCH]], schema=schema))


def _write_tokenizer(documents: list[str], folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _flush(path: Path) -> None:
    """A machine that loses power after the rename must not come back with empty files behind it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
