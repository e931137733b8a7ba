"""What a donor says of a snapshot before it sends any of it: the layout, and then the checksum of every part.

The checksums follow the layout one by one, as they are computed: to read through a large section takes seconds, and
meanwhile its first parts can be fetched. Layout and parts alone, one behind the other, are a safetensors file.

Behind the layout, and behind each checksum, stands a checksum of itself. A header that arrived damaged would otherwise
be taken over, and a damaged checksum held against all other donors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import xxhash

from elastic_train.peer_ckpt.layout import HEADER_LIMIT, LENGTH_BYTES, Layout, LayoutError
from elastic_train.peer_ckpt.parts import Part, views
from elastic_train.peer_ckpt.request import Answer
from elastic_train.peer_ckpt.snapshot import Retired, Snapshot

CHECKSUM_BYTES = 8
_ENTRY_BYTES = 2 * CHECKSUM_BYTES


def checksum(pieces: Iterable[memoryview]) -> int:
    """Of the bytes of a part (xxh3, 64 bit, unsigned)."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


class Checksums:
    """A snapshot's. Each is computed when it is first asked for: who serves nobody computes none."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._known: dict[Part, int] = {}
        self._guard = threading.Lock()

    def of(self, part: Part, cut_off: Callable[[], None]) -> int:
        """That of one part; may be called from several threads.

        Args:
            cut_off: as for ``Snapshot.reading``.

        Raises:
            Retired: the memory belongs to a newer snapshot by now.
        """
        with self._guard:
            if part not in self._known:
                with self._snapshot.reading(part.section, cut_off) as tensors:
                    value = checksum(views(list(tensors.values()), part))
                # The memory may have been written while it was read.
                if self._snapshot.is_retired(part.section):
                    raise Retired(part.section)
                self._known[part] = value
            return self._known[part]


def sealed(content: bytes) -> bytes:
    """With its own checksum behind it."""
    return content + _encoded(checksum([memoryview(content)]))


def encode_checksum(value: int) -> bytes:
    """That of a part, as it stands in a manifest."""
    return sealed(_encoded(value))


def size_of(head: bytes, layout: Layout) -> int:
    """Bytes of a manifest that begins with ``head``, the encoded and sealed layout."""
    return len(head) + _ENTRY_BYTES * layout.count


def read_layout(answer: Answer) -> Layout:
    """The first half of a manifest.

    Raises:
        LayoutError: it is none.
        OSError: it does not arrive.
    """
    head = answer.read(LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    if length > min(HEADER_LIMIT, answer.length):
        raise LayoutError(f"a header of {length} bytes")
    text = answer.read(length)
    if answer.read(CHECKSUM_BYTES) != sealed(head + text)[-CHECKSUM_BYTES:]:
        raise LayoutError("its layout arrived damaged")
    layout = Layout.decode(text)
    # Before anything is made for its parts: their number is only a claim.
    if answer.length != _ENTRY_BYTES * layout.count:
        raise LayoutError(f"it describes {layout.count} parts and has {answer.length} bytes of checksums")
    return layout


def read_checksums(answer: Answer, layout: Layout) -> Iterator[tuple[Part, int]]:
    """The second half, as it arrives. Raises OSError if it does not, and LayoutError if it is damaged."""
    for part in layout.parts():
        entry = answer.read(_ENTRY_BYTES)
        value = int.from_bytes(entry[:CHECKSUM_BYTES], "big")
        if entry != encode_checksum(value):
            raise LayoutError("its checksums arrived damaged")
        yield part, value


def _encoded(value: int) -> bytes:
    return value.to_bytes(CHECKSUM_BYTES, "big")
