"""The bytes of parts by a process group of a donor and a joiner, as a collective library moves them: NCCL and RCCL by
RDMA where there is any, gloo by sockets of its own.

Everything else stays on the connection that has shown the token: who wants which part, what is refused, and behind
every piece of a part its checksum, sent once the piece has left. So whoever waits for the other side waits there, where
it can be cut off, and what gets lost, late or mixed up on the group counts for nothing.

A library cannot be told to leave a single operation alone. A channel in which anything fails is closed as a whole, and
what it was receiving into is nobody's concern any more once that returns.
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from elastic_train.device import side_stream
from elastic_train.peer_ckpt.parts import Part, views

DONOR, JOINER = 0, 1
"""Ranks in the group."""
PIECE_BYTES = 4 << 20
"""The most that goes over a channel in one operation."""
CHECKSUMS = "application/x-checksums"
"""What kind of answer says that a part comes over a channel."""
_AHEAD = 4
"""Operations that are under way at the same time."""
_LONGEST_S = 30.0
_GREETING = 0x5A
_CHANNELS = 64
_FILE_AND_LINE = re.compile(r"^\[[^\]]*\] *")
_SHOWN = 160


class ChannelBroken(ConnectionError):
    """There is no channel, or none any more; its text says why."""


def library_of(device: torch.device) -> str:
    """The collective library that moves tensors on ``device``; "nccl" is RCCL on ROCm."""
    return "gloo" if device.type == "cpu" else "nccl"


def pieces(tensors: Sequence[torch.Tensor], part: Part) -> list[memoryview]:
    """What a part is cut into on a channel: its memory in the host tensors of its section, in order.

    Raises:
        ValueError: the section ends before the part.
    """
    return [
        view[start : start + PIECE_BYTES] for view in views(tensors, part) for start in range(0, len(view), PIECE_BYTES)
    ]


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """Where a donor waits for one joiner. Only who has the token of the run is told."""

    library: str
    host: str
    port: int
    secret: str
    """What the place is called in the store, so that nobody comes to it by chance; who looks around there finds it."""
    bound_s: float
    """How long either side waits for the other, in one operation; half of it to find each other."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Invitation:
        """Raises ValueError if it is none."""
        match value:
            case {
                "library": str(library),
                "host": str(host),
                "port": int(port),
                "secret": str(secret),
                "bound_s": int() | float() as bound_s,
            } if 0 < port < 1 << 16 and 0 < bound_s <= _LONGEST_S:
                return cls(library=library, host=host, port=port, secret=secret, bound_s=bound_s)
        raise ValueError("this is no invitation to a channel")


