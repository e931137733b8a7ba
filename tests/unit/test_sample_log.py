from pathlib import Path

import torch

from elastic_train.events import read_all
from elastic_train.replica.data.sample_log import SampleLog, sample_files, sample_hash

TOKENS = torch.tensor([1, 2, 3])


def test_a_line_for_each_sample(tmp_path: Path) -> None:
    sample = ({"input": TOKENS, "positions": torch.arange(3)}, TOKENS + 1)
    for incarnation in (0, 1):
        log = SampleLog(tmp_path, replica=2, incarnation=incarnation, reader=5)
        log.add(7, 40 + incarnation, sample)
        log.close()

    (file,) = sample_files(tmp_path)
    assert file == tmp_path / "samples" / "reader_5.jsonl"
    assert read_all(file) == [
        {
            "replica": 2,
            "incarnation": incarnation,
            "reader": 5,
            "shard": 7,
            "index": 40 + incarnation,
            "hash": sample_hash(sample),
        }
        for incarnation in (0, 1)
    ]


def test_the_hash_is_of_inputs_and_labels() -> None:
    def hashed(inputs: torch.Tensor, labels: torch.Tensor) -> str:
        return sample_hash(({"input": inputs}, labels))

    # It is compared between runs on different machines.
    assert hashed(TOKENS, TOKENS + 1) == hashed(TOKENS.clone(), TOKENS + 1)
    assert len({hashed(TOKENS, TOKENS), hashed(TOKENS, TOKENS + 1), hashed(TOKENS + 1, TOKENS)}) == 3
    assert len(hashed(TOKENS, TOKENS)) == 16


def test_no_log(tmp_path: Path) -> None:
    assert sample_files(tmp_path) == []
