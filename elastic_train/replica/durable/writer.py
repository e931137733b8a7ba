"""Writes durable snapshots beside the training: one at a time, in a thread of its own.

What is written was copied before, so training goes on meanwhile. A write that fails costs the snapshot and nothing
else: the disk is the last resort of a run whose replicas live on.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from elastic_train.diloco.control import ControlGroup
from elastic_train.replica.durable.content import what_failed
from elastic_train.replica.durable.folder import DurableSnapshot, Facts, clear_stagings, finish, staging_folder

logger = logging.getLogger(__name__)

_WRITE_S = 3600.0
"""How long a rank waits for the others' files: the disk may be slow, and nothing else waits for it."""
_CLOSE_S = 10.0


class NotWritten(RuntimeError):
    """A snapshot could not be written; the message says why."""


class SnapshotWriter:
    """Writes for one replica. Every rank has one, and calls each method together with the others."""

    def __init__(
        self,
        folder: Path,
        *,
        slot: int,
        incarnation: int,
        keep: int,
        control: ControlGroup,
        on_saved: Callable[[DurableSnapshot, float], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """
        Args:
            folder: where the snapshots go.
            keep: how many stay, the newest; 0: all.
            on_saved: called on rank 0, from another thread, with a snapshot that is in its place and the seconds
                that it took.
            on_failed: called on rank 0, from another thread, with a sentence.
        """
        self._folder = folder
        self._slot = slot
        self._staging = staging_folder(folder, slot, incarnation)
        self._keep = keep
        self._control = control
        self._on_saved = on_saved
        self._on_failed = on_failed
        # Its own: what goes on in the thread must not come between the exchanges of those who train.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_WRITE_S))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def is_busy(self) -> bool:
        """Whether any rank still writes the last snapshot."""
        return self._control.any(self._thread is not None and self._thread.is_alive())

    def start(self, state: Mapping[str, Any], facts: Facts) -> None:
        """Write ``state``, host tensors that nobody changes any more; waits for the last snapshot, if need be."""
        self._join()
        self._error = None
        self._thread = threading.Thread(target=self._write, args=(state, facts), name="durable", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last snapshot is in its place.

        Raises:
            NotWritten: it is not.
        """
        self._join()
        if self._error is not None:
            raise NotWritten(f"the snapshot could not be written: {what_failed(self._error)}") from self._error

    def close(self) -> None:
        """Give what is being written a moment to end."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, state: Mapping[str, Any], facts: Facts) -> None:
        began, leads = time.monotonic(), self._control.rank == 0
        try:
            if leads:
                clear_stagings(self._folder, self._slot)
            # Nobody may write before what was there is cleared away.
            dist.barrier(group=self._group)
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(self._staging), process_group=self._group)
            if leads:
                self._on_saved(finish(self._staging, facts, keep=self._keep), time.monotonic() - began)
        except BaseException as error:  # torch's CheckpointException is no Exception
            self._error = error
            logger.exception("the snapshot of step %d could not be written", facts.step)
            if leads:
                shutil.rmtree(self._staging, ignore_errors=True)
                self._on_failed(f"the snapshot of step {facts.step} could not be written: {what_failed(error)}")
