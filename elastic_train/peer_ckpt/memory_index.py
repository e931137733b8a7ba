"""What a rank's shared memory says of itself: which snapshot in it is whole, and where its tensors lie.

It stands at the head of the file and outlives the process with it. A process can be killed between any two
instructions, so the order is what makes it true: the index is emptied before memory that it names is written again,
and written once all of that memory holds what it says. One that was being written is damaged, and says nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from elastic_train.peer_ckpt.layout import DTYPE_NAMES, DTYPES, Place

HEAD_BYTES = 16 << 20
"""Of the file, for the index: far above what a model needs. What is not written takes no memory."""
ALIGN = 64
"""Bytes: every tensor begins at a multiple of it."""

_LENGTH_BYTES = 8
_CHECKSUM_BYTES = 8
_PREFIX = _LENGTH_BYTES + _CHECKSUM_BYTES


class IndexDamaged(ValueError):
    """The head of the file is no index, or not a whole one."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """One snapshot in a file."""

    header: Mapping[str, Any]
    """The snapshot's."""
    sections: Mapping[str, Mapping[str, tuple[Place, int]]]
    """By section and name: the tensor, and the byte of the file at which it begins."""

    def encode(self) -> bytes:
        """As JSON. Raises KeyError for a type that a layout does not know."""
        described = {
            section: {
                name: {"dtype": DTYPE_NAMES[place.dtype], "shape": place.shape, "offset": start}
                for name, (place, start) in tensors.items()
            }
            for section, tensors in self.sections.items()
        }
        return json.dumps({"header": dict(self.header), "sections": described}).encode()

    @classmethod
    def decode(cls, text: bytes, size: int) -> Index:
        """
        Args:
            size: bytes of the file, behind which no tensor can lie.

        Raises:
            IndexDamaged: it describes no snapshot.
        """
        try:
            described = json.loads(text)
            header = described["header"]
            if not isinstance(header, dict):
                raise IndexDamaged("the snapshot's header is no object")
            sections = {
                section: {name: _tensor(section, name, entry, size) for name, entry in tensors.items()}
                for section, tensors in described["sections"].items()
            }
        except IndexDamaged:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IndexDamaged(f"it cannot be understood: {error!r}") from error
        return cls(header=header, sections=sections)


def write_index(file: int, index: Index) -> None:
    """Let the file name a snapshot whose tensors hold what they should, and will until ``clear_index``.

    Args:
        file: descriptor.

    Raises:
        ValueError: it is too large, or cannot be expressed; the file names none.
        OSError: it cannot be written; the file names none.
    """
    clear_index(file)
    try:
        text = index.encode()
    except KeyError as error:
        raise ValueError(f"a tensor of the type {error}") from error
    if _PREFIX + len(text) > HEAD_BYTES:
        raise ValueError(f"an index of {len(text)} bytes")
    _write(file, text, _PREFIX)
    _write(file, len(text).to_bytes(_LENGTH_BYTES, "little") + xxhash.xxh3_64_digest(text), 0)


def clear_index(file: int) -> None:
    """Let the file name no snapshot; once this returns, its memory may be written. Raises OSError."""
    _write(file, bytes(_PREFIX), 0)


def read_index(file: int) -> Index | None:
    """The snapshot that the file names; None if it names none.

    Raises:
        IndexDamaged: what stands there cannot be trusted.
        OSError: it cannot be read.
    """
    prefix = os.pread(file, _PREFIX, 0)
    if not any(prefix):
        return None
    length = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if length > HEAD_BYTES - _PREFIX:
        raise IndexDamaged(f"an index of {length} bytes")
    text = os.pread(file, length, _PREFIX)
    if xxhash.xxh3_64_digest(text) != prefix[_LENGTH_BYTES:]:
        raise IndexDamaged("its checksum is another")
    return Index.decode(text, os.fstat(file).st_size)


def _tensor(section: str, name: str, entry: Mapping[str, Any], size: int) -> tuple[Place, int]:
    shape, start = tuple(entry["shape"]), entry["offset"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start)):
        raise IndexDamaged(f"{section}/{name} has no place in it")
    place = Place(section=section, name=name, dtype=DTYPES[entry["dtype"]], shape=shape)
    if place.size and (start < HEAD_BYTES or start % ALIGN or start + place.size > size):
        raise IndexDamaged(f"{section}/{name} cannot lie at byte {start}")
    return place, start


def _write(file: int, content: bytes, start: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(file, content[written:], start + written)
