"""How a rank asks its peers: how they stand, and for a state that they have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import torch

from elastic_train.peer_ckpt.request import Connection, RequestFailed, ask
from elastic_train.peer_ckpt.tls import Tls
from elastic_train.peer_ckpt.transfer import (
    Allocate,
    Donor,
    Fetched,
    OnProgress,
    Replace,
    Transfer,
    TransferFailed,
    Unwanted,
)

__all__ = ["Allocate", "Donor", "Fetched", "PeerClient", "TransferFailed", "Unwanted"]

_STREAMS = 2
"""Connections to a donor: while the parts of one are checked, those of the other arrive."""
_IDLE_S = 10.0


def _on_host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _nobody(lost: Collection[Donor]) -> Sequence[Donor]:
    return ()


def _unseen(received: int, total: int, by_donor: Mapping[Donor, int]) -> None:
    return


class PeerClient:
    """Asks any number of peers; may be used from several threads."""

    def __init__(self, token: str, *, channel_device: torch.device | None = None, tls: Tls | None = None) -> None:
        """
        Args:
            channel_device: where the tensors of channels are, by which states are fetched; None: by connections alone.
        """
        self._token = token
        self._channel_device = channel_device
        self._tls = tls

    def status(
        self, address: str, attempt: str = "", dead: Iterable[int] = (), timeout_s: float = 0.5
    ) -> dict[str, Any] | None:
        """How the peer at ``address`` stands; None if it does not answer, which proves nothing about it.

        Args:
            attempt: the attempt that is asked about.
            dead: slots that the asker knows to be dead in it.
        """
        query = urlencode({"attempt": attempt, "dead": ",".join(map(str, sorted(dead)))})
        try:
            answer = ask(address, f"/status?{query}", self._token, timeout_s=timeout_s, tls=self._tls)
        except RequestFailed:
            return None
        return answer if isinstance(answer, dict) else None

    def fetch(
        self,
        donors: Sequence[Donor],
        sections: Sequence[str],
        *,
        want: int,
        timeout_s: float,
        shared: Collection[str] = (),
        joiner: str = "",
        streams: int = _STREAMS,
        idle_s: float = _IDLE_S,
        replace: Replace = _nobody,
        on_progress: OnProgress = _unseen,
        alive: Callable[[], None] = lambda: None,
        into: Allocate = _on_host,
    ) -> Fetched:
        """The state after an outer step, from all donors that have it, into new host tensors.

        A donor is given up when it cannot be reached, says nothing for too long, sends what is damaged, writes the
        memory anew, has other tensors than the first that answered, or has gone past that outer step. One that has
        not come to it yet is waited for.

        Args:
            donors: the same rank of several replicas; the first one that lives is the primary.
            sections: those to fetch, in the order in which they are to be had.
            want: the outer step.
            timeout_s: bound on everything.
            shared: sections that are equal on all donors, and come from all of them. The others come from the
                primary alone, and so does the header.
            joiner: who fetches, "<slot>.<incarnation>"; needed for ``taken``.
            streams: connections to each donor.
            idle_s: how long a donor may say nothing.
            replace: asked in this thread for other donors each time that some were lost.
            on_progress: called in this thread, at least five times a second, also if nothing arrives. What is in
                place can become less again: when the primary is replaced.
            alive: the same; what it raises ends the transfer.
            into: called in this thread for the memory of each tensor.

        Raises:
            Unwanted: all donors have gone past that outer step.
            TransferFailed: it did not arrive whole.
            ValueError: this cannot be fetched by anybody.
        """

        def connect(address: str) -> Connection:
            return Connection(address, self._token, idle_s=idle_s, tls=self._tls)

        transfer = Transfer(
            connect,
            sections,
            want=want,
            shared=shared,
            joiner=joiner,
            timeout_s=timeout_s,
            idle_s=idle_s,
            streams=streams,
            into=into,
            channel_device=self._channel_device,
        )
        return transfer.run(donors, replace, on_progress, alive)

    def taken(self, donor: Donor, outer_step: int, joiner: str, timeout_s: float = 1.0) -> bool:
        """Tell a donor that its state is in place here, and sound. Whether it has heard of it.

        Args:
            joiner: as it was named in the transfer.
        """
        query = urlencode({"outer_step": outer_step, "for": joiner})
        try:
            ask(donor.address, f"/taken?{query}", self._token, timeout_s=timeout_s, body={}, tls=self._tls)
        except RequestFailed:
            return False
        return True