class Channel:
    """One end of it, used by one thread at a time."""

    def __init__(
        self,
        invitation: Invitation,
        device: torch.device,
        rank: int,
        *,
        store: dist.TCPStore | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Meets the other side. A channel counts once a byte has gone through it.

        Args:
            device: where the library finds tensors: the CPU for gloo, which works on the memory of the pieces itself;
                an accelerator for NCCL, on which some pieces have room.
            rank: DONOR or JOINER.
            store: belongs to the channel from now on.
            on_close: called once, also if there is no channel.

        Raises:
            ChannelBroken: nobody came, or the library can make no group of the two.
        """
        self._device = device
        self._peer = JOINER if rank == DONOR else DONOR
        self._bound_s = invitation.bound_s
        self._store = store
        self._on_close: Callable[[], None] | None = on_close
        self._under_way: deque[tuple[dist.Work, torch.Tensor, memoryview]] = deque()
        self._staging: torch.Tensor | None = None
        self._turn = 0
        make = ProcessGroupGloo if device.type == "cpu" else ProcessGroupNCCL
        self._group: ProcessGroupGloo | ProcessGroupNCCL | None = None
        with self._closed_on_failure():
            if library_of(device) != invitation.library:
                raise ChannelBroken(f"the other side has {invitation.library}, this one {library_of(device)}")
            group = self._group = make(timeout=timedelta(seconds=self._bound_s / 2))
            host = f"[{invitation.host}]" if ":" in invitation.host else invitation.host
            with _told("no channel could be made"):
                group.configure(f"{host}:{invitation.port}/{invitation.secret}", str(rank), rank, 2)
                group.set_timeout(timedelta(seconds=self._bound_s))
                if device.type != "cpu":
                    self._staging = torch.empty((_AHEAD, PIECE_BYTES), dtype=torch.uint8, device=device)
            self._greet(rank)

    def send(self, content: Iterable[memoryview], sent: Callable[[], None]) -> None:
        """Send pieces, in order.

        Args:
            content: each piece is writable memory of at most ``PIECE_BYTES``, although nobody writes to it.
            sent: called for each of them, in order, once it has left its memory. What it raises closes the channel.

        Raises:
            ChannelBroken: the other side is gone, or took nothing for too long.
        """
        with self._closed_on_failure():
            for piece in content:
                if len(self._under_way) == _AHEAD:
                    self._finish()
                    sent()
                self._begin(piece, is_sent=True)
            while self._under_way:
                self._finish()
                sent()

    def receive(
        self, into: Iterable[memoryview], announced: Callable[[], None], arrived: Callable[[memoryview], None]
    ) -> None:
        """Receive pieces of the sizes in which they are sent. If this raises, nothing touches their memory any more.

        Args:
            announced: called for each of them, in order; returns once it has left the other side. Pieces behind it may
                arrive meanwhile. What it raises closes the channel, as with the next one.
            arrived: called with each of them.

        Raises:
            ChannelBroken: the other side is gone, or what it has sent did not arrive for too long.
        """

        def finish() -> None:
            announced()
            arrived(self._finish())

        with self._closed_on_failure():
            for piece in into:
                if len(self._under_way) == _AHEAD:
                    finish()
                self._begin(piece, is_sent=False)
            while self._under_way:
                finish()

    def close(self) -> None:
        """End it, from the thread that uses it; a second call does nothing."""
        # Only what is let go of is certain not to be written to.
        self._under_way.clear()
        group, self._group = self._group, None
        if group is not None:
            group.abort(errored=False)
        self._store = self._staging = None
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _greet(self, rank: int) -> None:
        greeting = bytearray([_GREETING if rank == DONOR else 0])
        self._begin(memoryview(greeting), is_sent=rank == DONOR)
        self._finish()
        if greeting[0] != _GREETING:
            raise ChannelBroken("the other side does not say what a donor says")

    def _begin(self, piece: memoryview, *, is_sent: bool) -> None:
        if self._group is None:
            raise ChannelBroken("it is closed")
        memory = torch.frombuffer(piece, dtype=torch.uint8)
        with _told("the channel broke"):
            if self._staging is not None:
                # The row of the operation that was finished longest ago.
                staged = self._staging[self._turn][: len(piece)]
                self._turn = (self._turn + 1) % _AHEAD
                if is_sent:
                    staged.copy_(memory)
                memory = staged
            operation = self._group.send if is_sent else self._group.recv
            self._under_way.append((operation([memory], self._peer, 0), memory, piece))

    def _finish(self) -> memoryview:
        """Wait for the oldest operation: the memory that it was for."""
        with _told("the channel broke"):
            if self._staging is None:
                self._under_way[0][0].wait(timedelta(seconds=self._bound_s))
            else:
                # torchft aborts the group when the time is up, which ends this wait. It says so only to who waits for
                # the whole device, and so for the training; what did not arrive has another checksum anyway.
                self._under_way[0][0].wait()
                torch.cuda.current_stream(self._device).synchronize()
        _, memory, piece = self._under_way.popleft()
        if self._staging is not None:
            torch.frombuffer(piece, dtype=torch.uint8).copy_(memory)
        return piece

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            with side_stream(self._device, after_main=False):
                yield
        except BaseException:
            self.close()
            raise


class Channels:
    """The channels of one donor, as many as it can afford."""

    def __init__(self, host: str, device: torch.device, limit: int = _CHANNELS) -> None:
        """
        Args:
            host: name or address at which it waits for joiners, and under which they find it.
            device: as for :class:`Channel`.
            limit: channels that may be open at once.
        """
        self._host = host
        self._device = device
        self._limit = limit
        self._guard = threading.Lock()
        self._count = 0
        self.library = library_of(device)

    @property
    def count(self) -> int:
        """Channels that are open now, with those that wait for their joiners."""
        return self._count

    def open(self, bound_s: float, invite: Callable[[Invitation], None]) -> Channel:
        """Wait for a joiner.

        Args:
            bound_s: as in :class:`Invitation`; 30 s at most.
            invite: called with what the joiner must be told.

        Raises:
            ChannelBroken: there are too many, or nobody came.
            OSError: it cannot wait at its address; or what ``invite`` raises.
        """
        with self._guard:
            if self._count >= self._limit:
                raise ChannelBroken(f"{self._count} channels are open, and no more can be")
            self._count += 1
        try:
            bound_s = min(bound_s, _LONGEST_S)
            store, port = self._listen(bound_s)
            invitation = Invitation(
                library=self.library, host=self._host, port=port, secret=secrets.token_hex(16), bound_s=bound_s
            )
            invite(invitation)
        except BaseException:
            self._closed()
            raise
        return Channel(invitation, self._device, DONOR, store=store, on_close=self._closed)

    def _closed(self) -> None:
        with self._guard:
            self._count -= 1

    def _listen(self, bound_s: float) -> tuple[dist.TCPStore, int]:
        """A store that both sides meet at, and its port."""
        family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
        # By itself a store listens at every address of the host.
        listener = socket.create_server((self._host, 0), family=family)
        port = listener.getsockname()[1]
        with _told("no channel could be made"):
            store = dist.TCPStore(
                self._host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=bound_s / 2),
                master_listen_fd=listener.detach(),
            )
        return store, port


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Let what a collective library raises be one exception."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        reason = _FILE_AND_LINE.sub("", str(error)).partition("\n")[0]
        raise ChannelBroken(f"{what}: {reason[:_SHOWN]}") from error
