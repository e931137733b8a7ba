"""A rank's host copies in memory that outlives its process: the next incarnation may find its own state there.

The memory is a file without a name, which the supervisor of the rank made and holds (``replica.memory_files``). The
rank maps it and lets its tensors lie in it. A part of it can also be sent without a copy, for it has a descriptor.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from elastic_train.device import host_memory, page_lock
from elastic_train.peer_ckpt.layout import Place
from elastic_train.peer_ckpt.memory_index import ALIGN, HEAD_BYTES, Index, clear_index, write_index
from elastic_train.peer_ckpt.snapshot import Snapshot

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
"""Bytes that small tensors share: pages are taken, and locked, by the piece."""
_SMALL = _CHUNK // 4


@dataclass(frozen=True, kw_only=True)
class FilePlace:
    """Where some memory lies in a file."""

    file: int
    """Descriptor."""
    start: int
    """Its first byte."""


class SharedMemory:
    """The memory of one rank in one incarnation. What was allocated stays so until the file goes."""

    def __init__(self, path: str, *, pin: bool = False, room: int | None = None) -> None:
        """
        Args:
            path: of the file, which must be empty, as ``/proc/<pid>/fd/<n>``.
            pin: page-lock what is allocated, for copies from and to an accelerator.
            room: the most that can be allocated, in bytes; None: as much as the machine has memory.

        Raises:
            OSError: it cannot be opened or mapped.
        """
        self._pin = pin
        self._end = HEAD_BYTES
        self._chunk = range(0)
        self._kept: Snapshot | None = None
        self._full = False
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        """Descriptor."""
        weakref.finalize(self, os.close, self.file)
        # Mapped once and for all, so that a tensor's place is known from its address; only what is allocated exists.
        self._size = HEAD_BYTES + _up(host_memory() if room is None else room, mmap.PAGESIZE)
        os.ftruncate(self.file, self._size)
        # So that clearing the index needs no memory that might not be there.
        os.posix_fallocate(self.file, 0, mmap.PAGESIZE)
        self._map = mmap.mmap(self.file, self._size)
        # A dump of the process would make all of it exist.
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous host tensor whose content does not matter; of ordinary memory where there is no room left."""
        size = math.prod(shape) * dtype.itemsize
        try:
            start = self._take(size) if size else 0
        except OSError as error:
            if not self._full:
                logger.warning("no room for %d bytes in shared memory, so it is ordinary memory: %s", size, error)
            self._full = True
            return torch.empty(shape, dtype=dtype, pin_memory=self._pin)
        return tensor_at(self._map, start, shape, dtype)

    def locate(self, tensor: torch.Tensor) -> FilePlace | None:
        """Where a contiguous tensor lies in the file; None if it does not."""
        start = tensor.data_ptr() - self._address
        if start < HEAD_BYTES or start + tensor.nbytes > self._end:
            return None
        return FilePlace(file=self.file, start=start)

    def keep(self, snapshot: Snapshot) -> None:
        """Let the next incarnation find this snapshot, instead of the one before, until ``forget``.

        If not all of it lies here, it finds none.
        """
        self.forget(self._kept)
        sections: dict[str, dict[str, tuple[Place, int]]] = {}
        for section, tensors in snapshot.sections.items():
            sections[section] = {}
            for name, tensor in tensors.items():
                found = self.locate(tensor)
                if found is None and tensor.nbytes:
                    return
                place = Place(section=section, name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
                sections[section][name] = place, found.start if found is not None else 0
        try:
            write_index(self.file, Index(header=snapshot.header, sections=sections))
        except (OSError, ValueError) as error:
            logger.warning("the next incarnation will not find this state: %s", error)
            return
        self._kept = snapshot

    def forget(self, snapshot: Snapshot | None) -> None:
        """Memory of this snapshot is about to be written: nobody will find it any more. Raises OSError."""
        if snapshot is not None and snapshot is self._kept:
            clear_index(self.file)
            self._kept = None

    def _take(self, size: int) -> int:
        """Room for so many bytes; where it begins. Raises OSError."""
        if size > _SMALL:
            return self._grow(size)
        start = _up(self._chunk.start, ALIGN)
        if start + size > self._chunk.stop:
            start = self._grow(_CHUNK)
            self._chunk = range(start, start + _CHUNK)
        self._chunk = range(start + size, self._chunk.stop)
        return start

    def _grow(self, size: int) -> int:
        """New pages for so many bytes. A tensor never lies in two of these, for no copy may cross locked ranges."""
        start, size = self._end, _up(size, mmap.PAGESIZE)
        if start + size > self._size:
            raise OSError(f"{self._size - start} bytes are left")
        # Without it a page that is not there any more would end the process when it is touched.
        os.posix_fallocate(self.file, start, size)
        self._end += size
        if self._pin:
            try:
                page_lock(self._address + start, size)
            except RuntimeError as error:
                self._pin = False
                logger.warning("shared memory cannot be page-locked, so copies are slower: %s", error)
        return start


def open_memory(path: str, *, pin: bool) -> SharedMemory | None:
    """The memory at that path (""; there is none); None where it cannot be used, which is logged."""
    if not path:
        return None
    try:
        return SharedMemory(path, pin=pin)
    except (OSError, ValueError) as error:
        logger.warning("no shared memory for what this rank keeps on its host, so it is ordinary memory: %s", error)
        return None


def tensor_at(memory: mmap.mmap, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose bytes begin at ``start``, which is a multiple of ``ALIGN``; it keeps the mapping alive."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(dtype).view(shape)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
