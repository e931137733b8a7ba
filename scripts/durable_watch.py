"""Where a write of a durable snapshot is, by the file operations that Python reports, and a death at a given moment.

Nothing of the writer is replaced: an audit hook sees each operation right before it happens.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_train.replica.durable.folder import MANIFEST
from scripts.durable_plan import Moment, Phase

_WRITING, _IN_PLACE = ".writing-", "step-"
_METADATA = (".metadata", ".metadata.tmp")
_PHASES = list(Phase)
_IN_A_TREE = ("os.remove", "os.rmdir")
_SWITCH_S = 1e-5


def phase_of(operation: str, path: Path, *, reads: bool, before: Phase) -> Phase | None:
    """The phase that a file operation belongs to; None if it is none of the writer's.

    Args:
        operation: the name of Python's audit event.
        path: its first argument.
        reads: whether it opens a file to read it, or a folder.
        before: the phase so far; what is removed within a tree is known by its name alone.
    """
    name = path.name
    match operation:
        case "shutil.rmtree":
            return Phase.LEFTOVERS if name.startswith(_WRITING) else Phase.OLD
        case "os.remove" | "os.rmdir":
            return before if before in (Phase.LEFTOVERS, Phase.OLD) else None
        case "os.mkdir":
            return Phase.TENSORS if name.startswith(_WRITING) else None
        case "os.rename":
            return Phase.METADATA if name in _METADATA else Phase.RENAME
        case "os.listdir":
            return Phase.CHECKSUMS if name.startswith(_WRITING) else Phase.OLD
        case "open":
            return _phase_of_open(path, reads=reads, before=before)
    return None


def _phase_of_open(path: Path, *, reads: bool, before: Phase) -> Phase | None:
    name = path.name
    if name == MANIFEST:
        return Phase.OLD if reads else Phase.MANIFEST
    if name in _METADATA:
        return Phase.CHECKSUMS if reads else Phase.METADATA
    if name.endswith(".distcp"):
        return Phase.CHECKSUMS if reads else Phase.TENSORS
    if name.startswith(_WRITING):
        # To be removed, or made lasting once its manifest is there.
        return before if before is Phase.LEFTOVERS else Phase.MANIFEST
    if name.startswith(_IN_PLACE):
        return Phase.OLD
    return Phase.RENAME


class Watch:
    """Follows this process's writes below a folder, and ends it with SIGKILL at a moment. Stays until it has."""

    def __init__(self, folder: Path, moment: Moment, size: int, tell: Callable[[Phase], None]) -> None:
        """
        Args:
            size: bytes of the tensors that this rank writes.
            tell: told of the phase in which it dies, right before it does.
        """
        self._folder = str(folder)
        self._moment = moment
        self._size = size
        self._tell = tell
        self._phase = _PHASES[0]
        self._count = -1
        self._guard = threading.Lock()
        self._dying = False

    def arm(self) -> None:
        """From here on operations count."""
        # The one who looks how far a file has come must get its turn while it is written.
        sys.setswitchinterval(_SWITCH_S)
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._dying or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        path = Path(os.fspath(arguments[0]))
        if not str(path).startswith(self._folder) and event not in _IN_A_TREE:
            return
        reads = event == "open" and (arguments[1] is None or "w" not in arguments[1])
        with self._guard:
            phase = phase_of(event, path, reads=reads, before=self._phase)
            if phase is None:
                return
            self._count = self._count + 1 if phase is self._phase else 0
            self._phase = phase
            here, count = _PHASES.index(phase), self._count
        moment = self._moment
        aimed = _PHASES.index(moment.phase)
        if here > aimed:
            self._die(phase)
        elif moment.phase is Phase.TENSORS and path.name.endswith(".distcp") and here == aimed:
            threading.Thread(target=self._die_at_size, args=(path,), name="death", daemon=True).start()
        elif here == aimed and moment.phase is not Phase.TENSORS and count >= moment.operation:
            self._die(phase)

    def _die(self, phase: Phase) -> None:
        self._dying = True
        if self._moment.lag_s:
            threading.Thread(target=self._die_late, args=(phase,), name="death", daemon=True).start()
        else:
            self._end(phase)

    def _die_late(self, phase: Phase) -> None:
        time.sleep(self._moment.lag_s)
        self._end(phase)

    def _die_at_size(self, path: Path) -> None:
        wanted = int(self._moment.share * self._size)
        size: int | None = None
        while size is None or size < wanted:
            before, size = size, _size_of(path)
            if size is None and before is not None:
                # It was put in its place, or removed because the other rank had failed.
                break
        self._end(self._phase)

    def _end(self, phase: Phase) -> None:
        self._dying = True
        self._tell(phase)
        os.kill(os.getpid(), signal.SIGKILL)


def _size_of(path: Path) -> int | None:
    """Of a file, in bytes; None if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return None
