"""What a transfer is cut into: ranges of a section's bytes, each of which is fetched, checked and lost by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from elastic_train.peer_ckpt.shards import raw_bytes

PART_BYTES = 32 << 20
"""The most that one part has: what is fetched again when a donor is lost in the middle of it."""
_LEAST = 1 << 20
_WANTED = 16
"""Parts that a state should have, so that several donors can share it out."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some bytes of a section, counted from the section's first."""

    section: str
    start: int
    stop: int
    """The first byte behind it."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


def part_bytes_of(size: int, most: int = PART_BYTES) -> int:
    """How large the parts of a state of ``size`` bytes are, ``most`` at the most."""
    return min(most, max(_LEAST, size // _WANTED))


def cut(section: str, size: int, limit: int = PART_BYTES) -> tuple[Part, ...]:
    """The parts of a section of ``size`` bytes, in order and without a gap, ``limit`` bytes each but for the last.

    Raises:
        ValueError: there cannot be such a section, or such parts.
    """
    if size < 0 or limit < 1:
        raise ValueError(f"{size} bytes cannot be cut into parts of {limit}")
    return tuple(Part(section=section, start=at, stop=min(at + limit, size)) for at in range(0, size, limit))


def spans(sizes: Sequence[int], part: Part) -> Iterator[tuple[int, int, int]]:
    """Where a part lies in tensors of those ``sizes`` (bytes), which make up its section one behind the other.

    Yields:
        index of a tensor, and the range of its own bytes, which is never empty.

    Raises:
        ValueError: the section ends before the part.
    """
    end = 0
    for index, size in enumerate(sizes):
        begin, end = end, end + size
        start, stop = max(part.start, begin), min(part.stop, end)
        if start < stop:
            yield index, start - begin, stop - begin
        if part.stop <= end:
            return
    raise ValueError(f"{part.section} ends at byte {end}, before byte {part.stop}")


def views(tensors: Sequence[torch.Tensor], part: Part) -> Iterator[memoryview]:
    """The memory of a part in the host tensors of its section, piece by piece; ValueError as for ``spans``."""
    for index, start, stop in spans([tensor.nbytes for tensor in tensors], part):
        yield raw_bytes(tensors[index])[start:stop]
