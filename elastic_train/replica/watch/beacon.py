"""The beacon of a rank: a few bytes of shared memory that tell, from outside, whether the rank gets anywhere.

A process that holds the GIL or was stopped cannot answer a message, and no supervision reports it. So each rank
maps a small file; its main thread writes where it is, a background thread writes that Python still runs, and
the ReplicaActor reads both from another process. CLOCK_MONOTONIC is one clock for all processes of a host.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_LAYOUT = struct.Struct("=qqdd")
_CHECKSUM = struct.Struct("=I")
_SIZE = _LAYOUT.size + _CHECKSUM.size
_PULSE_S = 0.25
_BUILD_PATIENCE = 4
"""Loading a large library holds the GIL, for long when many processes start on few cores."""


class Phase(IntEnum):
    """What the main thread of a rank is doing; each phase has its own time budget."""

    BUILD = 0
    """Imports, model, data, and the first inner step (compilation)."""
    STEP = 1
    SYNC = 2
    """The data phase of an outer sync: bounded by the timeouts of its operations."""
    QUORUM = 3
    """Waiting for peers: bounded by them, not by this rank."""
    IDLE = 4
    """Built and waiting for the release, or trained to the end."""
    SAVE = 5
    """Writing a durable snapshot."""
    EVALUATE = 6
    """Passing over the validation data."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One reading of a beacon. Times are seconds of CLOCK_MONOTONIC."""

    phase: Phase
    step: int
    progress_at: float
    """When the main thread last moved on."""
    alive_at: float
    """When any Python code last ran."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Seconds that a rank may spend without moving on."""

    build_s: float
    """Also for a durable snapshot and an evaluation, which take as long as a start may."""
    step_s: float
    silence_s: float
    """Without running any Python code at all."""


def hang(sample: Sample, now: float, budgets: Budgets) -> str | None:
    """Why this rank counts as hung, in words; None while it does not."""
    silent, stuck = now - sample.alive_at, now - sample.progress_at
    patience = _BUILD_PATIENCE if sample.phase is Phase.BUILD else 1
    if silent > budgets.silence_s * patience:
        return (
            f"ran no Python code for {silent:.1f} s in phase {sample.phase.name.lower()} at step {sample.step} "
            "(stopped, or something holds the GIL)"
        )
    match sample.phase:
        case Phase.BUILD | Phase.SAVE | Phase.EVALUATE:
            budget = budgets.build_s
        case Phase.STEP | Phase.SYNC:
            budget = budgets.step_s
        case _:
            return None
    if stuck > budget:
        return f"did not move on for {stuck:.1f} s in phase {sample.phase.name.lower()} at step {sample.step}"
    return None


class Beacon:
    """The writing side, in the rank itself. ``phase`` and ``step`` are the main thread's."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._phase, self._step, self._progress_at = Phase.BUILD, 0, time.monotonic()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, self._record(self._progress_at))
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="beacon", daemon=True)
        self._pulse.start()

    def moved(self, phase: Phase, step: int | None = None) -> None:
        """The main thread has moved on, to ``phase``."""
        with self._lock:
            self._phase = phase
            self._step = self._step if step is None else step
            self._progress_at = time.monotonic()
            self._memory[:] = self._record(self._progress_at)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """``phase`` inside, the phase before it again afterwards."""
        before = self._phase
        self.moved(phase)
        try:
            yield
        finally:
            self.moved(before)

    def close(self) -> None:
        self._stop.set()
        self._pulse.join()
        self._memory.close()

    def _beat(self) -> None:
        while not self._stop.wait(_PULSE_S):
            with self._lock:
                self._memory[:] = self._record(time.monotonic())

    def _record(self, alive_at: float) -> bytes:
        """The sample with its checksum: a reader in another process may meet half of a write."""
        body = _LAYOUT.pack(self._phase, self._step, self._progress_at, alive_at)
        return body + _CHECKSUM.pack(zlib.crc32(body))


class BeaconReader:
    """The reading side, in the ReplicaActor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Sample | None = None

    def read(self) -> Sample | None:
        """The beacon's last whole sample; None while there is no beacon yet."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        body, checksum = data[: _LAYOUT.size], data[_LAYOUT.size :]
        if len(data) == _SIZE and _CHECKSUM.pack(zlib.crc32(body)) == checksum:
            phase, step, progress_at, alive_at = _LAYOUT.unpack(body)
            self._last = Sample(phase=Phase(phase), step=step, progress_at=progress_at, alive_at=alive_at)
        return self._last

    def remove(self) -> None:
        """Remove the beacon of a rank that is gone."""
        self._path.unlink(missing_ok=True)
