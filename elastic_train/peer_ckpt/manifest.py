"""What a donor says of a snapshot before it sends any of it: the layout, with a checksum behind it.

A part has a checksum behind it as well, which the donor computes while it sends. Without these checksums, layout and
parts, one behind the other, are a safetensors file.
"""

from __future__ import annotations

import xxhash

from elastic_train.peer_ckpt.layout import HEADER_LIMIT, LENGTH_BYTES, Layout, LayoutError
from elastic_train.peer_ckpt.request import Answer

CHECKSUM_BYTES = 8
"""xxh3, 64 bit, big-endian."""


def encode_manifest(layout: Layout) -> bytes:
    """A manifest as it is sent."""
    head = layout.encode()
    return head + xxhash.xxh3_64_digest(head)


def read_manifest(answer: Answer) -> Layout:
    """The layout that a donor sends.

    Raises:
        LayoutError: it is none, or arrived damaged.
        OSError: it does not arrive.
    """
    head = answer.read(LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    if length > HEADER_LIMIT or answer.length != length + CHECKSUM_BYTES:
        raise LayoutError(f"a header of {length} bytes in a manifest of {LENGTH_BYTES + answer.length}")
    text = answer.read(length)
    if answer.read(CHECKSUM_BYTES) != xxhash.xxh3_64_digest(head + text):
        raise LayoutError("its layout arrived damaged")
    return Layout.decode(text)
