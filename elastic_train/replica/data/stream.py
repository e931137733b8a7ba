"""Samples of one virtual shard, packed by torchtitan, from any position on.

torchtitan's dataset can only go on where it stopped with its buffers at hand. A position here is four
numbers; the buffers are rebuilt from it by tokenizing the document that it lies in once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

import torch
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from elastic_train.replica.data.documents import Shard
from elastic_train.replica.data.position import ShardPosition
from elastic_train.replica.data.sources import DataError

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]

_END_OF_EPOCH = None


class ShardStream:
    """Goes through a shard sample by sample and knows where the next one begins."""

    def __init__(
        self,
        shard: Shard,
        tokenizer: BaseTokenizer,
        *,
        seq_len: int,
        infinite: bool = True,
        start: ShardPosition = ShardPosition(),  # noqa: B008 - frozen
    ) -> None:
        """Nothing is read before the first ``draw``."""
        self._seq_len = seq_len
        self._position = start
        self._lengths = _Lengths(tokenizer, start.offset)
        self._samples: Iterator[Sample] = iter(_Packing(shard, self._lengths, seq_len, infinite, start))

    @property
    def position(self) -> ShardPosition:
        """Where the sample that the next ``draw`` gives begins."""
        return self._position

    def draw(self) -> Sample | None:
        """The next sample: ``{"input": int64 [seq_len], "positions": int64 [seq_len]}`` and its labels.

        Returns:
            None when no full sample is left: a finite stream is at its end, or no document has any token.

        Raises:
            DataError: a document cannot be read, or the shard is not the one that the position was taken in.
        """
        sample = next(self._samples, None)
        if sample is not None:
            self._position = self._lengths.advance(self._position, self._seq_len)
        return sample


class _Lengths(BaseTokenizer):
    """The tokenizer as torchtitan's packing calls it; remembers what each document adds to the buffers."""

    def __init__(self, tokenizer: BaseTokenizer, offset: int) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = offset
        self._held: deque[int | None] = deque()
        self._epoch_is_fruitful = False

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(*args, **kwargs)
        # Inputs and labels are the document without its last and without its first token.
        length = max(len(tokens) - 1, 0)
        if self._skip:
            if self._skip >= length:
                raise self._changed(f"in a document with {length} tokens")
            # Positions then count from the first token that is left. Packing normalizes them per sample, so
            # they come out as if the document had been read from its beginning.
            tokens, self._skip = tokens[self._skip :], 0
        self._held.append(length)
        self._epoch_is_fruitful = self._epoch_is_fruitful or length > 0
        return tokens

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return str(self._tokenizer.decode(*args, **kwargs))

    def get_vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def end_epoch(self) -> bool:
        """Note that all documents of an epoch were read; says whether they had any tokens."""
        if self._skip:
            raise self._changed("after the last document")
        fruitful, self._epoch_is_fruitful = self._epoch_is_fruitful, False
        self._held.append(_END_OF_EPOCH)
        return fruitful

    def advance(self, position: ShardPosition, tokens: int) -> ShardPosition:
        """The position ``tokens`` further, over documents that were read; forgets those that lie behind."""
        epoch, document, offset = position.epoch, position.document, position.offset + tokens
        while self._held:
            length = self._held[0]
            if length is _END_OF_EPOCH:
                epoch, document = epoch + 1, 0
            elif length <= offset:
                document, offset = document + 1, offset - length
            else:
                break
            self._held.popleft()
        return ShardPosition(epoch, document, offset, position.samples + 1)

    def _changed(self, where: str) -> DataError:
        return DataError(
            f"the data position is {self._skip} tokens {where}: "
            "the dataset or the tokenizer is not the one that the run began with"
        )


class _Packing(HuggingFaceTextDataset):
    """torchtitan's packing over the documents of a shard."""

    def __init__(self, shard: Shard, tokenizer: _Lengths, seq_len: int, infinite: bool, start: ShardPosition) -> None:
        # Not torchtitan's constructor, which opens the dataset: a reader has many streams over one dataset.
        self.dataset_name = "virtual shard"
        self._shard = shard
        self._tokenizer = tokenizer
        self.seq_len = seq_len
        self.infinite = infinite
        self._text_processor = str
        self._epoch = start.epoch
        self._sample_idx = start.document
        # What lies before the start had tokens.
        self._began_inside = start.document > 0
        self._inputs_buffer: list[int] = []
        self._labels_buffer: list[int] = []
        self._positions_buffer: list[int] = []

    def _get_data_iter(self) -> Iterator[str]:
        return self._shard.texts(self._epoch, self._sample_idx)

    def reloop(self) -> None:
        fruitful = self._tokenizer.end_epoch() or self._began_inside
        self._began_inside = False
        # An endless stream over nothing would look for a token for ever.
        self.infinite = fruitful
        self._sample_idx = 0
        self._epoch += 1
