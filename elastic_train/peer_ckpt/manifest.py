"""What a donor says of a snapshot before it sends any of it: the layout, and then the checksum of every part.

The checksums follow the layout one by one, as they are computed: to read through a large section takes seconds, and
meanwhile its first parts can be fetched. Layout and parts alone, one behind the other, are a safetensors file.
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


def size_of(head: bytes, layout: Layout) -> int:
    """Bytes of a manifest that begins with ``head``, the encoded layout."""
    return len(head) + CHECKSUM_BYTES * layout.count


def read_layout(answer: Answer) -> Layout:
    """The first half of a manifest.

    Raises:
        LayoutError: it is none.
        OSError: it does not arrive.
    """
    length = int.from_bytes(answer.read(LENGTH_BYTES), "little")
    if length > min(HEADER_LIMIT, answer.length):
        raise LayoutError(f"a header of {length} bytes")
    layout = Layout.decode(answer.read(length))
    # Before anything is made for its parts: their number is only a claim.
    if answer.length != CHECKSUM_BYTES * layout.count:
        raise LayoutError(f"it describes {layout.count} parts and has {answer.length} bytes of checksums")
    return layout


def read_checksums(answer: Answer, layout: Layout) -> Iterator[tuple[Part, int]]:
    """The second half, as it arrives. Raises OSError if it does not."""
    for part in layout.parts():
        yield part, int.from_bytes(answer.read(CHECKSUM_BYTES), "big")
