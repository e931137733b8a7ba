"""What happened, one JSON object a line, append-only.

The log is the one place where the parts of a run meet afterwards: metrics, summary, live view and the tests
read nothing else. So it has to survive what it describes. A record is a single write to an append-only file,
made before the writer acts; a process killed in the middle of a write leaves at worst one torn line, which
never damages a neighbour.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from elastic_train.clock import Clock

logger = logging.getLogger(__name__)

Record = dict[str, Any]

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "run_started": "the controller began the run",
        "run_degraded": "the run goes on with fewer replicas than it was asked for",
        "run_restored": "all replicas took a durable snapshot; commits above its outer step are superseded",
        "run_finished": "the run ended",
        "lighthouse_started": "the quorum service listens, at first or again",
        "lighthouse_lost": "the quorum service is gone",
        "allocation_requested": "hosts were asked for",
        "allocation_granted": "hosts were given",
        "allocation_lost": "hosts were taken away",
        "procs_started": "the processes of an incarnation run, new ones or those of its standby",
        "standby_started": "the processes of a standby run; they begin to import",
        "standby_ready": "the processes of a standby have everything imported and wait for a failure",
        "replica_ready": "a replica has built its trainers",
        "replica_state": "a replica changed its state",
        "quorum_changed": "a quorum has other members than the one before",
        "sync_committed": "a replica took an outer step",
        "sync_retried": "an outer sync failed and is tried again",
        "doubt_settled": "a replica that saw no vote pass learned from its peers whether its sync was committed",
        "fenced": "a replica was kept out of the average",
        "caught_up": "a replica that was one outer step behind took a peer's state",
        "failure_detected": "an incarnation of a replica failed",
        "restart_scheduled": "a failed replica will be started again",
        "replica_retired": "a replica was given up",
        "donor_selected": "the peers that give a joiner its state were chosen",
        "heal_started": "a joiner began to fetch its state",
        "transfer_progress": "part of a state arrived",
        "heal_finished": "a joiner has its donor's state",
        "state_served": "a donor gave its state to a joiner",
        "heal_failed": "a replica that needed a peer's state got none",
        "joined": "a joiner entered a quorum",
        "first_step": "an incarnation completed its first inner step",
        "checkpoint_saved": "a durable snapshot was written",
        "fault_injected": "a fault is about to act, on purpose",
        "drain_started": "a replica was asked to leave at its next sync",
        "replica_left": "a replica that was asked to leave has left, with the state of its last commit",
        "replica_finished": "a replica trained to the end",
        "control": "a person asked for something in a living run",
        "note": "something that a reader of the log should know",
    }
)

CAUSES = frozenset(
    {
        "proc_exit",
        "signal",
        "exception",
        "device_error",
        "comm_error",
        "hang",
        "heartbeat_lost",
        "host_lost",
        "preempted",
        "start_timeout",
        "heal_failed",
        "diverged",
        "non_finite",
        "data_error",
        "config_error",
    }
)

_RESERVED = frozenset({"t", "seq", "event"})


def plain(value: Any) -> Any:
    """`value` as strict JSON holds it: NaN and infinity become null, a type that JSON lacks becomes text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return str(value)


def _make_record(event: str, t: float, context: Mapping[str, Any], fields: Mapping[str, Any]) -> Record:
    if event not in EVENTS:
        raise ValueError(f"unknown event {event!r}: add it to elastic_train.events.EVENTS")
    if taken := _RESERVED & (context.keys() | fields.keys()):
        raise ValueError(f"event {event!r}: the field {min(taken)!r} is set by the log itself")
    record: Record = {"t": round(t, 6), "event": event}
    record.update({key: plain(value) for key, value in {**context, **fields}.items() if value is not None})
    return record


class LineFile:
    """An append-only file of JSON lines, safe for several writing processes and threads.

    Opening raises OSError where the file cannot be written. Later errors (a full disk) are logged once and
    swallowed: telemetry never stops training.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        # A writer that was killed in mid-write left a torn line: ours must not be glued to it.
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._complained = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line with one write."""
        line = json.dumps(plain(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            self._torn = False
        except OSError as error:
            self._torn = True
            if not self._complained:
                self._complained = True
                logger.error("%s: cannot write, records are lost from here on: %s", self.path, error)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class EventWriter:
    """Writes the events of one process into its host's segment."""

    def __init__(self, path: Path, clock: Clock, **context: Any) -> None:
        """`context` (replica, incarnation, rank) goes into every event.

        Raises OSError if `path` cannot be written.
        """
        self._file = LineFile(path)
        self._clock = clock
        self._context = context

    def emit(self, event: str, /, **fields: Any) -> Record:
        """Writes one event and returns it; fields that are None are left out.

        Raises ValueError for an unknown name.
        """
        record = _make_record(event, self._clock.now(), self._context, fields)
        self._file.append(record)
        return record

    def bind(self, **context: Any) -> EventWriter:
        """A writer to the same file that knows more context."""
        bound = copy.copy(self)
        bound._context = {**self._context, **context}
        return bound

    def close(self) -> None:
        """Closes the file, also for every writer bound to it."""
        self._file.close()


class EventLog:
    """The run's merged log on the controller's side: numbers the events and tells its subscribers."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """A log that exists is continued. Raises OSError if `path` cannot be written."""
        self._seq = max((record.get("seq", 0) for record in read_all(path)), default=0)
        self._file = LineFile(path)
        self._clock = clock
        self._subscribers: list[Callable[[Record], None]] = []
        self._lock = threading.RLock()

    def append(self, record: Mapping[str, Any]) -> Record:
        """Adds an event that another process wrote, with the next `seq`; returns what was written."""
        with self._lock:
            self._seq += 1
            numbered = {**record, "seq": self._seq}
            self._file.append(numbered)
            for subscriber in self._subscribers:
                try:
                    subscriber(numbered)
                except Exception:
                    logger.exception("a subscriber of the event log failed on %r", numbered.get("event"))
            return numbered

    def emit(self, event: str, /, **fields: Any) -> Record:
        """Adds an event of the controller itself. Raises ValueError for an unknown name."""
        return self.append(_make_record(event, self._clock.now(), {}, fields))

    def subscribe(self, callback: Callable[[Record], None]) -> None:
        """Calls `callback` with every event from now on, in the order of `seq`, on the adding thread."""
        with self._lock:
            self._subscribers.append(callback)

    def close(self) -> None:
        self._file.close()


def read_records(path: Path, offset: int, limit_bytes: int = 1 << 20) -> tuple[list[Record], int]:
    """The whole lines of `path` from byte `offset` on, and the offset to go on from.

    Reads about `limit_bytes`, more only if a single line is longer. A last line without its end is left for
    the next call. A line that is no JSON object (its writer was killed) is skipped. A file that is not there
    yet has no lines.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return [], offset
    with file:
        file.seek(offset)
        data = file.read(limit_bytes)
        while b"\n" not in data and (more := file.read(limit_bytes)):
            data += more
    whole = data[: data.rfind(b"\n") + 1]
    records: list[Record] = []
    for line in whole.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            logger.warning("%s: skipped a damaged line of %d bytes", path, len(line))
    return records, offset + len(whole)


def read_all(path: Path) -> list[Record]:
    """Every whole record of `path`."""
    records: list[Record] = []
    offset = 0
    while True:
        batch, after = read_records(path, offset)
        if after == offset:
            return records
        records += batch
        offset = after
