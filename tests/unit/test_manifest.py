import pytest
import torch
import xxhash

from elastic_train.peer_ckpt.manifest import Checksums, checksum
from elastic_train.peer_ckpt.parts import Part
from elastic_train.peer_ckpt.snapshot import Retired, Snapshot


def never() -> None:
    raise AssertionError("nothing was to be cut off")


def part(start: int, stop: int) -> Part:
    return Part(section="outer", start=start, stop=stop)


def test_a_checksum_is_xxh3_of_the_bytes_in_their_order() -> None:
    assert checksum([memoryview(b"ab"), memoryview(b"c")]) == xxhash.xxh3_64_intdigest(b"abc")


def test_a_part_has_the_checksum_of_its_bytes() -> None:
    memory = torch.arange(10, dtype=torch.uint8)
    checksums = Checksums(Snapshot({}, {"outer": {"a": memory[:4].clone(), "b": memory[4:].clone()}}))
    for start, stop in ((0, 3), (3, 10), (0, 10)):
        assert checksums.of(part(start, stop), never) == xxhash.xxh3_64_intdigest(bytes(range(start, stop)))


def test_each_is_computed_once() -> None:
    memory = torch.zeros(8)
    checksums = Checksums(Snapshot({}, {"outer": {"a": memory}}))
    first = checksums.of(part(0, 32), never)
    memory.fill_(1)
    assert checksums.of(part(0, 32), never) == first
    assert checksums.of(part(0, 31), never) != first


def test_a_retired_section_has_none() -> None:
    snapshot = Snapshot({}, {"outer": {"a": torch.zeros(8)}})
    snapshot.retire("outer")
    with pytest.raises(Retired):
        Checksums(snapshot).of(part(0, 32), never)


def test_what_was_read_while_the_section_was_retired_is_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot({}, {"outer": {"a": torch.zeros(8)}})
    checksums = Checksums(snapshot)
    cut_off: list[None] = []

    def retired_meanwhile(pieces: object) -> int:
        snapshot.retire("outer")
        return 7

    monkeypatch.setattr("elastic_train.peer_ckpt.manifest.checksum", retired_meanwhile)
    with pytest.raises(Retired):
        checksums.of(part(0, 32), lambda: cut_off.append(None))
    assert len(cut_off) == 1
