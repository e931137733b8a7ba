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

from elastic_train.config import RunConfig

_LAYOUT = struct.Struct("=qqdd")
_CHECKSUM = struct.Struct("=I")
_SIZE = _LAYOUT.size + _CHECKSUM.size
_PULSE_S = 0.25
_START_PATIENCE = 4
"""Loading a large library holds the GIL, for long when many processes start on few cores, and so may compiling."""


class Phase(IntEnum):
    """What the main thread of a rank is doing; each phase has its own time budget."""

    BUILD = 0
    """Imports, model and data; in a joiner also its peers' state."""
    STEP = 1
    """An inner step after the first."""
    SYNC = 2
    """The data phase of an outer sync: bounded by the timeouts of its operations."""
    QUORUM = 3
    """Waiting for peers, however long they take; but the rank goes on looking for them."""
    IDLE = 4
    """Between two calls of the supervisor: built and waiting for the release, or trained to the end."""
    SAVE = 5
    """Writing a durable snapshot."""
    EVALUATE = 6
    """Passing over the validation data."""
    FIRST_STEP = 7
    """The first inner step of the incarnation, which may have to compile the model."""


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
    first_step_s: float
    step_s: float
    """Also from one operation of an outer sync to the next."""
    quorum_s: float
    evaluate_s: float
    save_s: float
    silence_s: float
    """Without running any Python code at all."""

    @classmethod
    def of(cls, config: RunConfig) -> Budgets:
        """What a config allows."""
        recovery, diloco = config.recovery, config.diloco
        quorum_s = recovery.hang_timeout_s
        if diloco.engine == "torchft":
            # Its wait is one call, in which a joiner also gets its state; ours looks around several times a second.
            quorum_s += diloco.quorum_timeout_s + max(diloco.timeout_s, config.peer_ckpt.timeout_s)
        return cls(
            build_s=recovery.start_hang_timeout_s,
            first_step_s=recovery.first_step_hang_timeout_s,
            step_s=recovery.hang_timeout_s,
            quorum_s=quorum_s,
            evaluate_s=recovery.evaluate_hang_timeout_s,
            save_s=recovery.save_hang_timeout_s,
            silence_s=recovery.silence_timeout_s,
        )

    def of_phase(self, phase: Phase) -> float | None:
        """From one step forward to the next; None where a rank has nothing to do."""
        match phase:
            case Phase.BUILD:
                return self.build_s
            case Phase.FIRST_STEP:
                return self.first_step_s
            case Phase.STEP | Phase.SYNC:
                return self.step_s
            case Phase.QUORUM:
                return self.quorum_s
            case Phase.EVALUATE:
                return self.evaluate_s
            case Phase.SAVE:
                return self.save_s
            case Phase.IDLE:
                return None

    def of_silence(self, phase: Phase) -> float:
        """Without a word of Python."""
        return self.silence_s * (_START_PATIENCE if phase in (Phase.BUILD, Phase.FIRST_STEP) else 1)


def hang(sample: Sample, now: float, budgets: Budgets) -> str | None:
    """Why this rank counts as hung, in words; None while it does not."""
    silent, stuck = now - sample.alive_at, now - sample.progress_at
    where = f"in phase {sample.phase.name.lower()} at step {sample.step}"
    if silent > budgets.of_silence(sample.phase):
        return f"ran no Python code for {silent:.1f} s {where} (stopped, or something holds the GIL)"
    budget = budgets.of_phase(sample.phase)
    if budget is not None and stuck > budget:
        return f"did not move on for {stuck:.1f} s {where}"
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
