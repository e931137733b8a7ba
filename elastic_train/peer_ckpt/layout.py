"""How a snapshot is described on the wire: as at the head of a safetensors file, which runs no code.

Eight bytes with the length of the header (little-endian), then the header: JSON with type, shape and place of each
tensor, and what belongs to no tensor under ``__metadata__``. The bytes of the tensors lie one behind the other without
a gap; each section's are cut into parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_train.peer_ckpt.parts import PART_BYTES, Part, cut
from elastic_train.peer_ckpt.snapshot import Snapshot

LENGTH_BYTES = 8
HEADER_LIMIT = 64 << 20
"""Bytes: far above what a model has, far below what would hurt."""

_ALIGN = 8
_METADATA = "__metadata__"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Types of tensors by their names in a safetensors file."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LayoutError(ValueError):
    """Bytes that do not describe a snapshot."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One tensor on the wire."""

    section: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a transfer carries, in the order in which it does."""

    header: Mapping[str, Any]
    """The snapshot's."""
    sections: tuple[str, ...]
    places: tuple[Place, ...]
    """Section by section."""
    part_bytes: int = PART_BYTES
    """The most that a part has."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(place.size for place in self.places)

    def size_of(self, section: str) -> int:
        """Bytes of its tensors."""
        return sum(place.size for place in self.places if place.section == section)

    @property
    def count(self) -> int:
        """Of parts."""
        return sum(-(-self.size_of(section) // self.part_bytes) for section in self.sections)

    def parts(self) -> Iterator[Part]:
        """All parts, in order."""
        for section in self.sections:
            yield from cut(section, self.size_of(section), self.part_bytes)

    @classmethod
    def of(cls, snapshot: Snapshot, sections: Sequence[str], part_bytes: int = PART_BYTES) -> Layout:
        """Raises KeyError if there is no such section."""
        places = tuple(
            Place(section=section, name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            for section in sections
            for name, tensor in snapshot.sections[section].items()
        )
        return cls(header=snapshot.header, sections=tuple(sections), places=places, part_bytes=part_bytes)

    def encode(self) -> bytes:
        """Everything before the tensors. Raises KeyError for a type that the layout does not know."""
        described: dict[str, Any] = {
            _METADATA: {
                "header": json.dumps(dict(self.header)),
                "sections": json.dumps(self.sections),
                "part_bytes": str(self.part_bytes),
            }
        }
        end = 0
        for place in self.places:
            start, end = end, end + place.size
            described[f"{place.section}/{place.name}"] = {
                "dtype": DTYPE_NAMES[place.dtype],
                "shape": place.shape,
                "data_offsets": (start, end),
            }
        text = json.dumps(described).encode()
        text += b" " * (-len(text) % _ALIGN)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @classmethod
    def decode(cls, text: bytes) -> Layout:
        """From what stands behind the length.

        Raises:
            LayoutError: it describes no snapshot.
        """
        try:
            described = json.loads(text)
            metadata = described.pop(_METADATA)
            header, sections = json.loads(metadata["header"]), tuple(json.loads(metadata["sections"]))
            if not isinstance(header, dict):
                raise LayoutError("the snapshot's header is no object")
            if (part_bytes := int(metadata["part_bytes"])) < 1:
                raise LayoutError(f"its parts have {part_bytes} bytes")
            if len(set(sections)) < len(sections):
                raise LayoutError("a section is listed twice")
            end, last, places = 0, 0, []
            for full_name, entry in described.items():
                section, _, name = full_name.partition("/")
                shape = tuple(entry["shape"])
                if section not in sections or not all(type(size) is int and size >= 0 for size in shape):
                    raise LayoutError(f"{full_name} has no place in it")
                if (at := sections.index(section)) < last:
                    raise LayoutError(f"{full_name} lies behind another section")
                last = at
                place = Place(section=section, name=name, dtype=DTYPES[entry["dtype"]], shape=shape)
                if entry["data_offsets"] != [end, end + place.size]:
                    raise LayoutError(f"{full_name} is not where it must be")
                end += place.size
                places.append(place)
            return cls(header=header, sections=sections, places=tuple(places), part_bytes=part_bytes)
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LayoutError(f"the header cannot be understood: {error!r}") from error
