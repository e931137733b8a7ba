"""Who holds the memory that outlives a rank, and for how long."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.replica.memory_files import MemoryFiles


@pytest.fixture
def files() -> Iterator[MemoryFiles]:
    made = MemoryFiles()
    yield made
    made.close()


def use(path: str, content: bytes) -> None:
    """As a rank does."""
    with Path(path).open("r+b") as file:
        file.write(content)


def test_every_rank_has_a_file_and_the_first_incarnation_finds_nothing(files: MemoryFiles) -> None:
    files.renew(2)

    assert len(set(files.paths)) == 2
    assert files.remains == ()
    assert all(os.stat(path).st_size == 0 for path in files.paths)


def test_the_next_incarnation_finds_what_the_one_before_left_and_nothing_older(files: MemoryFiles) -> None:
    for number in range(3):
        files.renew(2)
        for rank, path in enumerate(files.paths):
            use(path, b"%d.%d" % (number, rank))

    assert [Path(path).read_bytes() for path in files.remains] == [b"1.0", b"1.1"]
    assert [Path(path).read_bytes() for path in files.paths] == [b"2.0", b"2.1"]


def test_an_incarnation_that_used_nothing_leaves_what_there_was(files: MemoryFiles) -> None:
    files.renew(1)
    use(files.paths[0], b"state")
    for _ in range(2):
        files.renew(1)

        assert [Path(path).read_bytes() for path in files.remains] == [b"state"]


def test_nothing_is_left_open(files: MemoryFiles) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(4):
        files.renew(3)
        use(files.paths[1], b"x")
        assert len(os.listdir("/proc/self/fd")) <= len(before) + 6

    files.close()

    assert set(os.listdir("/proc/self/fd")) == before
    assert files.paths == files.remains == ()
