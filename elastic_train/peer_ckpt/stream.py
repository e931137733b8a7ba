"""One way by which parts come from a donor: a connection, and a channel beside it if there is one.

A donor says with each answer which of the two it takes. Its end of a channel closes when nobody has asked for long, so
a joiner must be ready for the other at any time.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence

import torch
import xxhash

from elastic_train.peer_ckpt.channel import CHECKSUMS, JOINER, Channel, ChannelBroken, Invitation, library_of, pieces
from elastic_train.peer_ckpt.layout import LayoutError
from elastic_train.peer_ckpt.manifest import CHECKSUM_BYTES
from elastic_train.peer_ckpt.pages import make_pages
from elastic_train.peer_ckpt.parts import Part, views
from elastic_train.peer_ckpt.request import Answer, Connection

logger = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes: still in the processor's cache when their checksum is computed."""
_INVITATION_BYTES = 4096


class Stream:
    """Used by one thread, which closes it."""

    def __init__(self, connection: Connection, deadline: float, name: str) -> None:
        """
        Args:
            connection: stays its owner's, who may close it from any thread to cut the stream off.
            deadline: on ``time.monotonic()``, for everything.
            name: of the donor, for the log.
        """
        self._connection = connection
        self._deadline = deadline
        self._name = name
        self._channel: Channel | None = None
        self.arrived = 0
        """Bytes, also of what did not count."""
        self.by_channel = 0
        """Those of them that came over the channel."""

    def close(self) -> None:
        """End the channel, if there is one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def open_channel(self, target: str, device: torch.device, bound_s: float) -> None:
        """Let parts come over a channel from now on.

        Args:
            target: of the request.
            device: where the channel's tensors are.
            bound_s: how long the donor may take for one operation; half of it to meet.

        Raises:
            RequestFailed: the donor has no channel to give, or none that works.
        """
        body = {"library": library_of(device), "bound_s": bound_s}
        with self._connection.request(target, deadline=self._deadline, body=body) as answer:
            invitation = Invitation.from_json(json.loads(answer.read(min(answer.length, _INVITATION_BYTES))))
            try:
                self._channel = Channel(invitation, device, JOINER)
            except ChannelBroken:
                # Its thread at the donor may wait for this side for a while, and answer nothing meanwhile.
                answer.end_connection()
                raise

    def fetch(self, target: str, tensors: Sequence[torch.Tensor], part: Part) -> None:
        """Fetch a part to its place. Once this has ended, however it did, nobody writes there any more.

        Args:
            target: of the request for that part.
            tensors: of its section.

        Raises:
            RequestFailed: it did not arrive, or not as it was sent.
        """
        if self._channel is not None:
            target += "&by=channel"
        with self._connection.request(target, deadline=self._deadline) as answer:
            if self._channel is not None and answer.kind == CHECKSUMS:
                self._receive(answer, self._channel, tensors, part)
                return
            if self._channel is not None:
                logger.info("%s has closed its end of a channel: parts come over the connection", self._name)
                self.close()
            self._read(answer, tensors, part)

    def _read(self, answer: Answer, tensors: Sequence[torch.Tensor], part: Part) -> None:
        """From the connection, with one checksum behind everything."""
        if answer.length != part.size + CHECKSUM_BYTES:
            raise LayoutError(f"the part has {answer.length} bytes")
        digest = xxhash.xxh3_64()
        for view in views(tensors, part):
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                make_pages(piece)
                answer.read_into(piece)
                digest.update(piece)
                self.arrived += len(piece)
        if answer.read(CHECKSUM_BYTES) != digest.digest():
            raise _damaged(part)

    def _receive(self, answer: Answer, channel: Channel, tensors: Sequence[torch.Tensor], part: Part) -> None:
        """From the channel, with a checksum on the connection for each piece, which says that it has left the donor."""
        into = pieces(tensors, part)
        if answer.length != CHECKSUM_BYTES * len(into):
            raise LayoutError(f"the part comes in {answer.length / CHECKSUM_BYTES:g} pieces, not in {len(into)}")
        checksums: deque[bytes] = deque()

        def check(piece: memoryview) -> None:
            self.arrived += len(piece)
            self.by_channel += len(piece)
            if xxhash.xxh3_64_digest(piece) != checksums.popleft():
                raise _damaged(part)

        channel.receive(into, lambda: checksums.append(answer.read(CHECKSUM_BYTES)), check)


def _damaged(part: Part) -> LayoutError:
    return LayoutError(f"bytes {part.start} to {part.stop} of {part.section} arrived damaged")
