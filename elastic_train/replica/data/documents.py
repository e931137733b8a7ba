"""Opens a dataset with ``datasets`` and cuts it into virtual shards that can be read from any document on."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

import datasets
from datasets.distributed import split_dataset_by_node
from datasets.exceptions import DatasetNotFoundError
from torchtitan.hf_datasets.text_datasets import DATASETS

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data.corpus import ensure_corpus
from elastic_train.replica.data.files import DOCUMENT_CHARS, TEXT_COLUMN, read_json, read_text
from elastic_train.replica.data.sources import DataError, Source

logger = logging.getLogger(__name__)

# torchtitan's: the epochs of a shard come in the order that its own loader gives them.
_SHUFFLE_SEED = 42

Record = dict[str, Any]
AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset


class Shard(ABC):
    """The documents of one virtual shard: the same in every epoch, if in another order."""

    @abstractmethod
    def texts(self, epoch: int, first: int) -> Iterator[str]:
        """The texts of an epoch, in its order, from document ``first`` on.

        Raises:
            DataError: the shard has fewer documents, or one cannot be read.
        """


class _StoredShard(Shard):
    """A contiguous part of a dataset that lies on this machine; shuffled from the second epoch on."""

    def __init__(self, data: datasets.Dataset, text: Callable[[Record], str]) -> None:
        self._data = data
        self._text = text

    def texts(self, epoch: int, first: int) -> Iterator[str]:
        if first > len(self._data):
            raise DataError(
                f"the data position is document {first} of a shard with {len(self._data)} documents: "
                "the dataset is not the one that the run began with"
            )
        # In memory: a cache file per shard and epoch would be left beside the dataset otherwise.
        data = self._data.shuffle(seed=_SHUFFLE_SEED + epoch, keep_in_memory=True) if epoch else self._data
        if first < len(data):
            for record in data.skip(first):
                yield self._text(record)


class _StreamedShard(Shard):
    """A part of a dataset that is read while it is used. To reach a document, those before it are read."""

    def __init__(self, data: datasets.IterableDataset, text: Callable[[Record], str], index: int, step: int) -> None:
        self._data = data
        self._text = text
        self._index = index
        self._step = step

    def texts(self, epoch: int, first: int) -> Iterator[str]:
        if self._step == 1:
            # For a dataset that was shuffled, files come in another order. A shard that has no files of its own would
            # hold other documents then.
            self._data.set_epoch(epoch)
        records = islice(self._data, self._index + first * self._step, None, self._step)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"the dataset cannot be read on: {_reason(error)}") from error
            yield self._text(record)


class Documents:
    """A dataset in ``virtual_shards`` parts. The parts do not depend on how many replicas read them."""

    def __init__(
        self,
        data: AnyDataset,
        virtual_shards: int,
        text: Callable[[Record], str] | None = None,
    ) -> None:
        """``text`` gives a record's text; by default its "text" field, where null is empty."""
        self.virtual_shards = virtual_shards
        self._data = data
        self._text = text or _text_of
        if isinstance(data, datasets.IterableDataset) and data.num_shards < virtual_shards:
            logger.warning(
                "the dataset is streamed from %d files, fewer than the %d virtual shards, so every shard "
                "reads all of it: set training.dataloader.virtual_shards to at most the number of files",
                data.num_shards,
                virtual_shards,
            )

    @property
    def count(self) -> int | None:
        """The number of documents; None where only reading them all would tell."""
        return len(self._data) if isinstance(self._data, datasets.Dataset) else None

    def is_empty(self, index: int) -> bool:
        """Whether the shard is known to have no document."""
        return self.count is not None and index >= self.count

    def shard(self, index: int) -> Shard:
        """Open one virtual shard, ``0 <= index < virtual_shards``."""
        if self.is_empty(index):
            return _StoredShard(self._data.select([]), self._text)
        if isinstance(self._data, datasets.Dataset):
            return _StoredShard(split_dataset_by_node(self._data, index, self.virtual_shards), self._text)
        if self._data.num_shards >= self.virtual_shards:
            files = self._data.shard(self.virtual_shards, index, contiguous=False)
            return _StreamedShard(files, self._text, 0, 1)
        return _StreamedShard(self._data, self._text, index, self.virtual_shards)


