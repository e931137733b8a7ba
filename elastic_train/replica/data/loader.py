"""What a rank trains on: its part of a dataset, at a position that its peers can take over.

A dataset is cut into virtual shards, whose number is fixed, and each reader (a data-parallel rank of a
replica) owns some of them: always the same, in every incarnation, and besides them its part of what replicas leave
behind that are given up for good. Which sample comes next follows from the positions alone, so the positions are all
that has to survive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_train.replica.titan import fixes  # isort: skip  (must come before the rest of torchtitan)

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data.documents import open_documents
from elastic_train.replica.data.ownership import owners
from elastic_train.replica.data.position import PositionTable, ShardPosition
from elastic_train.replica.data.sample_log import SampleLog
from elastic_train.replica.data.sources import DataError, find_source
from elastic_train.replica.data.stream import Sample, ShardStream

__all__ = ["Batch", "DataError", "ElasticDataLoader", "PositionTable", "ShardPosition"]

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class ElasticDataLoader(BaseDataLoader):
    """Batches of one reader. Reads in the process that trains: no workers and nothing read ahead."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: str = "stdlib"
        """What to read: see ``training.dataset``."""

        infinite: bool = True
        """Whether to begin anew, in another order, when all documents were read."""

        virtual_shards: int = 64
        """Parts of the dataset, however many replicas read it."""

        pin_memory: bool = False
        """Whether batches lie in page-locked memory, from which an accelerator copies faster."""

        replica: int = 0
        """Which replica this is."""

        replicas: int = 1
        """How many replicas the run has."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Opens the dataset; ``snapshot_every_n_steps`` means nothing here, the positions are always at hand.

        Raises:
            EnvironmentProblem: the dataset cannot be read, or leaves this reader without a document.
            DataError: it is read over the network, which failed.
        """
        readers = config.replicas * dp_world_size
        if readers > config.virtual_shards:
            raise EnvironmentProblem(
                f"training.dataloader.virtual_shards is {config.virtual_shards}, and {readers} readers "
                f"(replicas x data-parallel ranks) need at least one each: set it to {readers} or more"
            )
        self._source = find_source(config.dataset, config.dataset_path or "")
        self._documents = open_documents(self._source, config.virtual_shards)
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._batch_size = local_batch_size
        self._infinite = config.infinite
        self._pin_memory = config.pin_memory and fixes.DEVICE.pins_memory
        self._slot = config.replica
        self._replicas = config.replicas
        self._ranks = dp_world_size
        self._reader = config.replica * dp_world_size + dp_rank
        self._retired: frozenset[int] = frozenset()
        self._owned = self._shards_without(self._retired)
        if not self._owned:
            raise self._nothing_to_read()
        self._streams: dict[int, ShardStream] = {}
        self._log: SampleLog | None = None
        self._committed = PositionTable.start(config.virtual_shards)
        self.restore(self._committed)

    @property
    def reader(self) -> int:
        """The number of this reader among those of all replicas."""
        return self._reader

    @property
    def committed(self) -> PositionTable:
        """The positions at the last committed sync."""
        return self._committed

    @property
    def retired(self) -> frozenset[int]:
        """Slots of the replicas that are given up for good."""
        return self._retired

    def positions(self) -> PositionTable:
        """Own shards where the next batch begins, the others as committed."""
        return self._committed.replace(self._own)

    def commit(self, table: PositionTable) -> None:
        """Take over the positions of a committed sync. Moves no shard: ``restore`` does.

        Raises:
            ValueError: the table has another number of virtual shards.
        """
        self._check(table)
        self._committed = table

    def restore(self, table: PositionTable) -> None:
        """Put own shards where the table has them; an iterator that is in use goes on from there.

        Raises:
            ValueError: the table has another number of virtual shards.
        """
        self._check(table)
        self._own = {shard: table[shard] for shard in self._owned}
        self._streams = {
            shard: stream for shard, stream in self._streams.items() if stream.position == self._own[shard]
        }
        self._unfinished = set(self._owned)

    def retire(self, slots: Collection[int]) -> None:
        """Read from now on also what falls to this reader of the shards of replicas that are given up for good.

        Such a shard begins where it is committed: what was read of it after that was lost with its reader. An iterator
        that is in use goes on with it too, unless it had come to the end of finite data. Slots add up over the calls.

        The table must hold what ``slots`` had a part in last: what an older one still shows as unread would be read
        twice. So call it once the last commit of theirs is taken over.

        Raises:
            ValueError: a slot is none of the run's, or this reader's own, or no slot would be left. Nothing changes.
        """
        retired = self._retired.union(slots)
        owned = self._shards_without(retired)
        if self._slot in retired:
            raise ValueError(f"replica {self._slot} is retired and others read its shards: it must end, not train on")
        # A reader that is not retired itself loses none of its shards.
        orphans = set(owned).difference(self._owned)
        self._own |= {shard: self._committed[shard] for shard in orphans}
        self._unfinished |= orphans
        self._owned = owned
        self._retired = retired

    def log_to(self, log: SampleLog) -> None:
        """Write down every sample that is drawn from now on."""
        self._log = log

    def state_dict(self) -> dict[str, Any]:
        return {"positions": self.positions().rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        table = PositionTable(state_dict["positions"])
        self.commit(table)
        self.restore(table)

    def __iter__(self) -> Iterator[Batch]:
        """Batches ``{"input": int64 [b, s], "positions": int64 [b, s]}`` and labels int64 ``[b, s]``.

        The last batch of finite data may have fewer rows.
        """
        while rows := self._draw_rows():
            yield self._collate(rows)

    def _draw_rows(self) -> list[Sample]:
        rows: list[Sample] = []
        while len(rows) < self._batch_size:
            row = self._draw()
            if row is None:
                break
            rows.append(row)
        return rows

    def _draw(self) -> Sample | None:
        """The next sample of the own shard that gave the fewest so far."""
        while self._unfinished:
            shard = min(self._unfinished, key=lambda shard: (self._own[shard].samples, shard))
            stream = self._stream(shard)
            sample = stream.draw()
            if sample is not None:
                if self._log is not None:
                    self._log.add(shard, self._own[shard].samples, sample)
                self._own[shard] = stream.position
                return sample
            self._unfinished.remove(shard)
        if self._infinite:
            raise self._nothing_to_read()
        return None

    def _stream(self, shard: int) -> ShardStream:
        if shard not in self._streams:
            self._streams[shard] = ShardStream(
                self._documents.shard(shard),
                self._tokenizer,
                seq_len=self._seq_len,
                infinite=self._infinite,
                start=self._own[shard],
            )
        return self._streams[shard]

    def _collate(self, rows: list[Sample]) -> Batch:
        inputs, labels = zip(*rows, strict=True)
        batch = {name: self._stack([row[name] for row in inputs]) for name in inputs[0]}
        return batch, self._stack(list(labels))

    def _stack(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(tensors)
        return stacked.pin_memory() if self._pin_memory else stacked

    def _shards_without(self, retired: frozenset[int]) -> list[int]:
        """The shards of this reader that have documents, when these slots are retired."""
        shards = owners(self._documents.virtual_shards, replicas=self._replicas, ranks=self._ranks, retired=retired)
        return [
            shard
            for shard, reader in enumerate(shards)
            if reader == self._reader and not self._documents.is_empty(shard)
        ]

    def _check(self, table: PositionTable) -> None:
        if len(table) != self._documents.virtual_shards:
            raise ValueError(
                f"positions of {len(table)} virtual shards, and training.dataloader.virtual_shards is "
                f"{self._documents.virtual_shards}: it must stay what it was when the run began"
            )

    def _nothing_to_read(self) -> EnvironmentProblem:
        count = self._documents.count
        held = "without text" if count is None else f"of {count} documents"
        shards = self._documents.virtual_shards
        return EnvironmentProblem(
            f'training.dataset "{self._source.name}" {held} in {shards} virtual shards leaves reader {self._reader} '
            f"of {self._replicas * self._ranks} with nothing to read: use more data, or fewer replicas"
        )
