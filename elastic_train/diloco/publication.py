"""What a rank shows its peers: its state after the last outer step, copied while the rank trains on.

Anchor and momentum are shown where they lie, for they change only when a later outer step is computed into the
memory of an earlier one. The inner optimizer's moments change with every inner step: they are copied beside the
forward and backward pass, and the optimizer waits for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_train.device import side_stream
from elastic_train.diloco.flat import FlatFragment
from elastic_train.diloco.trainee import Trainee
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import combine, export_tensors, hash_tensors
from elastic_train.peer_ckpt.snapshot import Snapshot

_HOST = torch.device("cpu")

OUTER = "outer"
INNER = "inner"


class Publication:
    """The snapshots of one rank."""

    def __init__(self, server: PeerServer, fragments: Sequence[FlatFragment], trainee: Trainee) -> None:
        self._server = server
        self._fragments = fragments
        self._trainee = trainee
        self._moments: dict[str, torch.Tensor] = {}
        self._mirrors: dict[str, torch.Tensor] = {}
        self._shown: list[Snapshot] = []
        self._copying: threading.Thread | None = None
        self._error: BaseException | None = None

    def publish(self, header: Mapping[str, Any]) -> None:
        """Show the state as it is now. It must stay so until :meth:`finish`.

        Args:
            header: what says which state it is: outer_step, rank_hash, state_hash, history; the trainer's counters,
                and the hash of rank_hash and the moments, are added.
        """
        self.finish()
        self.retire(INNER)
        if self._mirrors:
            # They are written anew now, not when the next candidate is.
            self.retire(OUTER)
        whole = {**header, "extra": self._trainee.counters()}
        moments = dict(self._trainee.moments())
        self._copying = threading.Thread(target=self._copy, args=(whole, moments), name="snapshot", daemon=True)
        self._copying.start()

    def finish(self) -> None:
        """Wait until what was to be published is copied. Before the inner optimizer's step, at the latest."""
        if self._copying is None:
            return
        self._copying.join()
        self._copying = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def retire(self, section: str) -> None:
        """Nothing that was shown under that section is valid any more."""
        for snapshot in self._shown:
            if not snapshot.is_retired(section):
                snapshot.retire(section)

    def retire_candidate_of(self, fragment: FlatFragment) -> None:
        """The candidate of ``fragment`` is about to be written: older snapshots may show its memory."""
        for snapshot in self._shown:
            held = snapshot.sections[OUTER].values()
            if not snapshot.is_retired(OUTER) and any(tensor is fragment.candidate.anchor for tensor in held):
                snapshot.retire(OUTER)
        self._shown = [snapshot for snapshot in self._shown if not snapshot.is_retired(OUTER)]

    def _copy(self, header: Mapping[str, Any], moments: Mapping[str, torch.Tensor]) -> None:
        device = next((tensor.device for tensor in moments.values() if tensor.device.type != "cpu"), _HOST)
        try:
            with side_stream(device):
                self._show(header, moments)
        except BaseException as error:
            self._error = error

    def _show(self, header: Mapping[str, Any], moments: Mapping[str, torch.Tensor]) -> None:
        self._trainee.at_point("snapshot")
        inner = {name: _copied(self._moments, name, tensor) for name, tensor in moments.items()}
        outer: dict[str, torch.Tensor] = {}
        for index, fragment in enumerate(self._fragments):
            for kind, tensor in (("anchor", fragment.committed.anchor), ("momentum", fragment.committed.momentum)):
                name = f"{index}.{kind}"
                on_host = tensor.device.type == "cpu"
                outer[name] = tensor if on_host else _copied(self._mirrors, name, tensor)
        whole = {**header, "whole_hash": combine([header["rank_hash"], hash_tensors(inner)])}
        snapshot = Snapshot(whole, {INNER: inner, OUTER: outer})
        self._shown.append(snapshot)
        self._server.publish(snapshot)


def whole_hash(rank_hash: int, moments: Mapping[str, torch.Tensor]) -> int:
    """Of all tensors that a joiner's rank takes over: its outer state's hash, and its live moments."""
    return combine([rank_hash, hash_tensors(export_tensors(moments.items()))])


def _copied(buffers: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` copied into the host buffer of that name, which is made once."""
    buffer = buffers.get(name)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        pin = tensor.device.type == "cuda"
        buffer = buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
    return buffer.copy_(tensor)
