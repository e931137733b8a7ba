"""The folders of durable snapshots: complete or not there at all, and whoever reads one can tell that it is whole.

A snapshot is written into a staging folder beside its place. What it holds is listed last, with sizes and checksums,
then the folder is renamed. Nothing here knows what the files mean.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "MANIFEST.json"

_STEP_FOLDER = re.compile(r"step-(\d+)")
_PIECE = 1 << 24
_READERS = 4


class Damaged(ValueError):
    """A snapshot is not as it was written; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What can be said of a snapshot without reading its tensors."""

    step: int
    """Nominal inner step."""
    outer_step: int
    state_hash: str
    """Of the outer state over all ranks of the replica that wrote it, as in ``sync_committed``."""
    whole: bool
    """Whether a run can go on from it; else it holds the parameters alone."""
    origin: Mapping[str, Any]
    """Keys of the config of the run that wrote it, without which the numbers mean nothing (``origin``)."""


@dataclass(frozen=True, kw_only=True)
class DurableSnapshot:
    """A snapshot in its place."""

    path: Path
    facts: Facts


def staging_folder(folder: Path, slot: int, incarnation: int) -> Path:
    """Where an incarnation writes a snapshot that belongs below ``folder``: nobody else writes there."""
    return folder / f"{_staging_prefix(slot)}{incarnation}"


def clear_stagings(folder: Path, slot: int) -> None:
    """Remove what this and earlier incarnations of a slot left half written."""
    for path in folder.glob(f"{_staging_prefix(slot)}*"):
        shutil.rmtree(path, ignore_errors=True)


def finish(staging: Path, facts: Facts, *, keep: int) -> DurableSnapshot:
    """List what lies in ``staging``, and put it in its place beside it. One of the same step that is there stays, if
    it is sound.

    Args:
        keep: how many snapshots that a run can go on from stay, the newest; 0: all.

    Raises:
        OSError: the disk is full, or fails.
    """
    files = sorted(path.name for path in staging.iterdir())
    content = {"facts": dataclasses.asdict(facts), "files": _measured(staging, files)}
    with (staging / MANIFEST).open("w") as file:
        json.dump({**content, "checksum": _checksum_of(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(staging)
    target = staging.parent / f"step-{facts.step}"
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        if _is_sound(target):
            shutil.rmtree(staging)
        else:
            damaged = target.rename(staging.with_name(f"{staging.name}.damaged"))
            staging.rename(target)
            shutil.rmtree(damaged)
    _sync(target.parent)
    if keep:
        _prune(target.parent, keep)
    return DurableSnapshot(path=target, facts=facts)


def check(path: Path) -> DurableSnapshot:
    """Read every byte of a snapshot, and say what it is.

    Raises:
        Damaged: something of it is missing or differs from what was written.
    """
    facts, files = _manifest(path)
    for name, wanted in files.items():
        try:
            # Far sooner seen than a wrong checksum.
            size = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(f"{path / name} cannot be read: {error.strerror}") from error
        if size != wanted["size"]:
            raise Damaged(f"{path / name} has {size} bytes, not {wanted['size']}")
    try:
        found = _measured(path, files)
    except OSError as error:
        raise Damaged(f"{error.filename or path} cannot be read: {error.strerror}") from error
    for name, wanted in files.items():
        if found[name] != wanted:
            raise Damaged(f"{path / name} is not as it was written")
    return DurableSnapshot(path=path, facts=facts)


def newest_sound(folder: Path) -> tuple[DurableSnapshot | None, list[str]]:
    """The newest snapshot below ``folder`` that a run can go on from, and why newer ones were passed over."""
    passed: list[str] = []
    return next(sound(folder, passed), None), passed


def sound(folder: Path, passed: list[str]) -> Iterator[DurableSnapshot]:
    """The snapshots below ``folder`` that a run can go on from, the newest first; each is read when its turn comes.

    Args:
        passed: why others were passed over is added to it.
    """
    for path in _snapshots(folder):
        try:
            found = check(path)
        except Damaged as damaged:
            passed.append(f"the snapshot {path.name} was passed over: {damaged}")
            continue
        if found.facts.whole:
            yield found
        else:
            passed.append(f"the snapshot {path.name} was passed over: it holds the parameters alone")


def _prune(folder: Path, keep: int) -> None:
    """Remove what is older than the newest ``keep`` snapshots that a run can go on from."""
    for path in _snapshots(folder):
        if keep <= 0:
            shutil.rmtree(path, ignore_errors=True)
        elif _is_whole(path):
            keep -= 1


def _is_sound(path: Path) -> bool:
    try:
        check(path)
    except Damaged:
        return False
    return True


def _is_whole(path: Path) -> bool:
    try:
        return _manifest(path)[0].whole
    except Damaged:
        return False


def _manifest(path: Path) -> tuple[Facts, dict[str, dict[str, Any]]]:
    """What a snapshot says of itself, and of its files.

    Raises:
        Damaged: it does not, or not as it was written.
    """
    try:
        content = json.loads((path / MANIFEST).read_text())
        if content.pop("checksum") != _checksum_of(content):
            raise Damaged(f"{path / MANIFEST} is not as it was written")
        return Facts(**content["facts"]), content["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path / MANIFEST} cannot be read: {error}") from error


def _snapshots(folder: Path) -> list[Path]:
    """The newest first."""
    if not folder.is_dir():
        return []
    steps = {int(match[1]): path for path in folder.iterdir() if (match := _STEP_FOLDER.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def _staging_prefix(slot: int) -> str:
    return f".writing-replica_{slot}-"


def _measured(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files, several at a time."""
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(lambda name: _measure(folder / name), names), strict=True))


def _measure(path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return {"size": size, "xxh3": digest.hexdigest()}


def _checksum_of(content: Any) -> str:
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Make what was created or renamed in a folder outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
