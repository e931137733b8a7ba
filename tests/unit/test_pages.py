"""New memory gets its pages before anything is received into it."""

import mmap
import resource
import sys

import pytest

from elastic_train.peer_ckpt.pages import make_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux makes pages on request")

PAGES = 256


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture
def memory() -> mmap.mmap:
    memory = mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not make_pages(memoryview(memory)[: mmap.PAGESIZE]):
        pytest.skip("this kernel does not make pages on request")
    return memory


def test_writing_to_them_costs_no_fault(memory: mmap.mmap) -> None:
    source = b"1" * len(memory)
    assert make_pages(memoryview(memory))
    before = faults()
    memory[:] = source
    assert faults() - before < PAGES // 2


def test_without_it_each_page_is_a_fault(memory: mmap.mmap) -> None:
    source = b"1" * len(memory)
    before = faults()
    memory[:] = source
    assert faults() - before >= PAGES - 1


def test_what_the_memory_has_stays(memory: mmap.mmap) -> None:
    memory[10:15] = b"state"
    assert make_pages(memoryview(memory)[12:5000])
    assert memory[10:15] == b"state"


def test_memory_of_no_bytes_has_no_pages() -> None:
    assert not make_pages(memoryview(bytearray()))
