"""Which samples each reader drew, one line for each, so that a run can be checked for having used each one once.

Readers write it only if ``training.dataloader.log_samples`` asks for it. A line is written before the sample is trained
on, so whatever is in the model is in the log; a sample that was lost and read again has a line for each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from elastic_train.events import LineFile

if TYPE_CHECKING:
    from elastic_train.replica.data.stream import Sample

FOLDER = "samples"
"""Of a run's folder; one file for each reader, which all its incarnations write to."""


class SampleLog:
    """Writes down what one incarnation of one reader draws.

    A line has: replica, incarnation, reader, shard, index (samples that were taken from the shard before this one,
    since the start of the run) and hash (``sample_hash``).
    """

    def __init__(self, run_dir: Path, *, replica: int, incarnation: int, reader: int) -> None:
        """Raises OSError if the run's folder cannot be written."""
        self._file = LineFile(run_dir / FOLDER / f"reader_{reader}.jsonl")
        self._who = {"replica": replica, "incarnation": incarnation, "reader": reader}

    def add(self, shard: int, index: int, sample: Sample) -> None:
        """A sample is about to be handed out."""
        self._file.append({**self._who, "shard": shard, "index": index, "hash": sample_hash(sample)})

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def sample_files(run_dir: Path) -> list[Path]:
    """The files of all readers of a run; none if its samples were not logged."""
    return sorted((run_dir / FOLDER).glob("reader_*.jsonl"))


def sample_hash(sample: Sample) -> str:
    """16 hexadecimal digits: xxh3 of the tokens that go in and of those that should come out."""
    inputs, labels = sample
    digest = xxhash.xxh3_64(inputs["input"].numpy().data)
    digest.update(labels.numpy().data)
    return digest.hexdigest()
