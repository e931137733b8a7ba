"""What a rank shows its peers: its state after the last outer step, copied while the rank trains on.

Anchor and momentum are shown where they lie, for they change only when a later outer step is computed into the
memory of an earlier one. The inner optimizer's moments change with every inner step: they are copied beside the
forward and backward pass, and the optimizer waits for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic_train.device import side_stream
from elastic_train.diloco.flat import FlatFragment
from elastic_train.diloco.trainee import Trainee
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import combine, export_tensors, hash_tensors
from elastic_train.peer_ckpt.shared_memory import SharedMemory
from elastic_train.peer_ckpt.snapshot import Snapshot

_HOST = torch.device("cpu")

OUTER = "outer"
INNER = "inner"


class _Shelf:
    """Host memory for what one snapshot cannot show where it lies; used again for a later one."""

    def __init__(self) -> None:
        self.moments: dict[str, torch.Tensor] = {}
        self.mirrors: dict[str, torch.Tensor] = {}
        """Of anchor and momentum, if they lie on an accelerator."""
        self.snapshot: Snapshot | None = None
        """What was put into it last."""


class Publication:
    """The snapshots of one rank: the last one, and with two shelves the one before it."""

    def __init__(
        self,
        server: PeerServer,
        fragments: Sequence[FlatFragment],
        trainee: Trainee,
        *,
        snapshots: int = 2,
        memory: SharedMemory | None = None,
        on_shown: Callable[[Mapping[str, Any]], None] = lambda header: None,
    ) -> None:
        """
        Args:
            snapshots: how many outer steps are shown at the same time. Two give a peer the time between two outer
                steps, and more, for its transfer; each costs the memory of the inner moments.
            memory: where copies are made, and where the next incarnation of this rank may find the last snapshot;
                None: in ordinary memory, and it does not.
            on_shown: called with the header of each snapshot once it can be had, beside the training.
        """
        self._server = server
        self._fragments = fragments
        self._trainee = trainee
        self._memory = memory
        self._on_shown = on_shown
        self._shelves = [_Shelf() for _ in range(snapshots)]
        self._shown: list[Snapshot] = []
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._is_shown = threading.Event()
        self._error: BaseException | None = None

    def publish(self, header: Mapping[str, Any]) -> None:
        """Show the state as it is now. It must stay so until :meth:`finish`.

        Args:
            header: what says which state it is: outer_step, rank_hash, state_hash, history; the trainer's counters,
                and the hash of rank_hash and the moments, are added.
        """
        self.settle()
        shelf = self._shelves.pop(0)
        self._shelves.append(shelf)
        self._clear(shelf)
        whole = {**header, "extra": self._trainee.counters()}
        moments = dict(self._trainee.moments())
        self._copied.clear()
        self._is_shown.clear()
        self._thread = threading.Thread(target=self._make, args=(shelf, whole, moments), name="snapshot", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until what was to be published is copied. Before the inner optimizer's step, at the latest."""
        if self._thread is None:
            return
        self._copied.wait()
        self._raise()

    def settle(self) -> None:
        """Wait until what was to be published is shown."""
        if self._thread is not None:
            # Not for the thread itself, which tells of it afterwards.
            self._is_shown.wait()
            self._thread = None
            self._raise()

    @property
    def newest(self) -> Snapshot:
        """The last one that was published, once it is shown."""
        self.settle()
        return self._shown[-1]

    def retire(self, section: str) -> None:
        """Nothing that was shown under that section is valid any more."""
        self.settle()
        for snapshot in self._shown:
            self._give_up(snapshot, section)

    def retire_candidate_of(self, fragment: FlatFragment) -> None:
        """The candidate of ``fragment`` is about to be written: older snapshots may show its memory."""
        self.settle()
        for snapshot in self._shown:
            held = snapshot.sections[OUTER].values()
            if any(tensor is fragment.candidate.anchor for tensor in held):
                self._give_up(snapshot, OUTER)
        self._shown = [snapshot for snapshot in self._shown if not snapshot.is_retired(OUTER)]

    def _clear(self, shelf: _Shelf) -> None:
        """Its memory is about to be written."""
        if shelf.snapshot is None:
            return
        for section in (INNER, OUTER) if shelf.mirrors else (INNER,):
            self._give_up(shelf.snapshot, section)

    def _give_up(self, snapshot: Snapshot, section: str) -> None:
        """Memory of that section is about to be written: nobody may take it for the state any more."""
        if self._memory is not None:
            self._memory.forget(snapshot)
        if not snapshot.is_retired(section):
            snapshot.retire(section)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _make(self, shelf: _Shelf, header: Mapping[str, Any], moments: Mapping[str, torch.Tensor]) -> None:
        device = next((tensor.device for tensor in moments.values() if tensor.device.type != "cpu"), _HOST)
        try:
            with side_stream(device):
                inner, outer = self._copy(shelf, moments)
            self._copied.set()
            # From here on the trainer may go on.
            whole = {**header, "whole_hash": combine([header["rank_hash"], hash_tensors(inner)])}
            shelf.snapshot = Snapshot(whole, {INNER: inner, OUTER: outer})
            self._shown.append(shelf.snapshot)
            if self._memory is not None:
                self._memory.keep(shelf.snapshot)
            self._server.publish(shelf.snapshot)
        except BaseException as error:
            self._error = error
            return
        finally:
            self._copied.set()
            self._is_shown.set()
        self._on_shown(whole)

    def _copy(
        self, shelf: _Shelf, moments: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What the sections of the next snapshot hold."""
        self._trainee.at_point("snapshot")
        inner = {name: self._host_copy(shelf.moments, name, tensor) for name, tensor in moments.items()}
        outer: dict[str, torch.Tensor] = {}
        for index, fragment in enumerate(self._fragments):
            for kind, tensor in (("anchor", fragment.committed.anchor), ("momentum", fragment.committed.momentum)):
                name = f"{index}.{kind}"
                on_host = tensor.device.type == "cpu"
                outer[name] = tensor if on_host else self._host_copy(shelf.mirrors, name, tensor)
        return inner, outer

    def _host_copy(self, buffers: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` copied into the host buffer of that name, which is made once."""
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = buffers[name] = self._allocate(tensor)
        return buffer.copy_(tensor)

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for one like that."""
        if self._memory is not None:
            return self._memory.allocate(tuple(tensor.shape), tensor.dtype)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def whole_hash(rank_hash: int, moments: Mapping[str, torch.Tensor]) -> int:
    """Of all tensors that a joiner's rank takes over: its outer state's hash, and its live moments."""
    return combine([rank_hash, hash_tensors(export_tensors(moments.items()))])
