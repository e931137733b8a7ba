"""A state that outlives the process which made it, and all that must keep a later one from using it."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from elastic_train.peer_ckpt import memory_index
from elastic_train.peer_ckpt.memory_index import HEAD_BYTES, Index, IndexDamaged, read_index, write_index
from elastic_train.peer_ckpt.remains import Remains
from elastic_train.peer_ckpt.shared_memory import SharedMemory, open_memory
from elastic_train.peer_ckpt.snapshot import Snapshot

ROOM = 64 << 20
HEADER = {"outer_step": 3, "state_hash": -7, "rank_hash": 5, "extra": {"lr": [0.1]}}


@pytest.fixture
def file() -> Iterator[int]:
    """A file as a ReplicaActor makes one."""
    made = os.memfd_create("test", os.MFD_CLOEXEC)
    yield made
    os.close(made)


def path_of(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def memory_in(file: int, room: int = ROOM) -> SharedMemory:
    return SharedMemory(path_of(file), room=room)


def filled(memory: SharedMemory, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return memory.allocate(shape, dtype).copy_((torch.arange(first, first + numel) % 2**7).view(shape))


def state(memory: SharedMemory, first: int = 0) -> Snapshot:
    return Snapshot(
        HEADER | {"outer_step": 3 + first},
        {
            "outer": {
                "0.anchor": filled(memory, (300_000,), torch.float32, first),
                "0.momentum": filled(memory, (5,), torch.bfloat16, first),
            },
            "inner": {
                "0.0.exp_avg": filled(memory, (7, 11), torch.float32, first),
                "0.0.step": filled(memory, (), torch.float32, first + 1),
                "0.1.nothing": memory.allocate((0, 4), torch.float32),
            },
            "none": {},
        },
    )


def is_same(found: Snapshot | None, wanted: Snapshot) -> bool:
    return (
        found is not None
        and found.header == wanted.header
        and list(found.sections) == list(wanted.sections)
        and all(
            list(found.sections[section]) == list(tensors)
            and all(
                (tensor.dtype, tensor.shape)
                == (found.sections[section][name].dtype, found.sections[section][name].shape)
                and torch.equal(found.sections[section][name], tensor)
                for name, tensor in tensors.items()
            )
            for section, tensors in wanted.sections.items()
        )
    )


def held(file: int) -> int:
    """Bytes that exist."""
    return os.fstat(file).st_blocks * 512


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (400_000,)])
def test_a_tensor_lies_in_the_file(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = memory_in(file)
    memory.allocate((3,), torch.uint8)

    tensor = memory.allocate(shape, dtype)

    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    place = memory.locate(tensor)
    assert place is not None
    content = bytes(range(1, 1 + min(tensor.nbytes, 200)))
    os.pwrite(file, content, place.start)
    assert bytes(tensor.reshape(-1).view(torch.uint8).numpy())[: len(content)] == content


def test_tensors_do_not_lie_in_each_other_nor_in_the_index(file: int) -> None:
    memory = memory_in(file)
    tensors = [memory.allocate((size,), torch.uint8) for size in (1, 63, 64, 65, 200_000, 300_000, 10, 1 << 20)]

    places = sorted(
        (place.start, place.start + tensor.nbytes) for tensor in tensors if (place := memory.locate(tensor))
    )

    assert len(places) == len(tensors)
    assert places[0][0] >= HEAD_BYTES
    assert all(start % memory_index.ALIGN == 0 for start, _ in places)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(places))


def test_a_part_of_a_tensor_is_located_and_ordinary_memory_is_not(file: int) -> None:
    memory = memory_in(file)
    tensor = memory.allocate((100,), torch.float32)
    whole, part = memory.locate(tensor), memory.locate(tensor[10:])

    assert whole is not None
    assert part is not None
    assert part.start == whole.start + 40
    assert memory.locate(torch.zeros(100)) is None
    assert memory.locate(torch.zeros(0)) is None


def test_what_is_not_allocated_takes_no_memory(file: int) -> None:
    memory = memory_in(file, room=1 << 40)
    assert held(file) <= mmap.PAGESIZE

    memory.allocate((10 << 20,), torch.uint8)

    assert 10 << 20 <= held(file) <= (10 << 20) + 2 * mmap.PAGESIZE


def small_room(file: int, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    return memory_in(file, room=2 << 20)


def full_machine(file: int, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    memory = memory_in(file)

    def refuse(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    return memory


@pytest.mark.parametrize("lacking", [small_room, full_machine])
def test_without_room_it_is_ordinary_memory_and_one_line(
    file: int,
    lacking: Callable[[int, pytest.MonkeyPatch], SharedMemory],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = lacking(file, monkeypatch)

    tensors = [memory.allocate((1 << 20,), torch.float32) for _ in range(3)]

    for tensor in tensors:
        assert memory.locate(tensor) is None
        assert tensor.fill_(1).sum() == 1 << 20
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "ordinary memory" in caplog.text


def test_where_it_cannot_be_opened_there_is_none(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert open_memory("", pin=False) is None
    assert not caplog.records
    assert open_memory(str(tmp_path / "gone"), pin=False) is None
    assert "ordinary memory" in caplog.text


def test_memory_that_cannot_be_locked_is_used_all_the_same(file: int, caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("here it can be")
    memory = SharedMemory(path_of(file), pin=True, room=ROOM)

    tensors = [memory.allocate((1 << 20,), torch.uint8) for _ in range(2)]

    assert all(memory.locate(tensor) for tensor in tensors)
    assert caplog.text.count("cannot be page-locked") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_memory_for_an_accelerator_is_locked(file: int) -> None:
    memory = SharedMemory(path_of(file), pin=True, room=ROOM)

    small, large = memory.allocate((10,), torch.float32), memory.allocate((1 << 20,), torch.float32)

    assert small.is_pinned()
    assert large.is_pinned()
    assert torch.equal(large.fill_(3).to("cuda", non_blocking=True).cpu(), large)


def test_descriptors_are_given_back(file: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    memory = memory_in(file)
    tensor = memory.allocate((4,), torch.float32)
    remains = Remains(path_of(file))
    del memory, tensor, remains

    assert set(os.listdir("/proc/self/fd")) == before


# -- what a later process finds ----------------------------------------------------------------------------------------


def test_what_was_kept_is_found(file: int) -> None:
    memory = memory_in(file)
    snapshot = state(memory)
    memory.keep(snapshot)

    remains = Remains(path_of(file))

    assert is_same(remains.find(3, -7), snapshot)
    assert remains.find(4, -7) is None
    assert remains.find(3, 7) is None


_CHILD = """
import os, sys, torch
from elastic_train.peer_ckpt.shared_memory import SharedMemory
from elastic_train.peer_ckpt.snapshot import Snapshot
memory = SharedMemory(sys.argv[1], room=64 << 20)
def made(value):
    tensors = {"0.anchor": memory.allocate((500_000,), torch.float32).fill_(value)}
    return Snapshot({"outer_step": value, "state_hash": value}, {"outer": tensors})
