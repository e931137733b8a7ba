"""Pages of new memory, made before they are received into.

The kernel makes a page when it is first written. Left to the copy from a socket, that is a fault for each page, which
costs a joiner more than the copy; asked for beforehand, many are made at once.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE (5.14), which Python has no name for."""

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def make_pages(target: memoryview) -> bool:
    """Have the pages of writable memory made, whose content stays what it is. False where that cannot be had.

    The first and the last may be shared with memory around it, to which nothing happens either.
    """
    if _libc is None or not target:
        return False
    start = ctypes.addressof(ctypes.c_char.from_buffer(target))
    first = start - start % mmap.PAGESIZE
    size = start + len(target) - first
    return bool(_libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _POPULATE_WRITE) == 0)
