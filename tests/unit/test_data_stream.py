import random
from collections.abc import Iterator
from itertools import islice

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from elastic_train.replica.data.documents import Documents, Shard
from elastic_train.replica.data.position import ShardPosition
from elastic_train.replica.data.sources import DataError
from elastic_train.replica.data.stream import Sample, ShardStream, _Lengths, _Packing

BOS, EOS = 0, 1


class CharTokenizer(BaseTokenizer):
    """A token for each character, between the tokens that a tokenizer may or may not have."""

    def __init__(self, has_bos: bool = True, has_eos: bool = True) -> None:
        super().__init__()
        self.has_bos = has_bos
        self.has_eos = has_eos

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        before = [BOS] if add_bos and self.has_bos else []
        after = [EOS] if add_eos and self.has_eos else []
        return before + [ord(char) for char in text] + after

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token) for token in tokens)

    def get_vocab_size(self) -> int:
        return 0x110000


class ListShard(Shard):
    """Documents at hand, in another order in every epoch."""

    def __init__(self, documents: list[str]) -> None:
        self.documents = documents

    def texts(self, epoch: int, first: int) -> Iterator[str]:
        yield from random.Random(epoch).sample(self.documents, len(self.documents))[first:]


DOCUMENTS = st.lists(st.text(alphabet="abcdef", max_size=30), min_size=1, max_size=6)
TOKENIZERS = st.builds(CharTokenizer, st.booleans(), st.booleans())


def plain(sample: Sample) -> list[list[int]]:
    inputs, labels = sample
    return [inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist()]


def titan_samples(
    data: datasets.Dataset, shard: int, shards: int, tokenizer: BaseTokenizer, seq_len: int
) -> Iterator[Sample]:
    """The samples of torchtitan's own dataset for a rank of that many."""
    with pytest.MonkeyPatch.context() as patch:
        entry = DatasetConfig(path="", loader=lambda _: data, sample_processor=lambda record: record["text"])
        patch.setitem(DATASETS, "test", entry)
        return iter(HuggingFaceTextDataset("test", "", tokenizer, seq_len, shard, shards, infinite=True))


@pytest.mark.parametrize("shard", range(3))
def test_samples_are_those_of_torchtitan_over_epochs(shard: int) -> None:
    generator = random.Random(shard)
    texts = ["".join(generator.choices("abcdefgh", k=generator.randrange(60))) for _ in range(20)]
    data = datasets.Dataset.from_dict({"text": texts})
    tokenizer = CharTokenizer()
    stream = ShardStream(Documents(data, 3).shard(shard), tokenizer, seq_len=16)

    for expected in islice(titan_samples(data, shard, 3, tokenizer, 16), 60):
        sample = stream.draw()
        assert sample is not None
        assert plain(sample) == plain(expected)
    assert stream.position.epoch >= 3


@given(documents=DOCUMENTS, tokenizer=TOKENIZERS, seq_len=st.integers(1, 20), infinite=st.booleans())
def test_resumes_from_every_position_as_if_never_interrupted(
    documents: list[str], tokenizer: CharTokenizer, seq_len: int, infinite: bool
) -> None:
    def open_at(start: ShardPosition) -> ShardStream:
        return ShardStream(ListShard(documents), tokenizer, seq_len=seq_len, infinite=infinite, start=start)

    def follow(stream: ShardStream, count: int) -> list[tuple[ShardPosition, list[list[int]] | None]]:
        drawn = []
        for _ in range(count):
            sample = stream.draw()
            drawn.append((stream.position, sample and plain(sample)))
        return drawn

    start = ShardPosition()
    whole = follow(open_at(start), 12)
    for index, position in enumerate([start, *(position for position, _ in whole[:-1])]):
        assert follow(open_at(position), 12 - index) == whole[index:]


@given(documents=DOCUMENTS, tokenizer=TOKENIZERS, seq_len=st.integers(1, 20))
def test_a_position_is_where_the_next_sample_begins(
    documents: list[str], tokenizer: CharTokenizer, seq_len: int
) -> None:
    shard = ListShard(documents)
    stream = ShardStream(shard, tokenizer, seq_len=seq_len)

    for taken in range(12):
        position = stream.position
        sample = stream.draw()
        if sample is None:
            assert taken == 0
            return
        assert position.samples == taken
        ahead = shard.texts(position.epoch, position.document)
        text = next(ahead, None)
        if text is not None and len(tokens := tokenizer.encode(text, add_bos=True, add_eos=True)) > 1:
            inputs = sample[0]["input"].tolist()
            expected = tokens[:-1][position.offset :][:seq_len]
            assert expected
            assert inputs[: len(expected)] == expected


@given(documents=DOCUMENTS, seq_len=st.integers(1, 20))
def test_epochs_hold_every_token_once(documents: list[str], seq_len: int) -> None:
    stream = ShardStream(ListShard(documents), CharTokenizer(), seq_len=seq_len)
    per_epoch = sum(len(document) + 1 for document in documents)
    tokens: list[int] = []
    while len(tokens) < 2 * per_epoch:
        sample = stream.draw()
        assert sample is not None
        tokens += sample[0]["input"].tolist()

    expected = sorted([BOS] * len(documents) + [ord(char) for char in "".join(documents)])
    assert sorted(tokens[:per_epoch]) == expected
    assert sorted(tokens[per_epoch : 2 * per_epoch]) == expected


def test_finite_stream_ends_before_the_sample_that_would_not_be_full() -> None:
    stream = ShardStream(ListShard(["abcdefgh"]), CharTokenizer(), seq_len=4, infinite=False)

    assert [stream.draw() is not None for _ in range(4)] == [True, True, False, False]
    assert stream.position == ShardPosition(epoch=0, document=0, offset=8, samples=2)


@pytest.mark.parametrize("documents", [[], [""], ["", "a"]])
def test_endless_stream_over_nothing_ends(documents: list[str]) -> None:
    stream = ShardStream(ListShard(documents), CharTokenizer(has_bos=False, has_eos=False), seq_len=4)

    assert stream.draw() is None


@pytest.mark.parametrize("start", [ShardPosition(0, 0, 99, 1), ShardPosition(0, 1, 9, 1), ShardPosition(0, 2, 1, 1)])
def test_position_of_another_dataset_is_refused(start: ShardPosition) -> None:
    stream = ShardStream(ListShard(["abcdefgh", "abcdefgh"]), CharTokenizer(), seq_len=4, start=start)

    with pytest.raises(DataError, match="not the one that the run began with"):
        stream.draw()


def test_packing_has_the_state_that_torchtitan_works_on() -> None:
    """The constructor of torchtitan's dataset is not called, so what it sets is set here."""
    data = datasets.Dataset.from_dict({"text": ["abc"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "test", DatasetConfig(path="", loader=lambda _: data, sample_processor=str))
        theirs = HuggingFaceTextDataset("test", "", CharTokenizer(), 4)
    ours = _Packing(ListShard(["abc"]), _Lengths(CharTokenizer(), 0), 4, True, ShardPosition())

    assert vars(theirs).keys() - vars(ours).keys() == {"_data", "_original_data"}


def test_samples_are_int64() -> None:
    sample = ShardStream(ListShard(["abc"]), CharTokenizer(), seq_len=4).draw()

    assert sample is not None
    inputs, labels = sample
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {torch.int64}
    assert {tensor.shape for tensor in (*inputs.values(), labels)} == {torch.Size([4])}
