"""Writes durable snapshots beside the training: one at a time, in a thread of its own.

What is written was copied before, so training goes on meanwhile. A write that fails costs the snapshot and nothing
else: the disk is the last resort of a run whose replicas live on.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from elastic_train.device import side_stream
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
        device: torch.device,
        control: ControlGroup,
        on_saved: Callable[[DurableSnapshot, float], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """
        Args:
            folder: where the snapshots go.
            keep: how many that a run can go on from stay, the newest; 0: all.
            device: this rank's. torch's writer looks at it even if all tensors are on the host.
            on_saved: called on rank 0, from another thread, with a snapshot that is in its place and the seconds
                that it took.
            on_failed: called on rank 0, from another thread, with a sentence.
        """
        self._folder = folder
        self._slot = slot
        self._staging = staging_folder(folder, slot, incarnation)
        self._keep = keep
        self._device = device
        self._control = control
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._group = _new_group()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if control.rank == 0:
            # What earlier incarnations left; if it cannot be removed now, the first snapshot says so.
            with contextlib.suppress(OSError):
                clear_stagings(folder, slot)

    def is_busy(self) -> bool:
        """Whether any rank still writes the last snapshot."""
        return self._control.any(self._thread is not None and self._thread.is_alive())

    def start(self, state: Mapping[str, Any], facts: Facts) -> None:
        """Write ``state``, host tensors that nobody changes any more; waits for the last snapshot, if need be."""
        self.join()
        if self._control.any(self._error is not None):
            # Some ranks may have failed within an exchange that others never came to.
            dist.destroy_process_group(self._group)
            self._group = _new_group()
        self._error = None
        self._thread = threading.Thread(target=self._write, args=(state, facts), name="durable", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until the last snapshot is in its place.

        Raises:
            NotWritten: it is not.
        """
        self.join()
        if self._error is not None:
            raise NotWritten(f"the snapshot could not be written: {what_failed(self._error)}") from self._error

    def close(self) -> None:
        """Give what is being written a moment to end."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _write(self, state: Mapping[str, Any], facts: Facts) -> None:
        began, leads = time.monotonic(), self._control.rank == 0
        try:
            with side_stream(self._device):
                with self._all_fail_together():
                    # Nobody may write before what was there is cleared away.
                    if leads:
                        clear_stagings(self._folder, self._slot)
                dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(self._staging), process_group=self._group)
                with self._all_fail_together():
                    snapshot = finish(self._staging, facts, keep=self._keep) if leads else None
            if snapshot is not None:
                self._on_saved(snapshot, time.monotonic() - began)
        except BaseException as error:  # torch's CheckpointException is no Exception
            self._error = error
            logger.exception("the snapshot of step %d could not be written", facts.step)
            if leads:
                shutil.rmtree(self._staging, ignore_errors=True)
                self._on_failed(f"the snapshot of step {facts.step} could not be written: {what_failed(error)}")

    @contextlib.contextmanager
    def _all_fail_together(self) -> Iterator[None]:
        """What ranks do inside, each by itself; a rank that fails would leave the others waiting for it.

        Raises:
            NotWritten: another rank failed.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:
            error = failure
        done = torch.tensor([error is None], dtype=torch.int32)
        dist.all_reduce(done, dist.ReduceOp.MIN, group=self._group)
        if error is not None:
            raise error
        if not done.item():
            raise NotWritten("another rank failed; its log says why")


def _new_group() -> dist.ProcessGroup:
    """The writers' own: what goes on in their thread must not come between the exchanges of those who train."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=_WRITE_S))