def open_documents(source: Source, virtual_shards: int) -> Documents:
    """Open the dataset. What ``datasets`` converts stays in its cache (``HF_HOME``) and then opens at once.

    Raises:
        EnvironmentProblem: it cannot be read, or has no documents.
        DataError: it is read over the network, which failed.
    """
    try:
        data, text = _open(source)
    except (EnvironmentProblem, DataError):
        raise
    except Exception as error:
        raise _explained(source, error) from error
    if isinstance(data, datasets.Dataset) and not len(data):
        raise EnvironmentProblem(f'training.dataset "{source.name}" holds no documents')
    if text is None:
        _check_column(source, data)
    return Documents(data, virtual_shards, text)


def file_texts(files: list[tuple[str, int, int]], kind: str, limit: int) -> Iterator[Record]:
    """The records of local files, given with size and time: ``datasets`` names its cache by the arguments."""
    empty = True
    for name, _, _ in files:
        path = Path(name)
        for text in read_json(path) if kind == "json" else read_text(path, limit):
            empty = False
            yield {TEXT_COLUMN: text}
    if empty:
        raise EnvironmentProblem(f"no documents in {', '.join(name for name, _, _ in files)}: add some")


def _open(source: Source) -> tuple[AnyDataset, Callable[[Record], str] | None]:
    datasets.disable_progress_bars()
    match source.kind:
        case "stdlib":
            return datasets.Dataset.from_file(str(ensure_corpus().documents)), None
        case "text" | "json":
            stats = [(path.resolve(), path.stat()) for path in source.files]
            arguments = {
                "files": [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats],
                "kind": source.kind,
                "limit": DOCUMENT_CHARS,
            }
            features = datasets.Features({TEXT_COLUMN: datasets.Value("string")})
            return datasets.Dataset.from_generator(file_texts, features=features, gen_kwargs=arguments), None
        case "parquet":
            files = [str(path.resolve()) for path in source.files]
            columns = [TEXT_COLUMN]
            return datasets.load_dataset("parquet", data_files=files, split="train", columns=columns), None
        case "torchtitan":
            entry = DATASETS[source.name]
            return entry.loader(source.path or entry.path), entry.sample_processor
        case "hub":
            return datasets.load_dataset(source.name, split="train", streaming=True), None


def _explained(source: Source, error: Exception) -> Exception:
    """The one line that a person needs, out of what ``datasets`` raised."""
    cause = _root(error)
    if isinstance(cause, EnvironmentProblem):
        return cause
    reason = _reason(error)
    if isinstance(error, DatasetNotFoundError):
        return EnvironmentProblem(
            f'training.dataset "{source.name}" is neither a path nor a dataset that the hub has for you: '
            "check the name, and log in (hf auth login) if it is gated"
        )
    if source.kind in ("hub", "torchtitan") and not isinstance(error, ValueError):
        return DataError(f'training.dataset "{source.name}" cannot be reached: {reason}')
    return EnvironmentProblem(f'training.dataset "{source.name}" cannot be read: {reason}')


def _check_column(source: Source, data: AnyDataset) -> None:
    if data.column_names is not None and TEXT_COLUMN not in data.column_names:
        raise EnvironmentProblem(
            f'training.dataset "{source.name}" has no "{TEXT_COLUMN}" column but '
            f"{', '.join(data.column_names)}: use a dataset with one"
        )


def _text_of(record: Record) -> str:
    text = record.get(TEXT_COLUMN, record)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f'a record has no text in its "{TEXT_COLUMN}" field: {str(record)[:200]}')
    return text


def _root(error: BaseException) -> BaseException:
    # datasets wraps what happened in an exception that only says that something did.
    while error.__cause__ is not None and not isinstance(error, EnvironmentProblem):
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    root = _root(error)
    return (str(root).strip() or type(root).__name__).splitlines()[0]