first, second = made(1), made(2)
memory.keep(first)
memory.keep(second)
print("shown", flush=True)
sys.stdin.readline()
memory.forget(second)
print("forgotten", flush=True)
while True:
    second.sections["outer"]["0.anchor"].add_(1)
"""


@pytest.mark.parametrize("overwriting", [False, True])
def test_it_outlives_a_process_that_is_killed(file: int, overwriting: bool) -> None:
    arguments = [sys.executable, "-c", _CHILD, path_of(file)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "shown\n"
            if overwriting:
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == "forgotten\n"
        finally:
            child.send_signal(signal.SIGKILL)

    found = Remains(path_of(file)).find(2, 2)

    if overwriting:
        assert found is None
    else:
        assert found is not None
        assert torch.equal(found.sections["outer"]["0.anchor"], torch.full((500_000,), 2.0))


def test_it_names_nothing_from_before_its_memory_is_written(file: int) -> None:
    memory = memory_in(file)
    snapshot, later = state(memory), state(memory, first=1)
    memory.keep(snapshot)
    memory.forget(later)
    assert read_index(file) is not None

    memory.forget(snapshot)

    assert read_index(file) is None
    memory.keep(later)
    memory.forget(snapshot)
    assert is_same(Remains(path_of(file)).find(4, -7), later)


def test_a_snapshot_that_lies_elsewhere_is_not_kept_and_the_one_before_is_not_either(file: int) -> None:
    memory = memory_in(file)
    memory.keep(state(memory))

    memory.keep(Snapshot(HEADER, {"outer": {"0.anchor": torch.zeros(4)}}))

    assert read_index(file) is None


def test_an_index_that_is_too_large_is_not_written(
    file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = memory_in(file)
    monkeypatch.setattr(memory_index, "HEAD_BYTES", 300)

    memory.keep(state(memory))

    assert read_index(file) is None
    assert "will not find this state" in caplog.text


def flip(file: int, at: int) -> None:
    os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 4]), at)


def test_an_index_with_any_bit_flipped_is_refused(file: int, caplog: pytest.LogCaptureFixture) -> None:
    memory = memory_in(file)
    memory.keep(state(memory))
    length = int.from_bytes(os.pread(file, 8, 0), "little")

    for at in (0, 3, 9, 15, 16, 16 + length // 2, 15 + length):
        flip(file, at)
        with pytest.raises(IndexDamaged):
            read_index(file)
        flip(file, at)

    assert read_index(file) is not None
    flip(file, 20)
    assert Remains(path_of(file)).find(3, -7) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_an_index_that_ends_too_early_is_refused(file: int) -> None:
    memory = memory_in(file)
    memory.keep(state(memory))
    text = os.pread(file, int.from_bytes(os.pread(file, 8, 0), "little"), 16)

    os.pwrite(file, bytes(len(text) // 2), 16 + len(text) // 2)

    with pytest.raises(IndexDamaged):
        read_index(file)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 0},
        {"offset": HEAD_BYTES + 4},
        {"offset": HEAD_BYTES + ROOM},
        {"offset": -64},
        {"offset": 1.5},
        {"shape": [1 << 40]},
        {"shape": "x"},
        {"dtype": "F31"},
    ],
)
def test_a_tensor_that_cannot_be_there_is_refused(file: int, change: dict[str, object]) -> None:
    memory_in(file)
    described = {"header": {}, "sections": {"a": {"b": {"dtype": "F32", "shape": [4], "offset": HEAD_BYTES} | change}}}

    with pytest.raises(IndexDamaged):
        Index.decode(json.dumps(described).encode(), os.fstat(file).st_size)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"header": 1, "sections": {}}', b'{"header": {}, "sections": 3}']
)
def test_what_describes_nothing_is_refused(text: bytes) -> None:
    with pytest.raises(IndexDamaged):
        Index.decode(text, ROOM)


def test_a_section_without_a_proper_name_is_refused(file: int, caplog: pytest.LogCaptureFixture) -> None:
    memory_in(file)
    write_index(file, Index(header={}, sections={"a/b": {}}))
    assert Remains(path_of(file)).find(0, 0) is None
    assert "of no use" in caplog.text


def test_a_file_that_nobody_used_holds_nothing(file: int, caplog: pytest.LogCaptureFixture) -> None:
    assert Remains(path_of(file)).find(0, 0) is None
    assert Remains("").find(0, 0) is None
    assert not caplog.records
    assert Remains("/proc/self/fd/nothing").find(0, 0) is None
    assert "of no use" in caplog.text


def test_whoever_looks_holds_only_the_snapshot_and_gives_it_back(file: int) -> None:
    memory = memory_in(file)
    older = [memory.allocate((1 << 20,), torch.float32).fill_(1) for _ in range(3)]
    snapshot = state(memory)
    memory.keep(snapshot)
    before = snapshot.sections["outer"]["0.anchor"].clone()

    remains = Remains(path_of(file))

    assert held(file) < 4 << 20
    assert all(not tensor.any() for tensor in older)
    found = remains.find(3, -7)
    assert found is not None
    anchor = found.sections["outer"]["0.anchor"]
    assert torch.equal(anchor, before)

    remains.give_back()
    remains.give_back()

    assert held(file) == 0
    assert remains.find(3, -7) is None
    # Whoever still has a tensor reads nothing, and lives.
    assert not anchor.any()


def test_damage_gives_everything_back_at_once(file: int) -> None:
    memory = memory_in(file)
    memory.keep(state(memory))
    flip(file, 20)

    Remains(path_of(file))

    assert held(file) == 0
