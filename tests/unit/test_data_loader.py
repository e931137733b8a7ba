from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

import datasets
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from elastic_train.config import EnvironmentProblem
from elastic_train.events import read_all
from elastic_train.replica.data.documents import Documents
from elastic_train.replica.data.loader import ElasticDataLoader, PositionTable, ShardPosition
from elastic_train.replica.data.sample_log import SampleLog, sample_files, sample_hash

SHARDS = 8
FIRST = ord("A")
BOS, EOS = 0, 1


class CharTokenizer(BaseTokenizer):
    """A token for each character, between a first and a last one."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [BOS] * add_bos + [ord(char) for char in text] + [EOS] * add_eos

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens)

    def get_vocab_size(self) -> int:
        return 0x110000


@contextmanager
def reading(texts: list[str]) -> Iterator[None]:
    """Every loader that is made meanwhile reads these documents."""

    def open_documents(_: object, virtual_shards: int) -> Documents:
        return Documents(datasets.Dataset.from_dict({"text": texts}), virtual_shards)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elastic_train.replica.data.loader.open_documents", open_documents)
        yield


@pytest.fixture
def dataset() -> Iterator[list[str]]:
    """The documents behind every loader of the test; each has a letter of its own, three times."""
    texts = [chr(FIRST + number) * 3 for number in range(21)]
    with reading(texts):
        yield texts


def make(
    dp_rank: int = 0, dp_world_size: int = 1, seq_len: int = 5, batch: int = 2, **settings: Any
) -> ElasticDataLoader:
    settings = {"virtual_shards": SHARDS, **settings}
    loader: ElasticDataLoader = ElasticDataLoader.Config(**settings).build(
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        tokenizer=CharTokenizer(),
        seq_len=seq_len,
        local_batch_size=batch,
        snapshot_every_n_steps=None,
    )
    return loader


def make_all(replicas: int, dp_world_size: int, **settings: Any) -> list[ElasticDataLoader]:
    return [
        make(dp_rank, dp_world_size, replica=replica, replicas=replicas, **settings)
        for replica in range(replicas)
        for dp_rank in range(dp_world_size)
    ]


def sync(loaders: list[ElasticDataLoader]) -> PositionTable:
    """What a committed sync does to the positions."""
    total = sum(loader.positions().delta(loader.committed) for loader in loaders)
    assert isinstance(total, torch.Tensor)
    table = loaders[0].committed.plus(total)
    for loader in loaders:
        loader.commit(table)
    return table


def tokens_of(batches: list[Any]) -> list[int]:
    return [token for inputs, _ in batches for token in inputs["input"].flatten().tolist()]


def equal(one: Any, other: Any) -> bool:
    return one[0].keys() == other[0].keys() and all(
        torch.equal(mine, yours)
        for mine, yours in zip([*one[0].values(), one[1]], [*other[0].values(), other[1]], strict=True)
    )


def test_is_a_dataloader_of_torchtitan(dataset: list[str]) -> None:
    loader = make(seq_len=4, batch=3)
    inputs, labels = next(iter(loader))

    assert isinstance(loader, BaseDataLoader)
    assert inputs.keys() == {"input", "positions"}
    assert inputs["input"][0].tolist() == [BOS, FIRST, FIRST, FIRST]
    assert inputs["positions"][0].tolist() == [0, 1, 2, 3]
    assert labels[0].tolist() == [FIRST, FIRST, FIRST, EOS]
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {torch.int64}
    assert {tuple(tensor.shape) for tensor in (*inputs.values(), labels)} == {(3, 4)}


@pytest.mark.parametrize(("replicas", "dp_world_size"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_all_readers_together_read_every_document_once(dataset: list[str], replicas: int, dp_world_size: int) -> None:
    loaders = make_all(replicas, dp_world_size, seq_len=1, infinite=False)
    counts = Counter(token for loader in loaders for token in tokens_of(list(loader)))

    assert counts == {BOS: len(dataset), **{ord(text[0]): 3 for text in dataset}}


@pytest.mark.parametrize("steps", [0, 3, 7])
def test_other_readers_go_on_from_the_committed_positions(dataset: list[str], steps: int) -> None:
    few = make_all(2, 1, seq_len=1, infinite=False)
    batches = [batch for loader in few for _, batch in zip(range(steps), loader, strict=False)]
    table = sync(few)

    many = make_all(3, 2, seq_len=1, infinite=False)
    for loader in many:
        loader.commit(table)
        loader.restore(table)
        batches += list(loader)

    assert Counter(tokens_of(batches)) == {BOS: len(dataset), **{ord(text[0]): 3 for text in dataset}}


def test_rows_come_from_the_shard_that_gave_the_fewest(dataset: list[str]) -> None:
    loader = make(dp_rank=1, dp_world_size=2, batch=3)
    batches = iter(loader)
    samples = []
    for _ in range(3):
        next(batches)
        samples.append([row[3] for row in loader.positions().to_list()])

    assert samples == [
        [0, 1, 0, 1, 0, 1, 0, 0],
        [0, 2, 0, 2, 0, 1, 0, 1],
        [0, 3, 0, 2, 0, 2, 0, 2],
    ]


def test_positions_of_others_are_those_of_the_last_commit(dataset: list[str]) -> None:
    mine, other = make_all(2, 1)
    next(iter(mine))
    next(iter(other))
    assert mine.committed == PositionTable.start(SHARDS)
    assert mine.positions()[1] == ShardPosition()

    table = sync([mine, other])

    assert mine.committed == table
    assert mine.positions() == other.positions() == table
    assert [row[3] for row in table.to_list()] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_running_iterator_follows_a_restore(dataset: list[str]) -> None:
    loader = make()
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]
    kept = loader.positions()
    expected = [next(batches) for _ in range(20)]

    loader.restore(kept)
    again = [next(batches) for _ in range(20)]
    assert all(map(equal, again, expected))

    loader.restore(PositionTable.start(SHARDS))
    assert all(map(equal, [next(batches) for _ in range(2)], first))
    assert loader.positions() == kept


def test_restore_of_the_present_positions_changes_nothing(dataset: list[str]) -> None:
    one, other = make(), make()
    batches, expected = iter(one), iter(other)
    for _ in range(30):
        assert equal(next(batches), next(expected))
        one.restore(one.positions())


def test_commit_moves_nothing(dataset: list[str]) -> None:
    one, other = make(), make()
    batches, expected = iter(one), iter(other)
    for _ in range(5):
        assert equal(next(batches), next(expected))
        one.commit(PositionTable.start(SHARDS))


def test_new_loader_goes_on_from_a_state(dataset: list[str]) -> None:
    old = make()
    batches = iter(old)
    for _ in range(30):
        next(batches)
    new = make()
    new.load_state_dict(old.state_dict())

    assert new.committed == new.positions() == old.positions()
    for batch, _ in zip(new, range(30), strict=False):
        assert equal(batch, next(batches))


def test_end_of_finite_data_may_leave_a_smaller_batch(dataset: list[str]) -> None:
    loader = make(seq_len=4, batch=4, infinite=False)
    sizes = [len(labels) for _, labels in loader]

    assert sizes == [4, 4, 4, 4, 4, 1]
    assert not list(loader)


def test_finite_data_can_be_read_again_after_a_restore(dataset: list[str]) -> None:
    loader = make(seq_len=1, infinite=False)
    first = tokens_of(list(loader))

    loader.restore(PositionTable.start(SHARDS))

    assert tokens_of(list(loader)) == first


def test_shards_without_documents_are_passed_over(dataset: list[str]) -> None:
    del dataset[3:]
    loader = make(seq_len=4, batch=3)
    inputs, _ = next(iter(loader))

    assert inputs["input"][:, 1].tolist() == [FIRST, FIRST + 1, FIRST + 2]


def test_reader_without_a_document_is_told_at_once(dataset: list[str]) -> None:
    del dataset[3:]

    with pytest.raises(EnvironmentProblem, match="of 3 documents in 8 virtual shards leaves reader 3 of 4"):
        make(dp_rank=1, dp_world_size=2, replica=1, replicas=2)


def test_documents_without_text_are_an_error_not_an_endless_search(
    dataset: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CharTokenizer, "encode", lambda *_, **__: [])

    with pytest.raises(EnvironmentProblem, match="nothing to read"):
        next(iter(make()))


def test_more_readers_than_shards() -> None:
    with pytest.raises(EnvironmentProblem, match=r"virtual_shards is 8, and 12 readers.*set it to 12 or more"):
        make(dp_world_size=4, replicas=3)


def test_table_of_another_dataset_is_refused(dataset: list[str]) -> None:
    loader = make()

    for take in (loader.commit, loader.restore):
        with pytest.raises(ValueError, match="positions of 9 virtual shards"):
            take(PositionTable.start(SHARDS + 1))


def test_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "huggingface")
    (tmp_path / "a.txt").write_text("abc")
    inputs, _ = next(iter(make(seq_len=4, batch=1, dataset=str(tmp_path / "a.txt"))))

    assert inputs["input"].tolist() == [[BOS, *b"abc"]]


def samples_of(texts: list[str]) -> list[list[int]]:
    """Of each shard the samples of an epoch, by their first label: all differ, if all characters do.

    For documents of an odd length in samples of two tokens, so that none reaches into the next document.
    """
    size, more = divmod(len(texts), SHARDS)
    starts = [shard * size + min(shard, more) for shard in range(SHARDS + 1)]
    return [[ord(char) for text in texts[start:stop] for char in text[::2]] for start, stop in pairwise(starts)]


class Reader:
    """A loader, and what it read since the last commit."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self.loader = loader
        self.read: list[int] = []
        self._batches = iter(loader)

    def draw(self, batches: int) -> None:
        for _ in range(batches):
            if (batch := next(self._batches, None)) is None:
                # It has ended; there may be more to read after a retirement.
                self._batches = iter(self.loader)
                return
            self.read += [label[0] for label in batch[1].tolist()]


