"""What stands between a server and whoever asks it, and does what networks do: cuts, stalls and flips bits.

It strikes by bytes and not by time, so that the same thing happens at the same place however fast the machine is.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from urllib.parse import urlsplit

_TIMEOUT_S = 30.0
_PIECE = 64 << 10
# What a server has sent and nobody has passed on yet must be little, or it would have sent everything beforehand. The
# kernel makes the sender's buffer in proportion to the segments that are agreed on.
_BUFFER = 32 << 10
_SEGMENT = 1400
_LARGE = 4096
"""Bytes that are too many to be anything but tensors, or a manifest."""
_MANIFEST = b"GET /manifest"


class Act(Enum):
    """What happens once so many bytes were passed on."""

    CUT = "every connection ends, and no new one is taken"
    STALL = "nothing is passed on any more, but no connection ends"
    FLIP = "one bit of a tensor is flipped"
    MISLEAD = "one bit of a manifest is flipped; only bytes of manifests count"


class Middle(ABC):
    """Takes connections at some addresses, and what it does with them in threads of its own, until it is closed."""

    def __init__(self, count: int = 1) -> None:
        """
        Args:
            count: addresses.
        """
        self._guard = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(count)]
        self.addresses = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners]
        for index, listener in enumerate(self._listeners):
            self._start(self._listen, index, listener)

    @property
    def address(self) -> str:
        """The first one."""
        return self.addresses[0]

    def close(self) -> None:
        self._cut()
        # One that is still starting others adds them behind itself.
        for thread in self._threads:
            thread.join()
        for connection in (*self._sockets, *self._listeners):
            connection.close()

    @abstractmethod
    def take(self, near: socket.socket, index: int) -> None:
        """Somebody has connected to an address: called in a thread for this connection."""

    def _listen(self, index: int, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            self._keep(near)
            self._start(self.take, near, index)

    def _keep(self, connection: socket.socket) -> None:
        with self._guard:
            self._sockets.append(connection)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _cut(self) -> None:
        with self._guard:
            shut(*self._listeners, *self._sockets)


class Meddler(Middle):
    """Passes on what servers send, over any number of connections, until it acts, once for all of them together."""

    def __init__(self, targets: Sequence[str], act: Act, after: int) -> None:
        """
        Args:
            targets: addresses of the servers; each gets one of ``addresses``, in this order.
            after: bytes of all servers together.
        """
        self._targets = [(parts.hostname, parts.port) for parts in map(urlsplit, targets)]
        self._act: Act | None = act
        self._left = after
        self._released = threading.Event()
        self.acted = threading.Event()
        super().__init__(len(targets))

    def release(self) -> None:
        """After a stall, pass everything on."""
        self._act = None
        self._released.set()

    def close(self) -> None:
        self._released.set()
        super().close()

    def take(self, near: socket.socket, index: int) -> None:
        try:
            # Strangers may crowd the server: it is asked in the moment in which it is connected to.
            asked = near.recv(_PIECE)
            far = self._connect(index)
        except OSError:
            shut(near)
            return
        of_manifest = asked.startswith(_MANIFEST)
        self._start(self._pass_back, far, near, of_manifest)
        try:
            while asked:
                far.sendall(asked)
                asked = near.recv(_PIECE)
        except OSError:
            pass
        shut(far)

    def _connect(self, index: int) -> socket.socket:
        far = socket.socket()
        self._keep(far)
        far.settimeout(_TIMEOUT_S)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        far.connect(self._targets[index])
        return far

    def _pass_back(self, far: socket.socket, near: socket.socket, of_manifest: bool) -> None:
        try:
            while data := far.recv(_PIECE):
                before, behind = self._split(data, of_manifest)
                near.sendall(before)
                if not behind:
                    continue
                act = self._act
                self.acted.set()
                if act is Act.CUT:
                    self._cut()
                    return
                self._released.wait(_TIMEOUT_S)
                near.sendall(behind)
        except OSError:
            pass
        shut(near)

    def _split(self, data: bytes, of_manifest: bool) -> tuple[bytes, bytes]:
        """What is passed on at once, and what the act comes before."""
        with self._guard:
            if self._act is None or (self._act is Act.MISLEAD and not of_manifest):
                return data, b""
            left, self._left = self._left, max(self._left - len(data), 0)
            match self._act:
                case Act.FLIP if left < len(data) and len(data) >= _LARGE and not of_manifest:
                    return self._flipped(data, len(data) // 2), b""
                case Act.MISLEAD if left < len(data):
                    return self._flipped(data, left), b""
                case Act.FLIP | Act.MISLEAD:
                    return data, b""
            return data[:left], data[left:]

    def _flipped(self, data: bytes, index: int) -> bytes:
        self._act = None
        self.acted.set()
        changed = bytearray(data)
        changed[index] ^= 4
        return bytes(changed)


def shut(*connections: socket.socket) -> None:
    """End connections from any thread."""
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
