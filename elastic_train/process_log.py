"""Where a process prints: into a file of its run, also what native code prints."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def print_to(path: Path) -> None:
    """Send stdout, stderr and logging of this process to the end of ``path``, for good."""
    descriptor = _open(path)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr, force=True)


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Send stderr and logging of this process to the end of ``path`` for a while; stdout stays a person's."""
    descriptor, original = _open(path), os.dup(2)
    sys.stderr.flush()
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr, force=True)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