def commit(readers: list[Reader], passed: bool) -> list[int]:
    """A sync of these readers; the samples that it commits, all that they read if it passed."""
    read = [sample for reader in readers for sample in reader.read]
    if passed:
        moved = [
            reader.loader.positions().delta(reader.loader.committed).any(dim=1).nonzero().flatten().tolist()
            for reader in readers
        ]
        assert max(Counter(chain.from_iterable(moved)).values(), default=1) == 1, "two readers moved one shard"
        sync([reader.loader for reader in readers])
    else:
        for reader in readers:
            reader.loader.restore(reader.loader.committed)
    for reader in readers:
        reader.read.clear()
    return read if passed else []


# Not shrunk: each example opens many datasets, so it would take minutes.
@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), replicas=st.integers(2, 4), ranks=st.integers(1, 2), documents=st.integers(SHARDS, 20))
@pytest.mark.parametrize("infinite", [False, True])
def test_every_sample_is_committed_once_over_retirements(
    infinite: bool, data: st.DataObject, replicas: int, ranks: int, documents: int
) -> None:
    texts = ["".join(chr(FIRST + 3 * number + char) for char in range(3)) for number in range(documents)]
    with reading(texts):
        slots = {
            slot: [
                Reader(make(rank, ranks, seq_len=2, replica=slot, replicas=replicas, infinite=infinite))
                for rank in range(ranks)
            ]
            for slot in range(replicas)
        }
        dead: set[int] = set()
        committed: list[int] = []
        for _ in range(data.draw(st.integers(1, 6), "syncs")):
            living = [reader for readers in slots.values() for reader in readers]
            for reader in living:
                reader.draw(data.draw(st.integers(0, 3), "batches"))
            for slot in data.draw(st.sets(st.sampled_from(sorted(slots)), max_size=len(slots) - 1), "die"):
                del slots[slot]
                dead.add(slot)
            living = [reader for readers in slots.values() for reader in readers]
            committed += commit(living, data.draw(st.booleans(), "passed"))
            for slot, readers in slots.items():
                # The news reaches one replica now, another at a later commit.
                known = data.draw(
                    st.sets(st.sampled_from(sorted(dead))) if dead else st.just(set()), f"known to {slot}"
                )
                for reader in readers:
                    reader.loader.retire(known)
        living = [reader for readers in slots.values() for reader in readers]
        for reader in living:
            reader.loader.retire(dead)
        for _ in range(2):
            for reader in living:
                reader.draw(2 if infinite else 40)
            committed += commit(living, passed=True)

    table = living[0].loader.committed
    for shard, expected in enumerate(samples_of(texts)):
        mine = [sample for sample in committed if sample in expected]
        assert len(mine) == table[shard].samples
        if infinite:
            assert mine[: len(expected)] == expected[: len(mine)]
            assert set(Counter(mine).values()) <= {len(mine) // len(expected), len(mine) // len(expected) + 1}
        else:
            assert mine == expected


def test_shards_of_a_retired_replica_go_on_where_they_are_committed(dataset: list[str]) -> None:
    loaders = make_all(2, 1)
    mine, other = loaders
    mine_batches, other_batches = iter(mine), iter(other)
    next(mine_batches)
    next(other_batches)
    table = sync(loaders)
    next(mine_batches)
    next(other_batches)
    reached = mine.positions()

    mine.retire([1])

    assert mine.retired == {1}
    assert mine.positions() == reached
    assert all(mine.positions()[shard] == table[shard] for shard in range(1, SHARDS, 2))
    for _ in range(5):
        next(mine_batches)
    assert {row[3] for row in mine.positions().to_list()} == {2}
    assert mine.positions().delta(mine.committed).any(dim=1).all()


def test_retired_again_changes_nothing(dataset: list[str]) -> None:
    mine, *_ = make_all(3, 1)
    batches = iter(mine)
    mine.retire([2])
    for _ in range(4):
        next(batches)
    reached = mine.positions()

    mine.retire({2})
    mine.retire([])

    assert mine.retired == {2}
    assert mine.positions() == reached
    mine.retire([1])
    assert mine.retired == {1, 2}
    assert mine.positions() == reached


@pytest.mark.parametrize("first", ["retired", "restored"])
def test_new_loader_goes_on_with_shards_that_it_took_over(dataset: list[str], first: str) -> None:
    old, new = make(replicas=2), make(replicas=2)
    batches = iter(old)
    old.retire([1])
    for _ in range(9):
        next(batches)
    if first == "retired":
        new.retire([1])
    new.load_state_dict(old.state_dict())
    new.retire([1])

    assert new.positions() == old.positions()
    for batch, _ in zip(new, range(20), strict=False):
        assert equal(batch, next(batches))


def test_shards_without_documents_are_left_when_a_replica_retires(dataset: list[str]) -> None:
    del dataset[3:]
    mine = make(replicas=2, seq_len=4, batch=6, infinite=False)
    mine.retire([1])
    (batch,) = mine

    assert sorted(batch[1][:, 0].tolist()) == [FIRST, FIRST + 1, FIRST + 2]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3], r"no such replica to retire: \[3\], where the run has 3"),
        ([-1, 1], r"no such replica to retire: \[-1\]"),
        ([0], "replica 0 is retired"),
        ([0, 1, 2], "all 3 replicas are retired"),
    ],
)
def test_retirements_that_cannot_be(dataset: list[str], slots: list[int], message: str) -> None:
    mine, *_ = make_all(3, 1)
    mine.retire([2])
    reached = mine.positions()

    with pytest.raises(ValueError, match=message):
        mine.retire(slots)

    assert mine.retired == {2}
    assert mine.positions() == reached


def test_every_sample_that_is_drawn_is_logged(dataset: list[str], tmp_path: Path) -> None:
    loader = make(dp_rank=1, dp_world_size=2, replica=1, replicas=2)
    log = SampleLog(tmp_path, replica=1, incarnation=4, reader=loader.reader)
    batches = iter(loader)
    next(batches)
    begin = loader.positions()
    loader.log_to(log)
    drawn = [next(batches) for _ in range(3)]
    loader.restore(begin)
    drawn += [next(batches) for _ in range(3)]
    log.close()

    (file,) = sample_files(tmp_path)
    lines = read_all(file)
    assert file.name == "reader_3.jsonl"
    assert {(line["replica"], line["incarnation"], line["reader"]) for line in lines} == {(1, 4, 3)}
    assert [line["hash"] for line in lines] == [
        sample_hash(({"input": row}, label))
        for inputs, labels in drawn
        for row, label in zip(inputs["input"], labels, strict=True)
    ]
    # Shards 3 and 7 by turns, and the same again after the restore.
    places = [(line["shard"], line["index"]) for line in lines]
    assert places == [(3, 1), (7, 1), (3, 2), (7, 2), (3, 3), (7, 3)] * 2
