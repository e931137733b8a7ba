"""What an earlier incarnation of a rank has left in shared memory: its last whole snapshot, if there is one.

Nothing of it is trusted. The index has a checksum; whoever uses the tensors computes their hashes first; and whether
that state is still the run's is for living peers to say.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref

from elastic_train.peer_ckpt.memory_index import HEAD_BYTES, Index, IndexDamaged, read_index
from elastic_train.peer_ckpt.shared_memory import tensor_at
from elastic_train.peer_ckpt.snapshot import Snapshot

logger = logging.getLogger(__name__)

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_NOTHING_KNOWN = "what an earlier incarnation left in memory is of no use: %s"


class Remains:
    """One look at what is left. From the beginning only the memory of that snapshot is held, and all of it given back
    by ``give_back``."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: of the file, as ``/proc/<pid>/fd/<n>``; "": nothing is left.
        """
        self._file: int | None = None
        self._snapshot: Snapshot | None = None
        if not path:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            index = read_index(self._file)
            if index is not None:
                self._trim(self._file, index)
                self._snapshot = _mapped(self._file, index)
        except (OSError, IndexDamaged, ValueError) as error:
            logger.warning(_NOTHING_KNOWN, error)
        if self._snapshot is None:
            self.give_back()

    def find(self, outer_step: int, state_hash: int) -> Snapshot | None:
        """The snapshot, if it says that it is of that outer step and of that state; None if it does not."""
        snapshot = self._snapshot
        if snapshot is None:
            return None
        header = snapshot.header
        same = (header.get("outer_step"), header.get("state_hash")) == (outer_step, state_hash)
        return snapshot if same else None

    def give_back(self) -> None:
        """Free the memory: tensors of the snapshot that are still there read as zeros. May be called again."""
        file, self._file, self._snapshot = self._file, None, None
        if file is None:
            return
        try:
            _punch(file, 0, os.fstat(file).st_size)
        except OSError as error:
            logger.warning("the memory of an earlier incarnation is held until the next one: %s", error)

    def _trim(self, file: int, index: Index) -> None:
        """Give back what belongs to no tensor of the snapshot, before this incarnation takes memory of its own."""
        ranges = sorted(
            (start, start + place.size)
            for tensors in index.sections.values()
            for place, start in tensors.values()
            if place.size
        )
        free = HEAD_BYTES
        for start, stop in [*ranges, (os.fstat(file).st_size,) * 2]:
            _punch(file, free, start // mmap.PAGESIZE * mmap.PAGESIZE)
            free = max(free, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE)


def _mapped(file: int, index: Index) -> Snapshot:
    """Its tensors where they lie. Raises OSError."""
    memory = mmap.mmap(file, os.fstat(file).st_size)
    memory.madvise(mmap.MADV_DONTDUMP)
    sections = {
        section: {name: tensor_at(memory, start, place.shape, place.dtype) for name, (place, start) in tensors.items()}
        for section, tensors in index.sections.items()
    }
    return Snapshot(index.header, sections)


def _punch(file: int, start: int, stop: int) -> None:
    """Free that range of a file; it reads as zeros. Not by truncating: who still reads there would be killed."""
    if stop <= start:
        return
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, start, stop - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
