from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.peer_ckpt.parts import Part, cut, spans, views

SIZES = st.lists(st.integers(0, 40), max_size=8)


@given(st.integers(0, 500), st.integers(1, 100))
def test_parts_cover_a_section_without_gap_or_overlap(size: int, limit: int) -> None:
    parts = cut("outer", size, limit)
    assert sum(part.size for part in parts) == size
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert all(part.size == limit for part in parts[:-1])
    assert all(part.section == "outer" and 0 < part.size <= limit for part in parts)
    if parts:
        assert (parts[0].start, parts[-1].stop) == (0, size)


@pytest.mark.parametrize(("size", "limit"), [(-1, 1), (1, 0), (0, -3)])
def test_what_cannot_be_cut_is_refused(size: int, limit: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        cut("outer", size, limit)


@given(SIZES, st.integers(1, 50))
def test_the_spans_of_all_parts_are_the_section(sizes: list[int], limit: int) -> None:
    seen = [span for part in cut("a", sum(sizes), limit) for span in spans(sizes, part)]
    assert all(start < stop for _, start, stop in seen)
    covered = [(index, byte) for index, start, stop in seen for byte in range(start, stop)]
    assert covered == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]


@given(SIZES, st.integers(1, 9))
def test_a_part_that_goes_beyond_its_section_is_refused(sizes: list[int], more: int) -> None:
    with pytest.raises(ValueError, match="ends at byte"):
        list(spans(sizes, Part(section="a", start=0, stop=sum(sizes) + more)))


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 50))
def test_the_views_of_all_parts_are_the_tensors_bytes(counts: list[int], limit: int) -> None:
    tensors = [torch.arange(count, dtype=torch.float32) + index for index, count in enumerate(counts)]
    size = sum(tensor.nbytes for tensor in tensors)
    seen = b"".join(bytes(view) for part in cut("a", size, limit) for view in views(tensors, part))
    assert seen == b"".join(tensor.numpy().tobytes() for tensor in tensors)


def test_views_write_into_the_tensors() -> None:
    target = [torch.zeros(3, dtype=torch.uint8), torch.zeros(()), torch.zeros(2, 2, dtype=torch.uint8)]
    for view in views(target, Part(section="a", start=2, stop=9)):
        view[:] = bytes([255]) * len(view)
    assert target[0].tolist() == [0, 0, 255]
    assert target[1].isnan()
    assert target[2].tolist() == [[255, 255], [0, 0]]
