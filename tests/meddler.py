"""What networks, dying processes and strangers do to a transfer."""

import socket
import threading
from collections.abc import Callable
from enum import Enum
from urllib.parse import urlsplit

TIMEOUT_S = 30.0
_LARGE = 4096
"""Bytes that are too many to be anything but tensors."""


class Act(Enum):
    """What happens once so many bytes were passed on."""

    CUT = "every connection ends, and no new one is taken"
    STALL = "nothing is passed on any more, but no connection ends"
    FLIP = "one bit of a tensor is flipped"


class _Middle:
    """Takes connections, each in threads of its own, until it is closed."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._listen)

    def close(self) -> None:
        self._cut()
        for thread in list(self._threads):
            thread.join()
        for connection in self._sockets:
            connection.close()
        self._listener.close()

    def _take(self, near: socket.socket) -> None:
        raise NotImplementedError

    def _listen(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                self._keep(near)
                self._take(near)
            except OSError:
                return

    def _keep(self, connection: socket.socket) -> None:
        with self._guard:
            self._sockets.append(connection)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _cut(self) -> None:
        with self._guard:
            _shut(self._listener, *self._sockets)


class Meddler(_Middle):
    """Passes on what the server at ``target`` sends, over any number of connections, until it acts."""

    def __init__(self, target: str, act: Act, after: int) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._act: Act | None = act
        self._left = after
        self._released = threading.Event()
        self.acted = threading.Event()
        super().__init__()

    def release(self) -> None:
        """After a stall, pass everything on."""
        self._act = None
        self._released.set()

    def close(self) -> None:
        self._released.set()
        super().close()

    def _take(self, near: socket.socket) -> None:
        far = socket.create_connection(self._target, TIMEOUT_S)
        self._keep(far)
        self._start(self._pass_on, near, far)
        self._start(self._pass_back, far, near)

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        try:
            while data := near.recv(65536):
                far.sendall(data)
        except OSError:
            pass
        _shut(far)

    def _pass_back(self, far: socket.socket, near: socket.socket) -> None:
        try:
            while data := far.recv(65536):
                before, behind = self._split(data)
                near.sendall(before)
                if not behind:
                    continue
                act = self._act
                self.acted.set()
                if act is Act.CUT:
                    self._cut()
                    return
                self._released.wait(TIMEOUT_S)
                near.sendall(behind)
        except OSError:
            pass
        _shut(near)

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        """What is passed on at once, and what the act comes before."""
        with self._guard:
            if self._act is None:
                return data, b""
            left, self._left = self._left, max(self._left - len(data), 0)
            if self._act is not Act.FLIP:
                return data[:left], data[left:]
            if left >= len(data) or len(data) < _LARGE:
                return data, b""
            self._act = None
            self.acted.set()
            changed = bytearray(data)
            changed[len(data) // 2] ^= 4
            return bytes(changed), b""


class Liar(_Middle):
    """Gives this answer, whatever is asked."""

    def __init__(self, answer: bytes, *, then_silent: bool = False) -> None:
        self._answer = answer
        self._then_silent = then_silent
        super().__init__()

    def _take(self, near: socket.socket) -> None:
        self._start(self._lie, near)

    def _lie(self, near: socket.socket) -> None:
        try:
            near.recv(65536)
            near.sendall(self._answer)
            while self._then_silent and near.recv(65536):
                continue
        except OSError:
            pass
        _shut(near)


def _shut(*connections: socket.socket) -> None:
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
