"""How a rank asks its peers: how they stand, and for the state of one that is ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import torch

from elastic_train.peer_ckpt.layout import HEADER_LIMIT, LENGTH_BYTES, Layout, LayoutError
from elastic_train.peer_ckpt.request import Answer, RequestFailed, ask, request
from elastic_train.peer_ckpt.shards import raw_bytes
from elastic_train.peer_ckpt.snapshot import Snapshot

_PIECE = 4 << 20

Accept = Callable[[Mapping[str, Any]], bool]
"""Whether a snapshot of that header is wanted."""

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors received so far, and of all."""


class TransferFailed(Exception):
    """A peer's state did not arrive whole; its text says why. Nothing of it may be used."""


class Unwanted(TransferFailed):
    """What the peer publishes now is not what was asked for; none of its tensors was fetched."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        super().__init__("it publishes another state")
        self.header = header


class PeerClient:
    """Asks any number of peers; may be used from several threads."""

    def __init__(self, token: str) -> None:
        self._token = token

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
            answer = ask(address, f"/status?{query}", self._token, timeout_s=timeout_s)
        except RequestFailed:
            return None
        return answer if isinstance(answer, dict) else None

    def fetch(
        self,
        address: str,
        sections: Sequence[str],
        timeout_s: float,
        on_progress: Progress | None = None,
        accept: Accept = lambda header: True,
    ) -> Snapshot:
        """What the peer at ``address`` publishes, into new host tensors.

        Args:
            sections: those to fetch, in this order. They all belong to one outer step, the one in the header.
            timeout_s: bound on the whole transfer.
            on_progress: called in this thread, after every few megabytes.
            accept: asked before any tensor is fetched.

        Raises:
            Unwanted: the peer publishes what is not accepted.
            TransferFailed: it did not arrive whole, or is no snapshot.
        """
        query = urlencode({"sections": ",".join(sections)})
        try:
            with request(address, f"/state?{query}", self._token, timeout_s=timeout_s) as answer:
                layout = _read_layout(answer)
                if layout.sections != tuple(sections):
                    raise LayoutError(f"it has the sections {', '.join(map(str, layout.sections))}")
                if layout.size != answer.length:
                    raise LayoutError(f"it describes {layout.size} bytes and has {answer.length}")
                if not accept(layout.header):
                    raise Unwanted(layout.header)
                return Snapshot(layout.header, _read_tensors(answer, layout, on_progress))
        except RequestFailed as error:
            raise TransferFailed(str(error)) from error


def _read_layout(answer: Answer) -> Layout:
    length = int.from_bytes(answer.read(LENGTH_BYTES), "little")
    if length > min(HEADER_LIMIT, answer.length):
        raise LayoutError(f"a header of {length} bytes")
    return Layout.decode(answer.read(length))


def _read_tensors(answer: Answer, layout: Layout, on_progress: Progress | None) -> dict[str, dict[str, torch.Tensor]]:
    sections: dict[str, dict[str, torch.Tensor]] = {section: {} for section in layout.sections}
    received = 0
    for place in layout.places:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        content = raw_bytes(tensor)
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            answer.read_into(piece)
            received += len(piece)
            if on_progress is not None:
                on_progress(received, layout.size)
        sections[place.section][place.name] = tensor
    return sections
