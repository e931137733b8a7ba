"""One end of a connection: heads of HTTP messages, and what follows them, with a bound on the whole of each.

The standard library bounds only the wait for the next byte, so that somebody who sends one now and then is never done,
and takes megabytes of head from everybody.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD_LIMIT = 16 << 10
"""Bytes that a head may have."""
FIELD_LIMIT = 32
"""Fields that a head may have."""
_END = b"\r\n\r\n"
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_LENGTH = re.compile(r"[0-9]{1,15}")
_SHOWN = 80
_PIECE = 4 << 20


class BadHead(ValueError):
    """What came is no head of an HTTP message; its text says why."""


@dataclass(frozen=True)
class Head:
    """What stands before the body of a request or an answer."""

    start: str
    """The first line."""
    fields: Mapping[str, str]
    """The others, by their names in lower case."""
    length: int
    """Bytes of the body."""

    @classmethod
    def parse(cls, content: bytes) -> Head:
        """Args: content: all of it, without the empty line. Raises BadHead."""
        start, *lines = content.decode("iso-8859-1").split("\r\n")
        if len(lines) > FIELD_LIMIT:
            raise BadHead(f"a head with {len(lines)} fields")
        fields: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            # What is said twice could be understood in two ways.
            if not colon or not _NAME.fullmatch(name) or name.lower() in fields:
                raise BadHead(f"{line[:_SHOWN]!r} is no field, or is there twice")
            fields[name.lower()] = value.strip(" \t")
        length = fields.get("content-length", "0")
        if "transfer-encoding" in fields or not _LENGTH.fullmatch(length):
            raise BadHead("the length of the body is not given as a number")
        return cls(start, fields, int(length))

    @property
    def is_last(self) -> bool:
        """Whether who sent it ends the connection after this."""
        return self.fields.get("connection", "").lower() == "close"


class Wire:
    """A connection, used by one thread and cut off from any."""

    def __init__(self, connection: socket.socket) -> None:
        """
        Args:
            connection: belongs to this from now on. A TLS socket must not shake hands by itself when it connects.
        """
        self._connection = connection
        self._timeout_s = -1.0
        self._held = bytearray()
        self._is_cut_off = False

    def connect(self, place: Any, deadline: float, idle_s: float) -> None:
        """Connect to a socket address. Raises OSError."""
        self._timeout_s = 0.0
        self._connection.settimeout(self._timeout_s)
        failure = self._connection.connect_ex(place)
        # Whoever cuts it off from now on ends the attempt, but before there was none to be ended.
        if self._is_cut_off:
            raise ConnectionAbortedError("it was cut off")
        if failure == errno.EINPROGRESS:
            attempt = select.poll()
            attempt.register(self._connection, select.POLLOUT)
            if not attempt.poll(max(0.0, min(deadline - time.monotonic(), idle_s)) * 1000):
                raise TimeoutError("timed out")
            failure = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def shake_hands(self, deadline: float, idle_s: float) -> None:
        """Agree on the keys, if this is a TLS connection. Raises OSError."""
        if isinstance(self._connection, ssl.SSLSocket):
            self._bound(deadline, idle_s)
            self._connection.do_handshake()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next message to begin; False if none does, because of the time or of the other side."""
        if self._held:
            return True
        try:
            self._held += self._receive(time.monotonic() + timeout_s, timeout_s)
        except OSError:
            return False
        return True

    def read_head(self, deadline: float, idle_s: float) -> Head:
        """The head of the next message.

        Args:
            deadline: on ``time.monotonic()``, for the whole of it.
            idle_s: how long the other side may say nothing.

        Raises:
            BadHead: it is none, or a very large one.
            OSError: the connection ends, or the time.
        """
        searched = 0
        while (end := self._held.find(_END, max(0, searched - len(_END) + 1))) < 0:
            searched = len(self._held)
            if searched >= HEAD_LIMIT:
                raise BadHead(f"a head of more than {HEAD_LIMIT} bytes")
            self._held += self._receive(deadline, idle_s)
        content = bytes(self._held[:end])
        del self._held[: end + len(_END)]
        return Head.parse(content)

    def read_into(self, target: memoryview, deadline: float, idle_s: float) -> None:
        """Fill ``target``, bytes, straight from the socket; bounds and errors as for ``read_head``."""
        if self._held:
            count = min(len(self._held), len(target))
            target[:count] = self._held[:count]
            del self._held[:count]
            target = target[count:]
        while target:
            self._bound(deadline, idle_s)
            count = self._connection.recv_into(target)
            if not count:
                raise ConnectionAbortedError("the connection was cut off")
            target = target[count:]

    def send(self, content: bytes | memoryview, deadline: float, idle_s: float) -> None:
        """Send all of it straight from its memory; ``idle_s`` is for a few megabytes. Raises OSError."""
        view = memoryview(content)
        for start in range(0, len(view), _PIECE):
            self._bound(deadline, idle_s)
            self._connection.sendall(view[start : start + _PIECE])

    @property
    def takes_files(self) -> bool:
        """Whether ``send_file`` saves anything. Raises OSError.

        Not with TLS, which has to read what it encrypts; nor on one host, where the other side's copy from the file's
        pages costs more than the one that is saved.
        """
        if isinstance(self._connection, ssl.SSLSocket):
            return False
        # The first of an address is the host.
        return bool(self._connection.getpeername()[:1] != self._connection.getsockname()[:1])

    def send_file(self, file: int, start: int, size: int, deadline: float, idle_s: float) -> None:
        """Send bytes of a file without a copy; otherwise as ``send``.

        The kernel sends the file's own pages, and may do so after this has returned: if they are written meanwhile,
        the other side gets a mixture. Only a checksum behind them tells.

        Args:
            file: descriptor.
        """
        stop = start + size
        while start < stop:
            self._bound(deadline, idle_s)
            until = time.monotonic() + self._timeout_s
            end = min(start + _PIECE, stop)
            while start < end:
                try:
                    sent = os.sendfile(self._connection.fileno(), file, start, end - start)
                except BlockingIOError:
                    self._wait_for_room(until)
                    continue
                if not sent:
                    raise OSError(f"the file ends at byte {start}")
                start += sent

    def cut_off(self) -> None:
        """End the connection, from any thread: once this returns, nothing is sent of what memory holds from then on,
        but for pages of a file that ``send_file`` has handed over before."""
        self._is_cut_off = True
        try:
            # Not TLS's own shutdown, after which a thread that is sending would go on in plain text.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        except OSError:
            # The other side was faster, or there is no connection yet.
            return

    def close(self) -> None:
        """Give the connection back; from the thread that uses it."""
        self._connection.close()

    def _receive(self, deadline: float, idle_s: float) -> bytes:
        self._bound(deadline, idle_s)
        content = self._connection.recv(HEAD_LIMIT)
        if not content:
            raise ConnectionAbortedError("a closed connection where a message should begin or go on")
        return content

    def _wait_for_room(self, until: float) -> None:
        left = until - time.monotonic()
        room = select.poll()
        room.register(self._connection, select.POLLOUT)
        if left <= 0 or not room.poll(left * 1000):
            raise TimeoutError("timed out")

    def _bound(self, deadline: float, idle_s: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        timeout_s = min(left, idle_s)
        if timeout_s != self._timeout_s:
            # A system call each time, which large bodies would feel.
            self._connection.settimeout(timeout_s)
            self._timeout_s = timeout_s
