"""Requests to somebody who serves this run, each with a bound on the time that it takes as a whole."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import urlsplit

from elastic_train.peer_ckpt.tls import Tls
from elastic_train.peer_ckpt.wire import BadHead, Head, Wire

_SILENCE_S = 10.0
"""A side that says nothing for so long is gone, however much time the whole may take."""
_JSON_LIMIT = 16 << 20
_REASON_LIMIT = 300
_CLOSED_MEANWHILE = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class RequestFailed(Exception):
    """No answer, or not one to what was asked; its text says who was asked and what happened."""


class RequestRefused(RequestFailed):
    """Who was asked has answered that it will not do it."""


class Answer:
    """The body of an answer, read as it comes in."""

    def __init__(self, head: Head, wire: Wire, deadline: float, idle_s: float) -> None:
        """
        Raises:
            BadHead: this is the head of no answer.
        """
        version, _, status = head.start.partition(" ")
        if version not in ("HTTP/1.0", "HTTP/1.1") or not status[:3].isdecimal():
            raise BadHead(f"{head.start[:80]!r} begins no answer")
        self._wire = wire
        self._deadline = deadline
        self._idle_s = idle_s
        self._status = int(status[:3])
        self._is_last = version == "HTTP/1.0" or head.is_last or "content-length" not in head.fields
        self.kind = head.fields.get("content-type", "")
        """What the bytes are, as the server says."""
        self.length = head.length
        """Bytes that are still to be read."""

    @property
    def status(self) -> int:
        return self._status

    @property
    def leaves_open(self) -> bool:
        """Whether it was read to its end and another request may follow on its connection."""
        return not self.length and not self._is_last

    def end_connection(self) -> None:
        """Let no other request follow on its connection, although it could."""
        self._is_last = True

    def read(self, size: int) -> bytes:
        """Exactly so many bytes. Raises OSError."""
        content = bytearray(size)
        self.read_into(memoryview(content))
        return bytes(content)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target``, bytes.

        Raises:
            OSError: the time is up, or the answer ends before.
        """
        there = target[: self.length]
        self._wire.read_into(there, self._deadline, self._idle_s)
        self.length -= len(there)
        if len(there) < len(target):
            raise ConnectionError("the answer ends too early")


class Connection:
    """To one server, kept for several requests. One thread asks at a time; any may close it."""

    def __init__(self, address: str, token: str, *, idle_s: float = _SILENCE_S, tls: Tls | None = None) -> None:
        """Connects with the first request.

        Args:
            address: ``http://host:port``, or ``https://host:port``, for which ``tls`` is needed.
            idle_s: how long the server may say nothing in the middle of a request.
        """
        self._address = address
        self._token = token
        self._idle_s = idle_s
        self._tls = tls
        self._wire: Wire | None = None
        self._asking = False
        self._closed = False
        self._guard = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, for good: a request that is going on in another thread fails at once. May be called again."""
        with self._guard:
            self._closed = True
            if self._wire is None:
                return
            self._wire.cut_off()
            if not self._asking:
                self._wire.close()
                self._wire = None

    @contextmanager
    def request(self, target: str, *, deadline: float, body: object = None) -> Iterator[Answer]:
        """Ask for ``target``. If the server has closed the connection since the last request, it is asked again.

        An answer that is not read to its end closes the connection, and the next request makes a new one.

        Args:
            deadline: on ``time.monotonic()``: bound on everything, from connecting to the last byte of the answer.
            body: sent along as JSON, by POST; None: a GET.

        Raises:
            RequestRefused: the answer is an error.
            RequestFailed: no connection, no answer, or the time is up; also for an OSError or ValueError of the one
                who reads the answer.
        """
        with self._guard:
            self._asking = True
        answer = None
        try:
            answer = self._ask(self._message(target, body), deadline)
            if answer.status != HTTPStatus.OK:
                reason = answer.read(min(answer.length, _REASON_LIMIT)).decode(errors="replace")
                raise RequestRefused(f"{self._address}{target} is refused: {answer.status} {reason}")
            yield answer
        except (OSError, ValueError) as error:
            raise RequestFailed(f"{self._address}{target}: {str(error) or type(error).__name__}") from error
        finally:
            with self._guard:
                self._asking = False
                if self._wire is not None and (self._closed or answer is None or not answer.leaves_open):
                    self._wire.close()
                    self._wire = None

    def _message(self, target: str, body: object) -> bytes:
        place = urlsplit(self._address).netloc
        head = f"Host: {place}\r\nAuthorization: Bearer {self._token}\r\n"
        if body is None:
            return f"GET {target} HTTP/1.1\r\n{head}\r\n".encode("iso-8859-1")
        content = json.dumps(body).encode()
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        return f"POST {target} HTTP/1.1\r\n{head}\r\n".encode("iso-8859-1") + content

    def _ask(self, message: bytes, deadline: float) -> Answer:
        if self._wire is not None:
            try:
                return self._exchange(self._wire, message, deadline)
            except _CLOSED_MEANWHILE:
                # A server closes what lies idle, and does not know that a request is on its way.
                self._drop()
        wire = self._connect(deadline)
        wire.shake_hands(deadline, self._idle_s)
        return self._exchange(wire, message, deadline)

    def _exchange(self, wire: Wire, message: bytes, deadline: float) -> Answer:
        wire.send(message, deadline, self._idle_s)
        return Answer(wire.read_head(deadline, self._idle_s), wire, deadline, self._idle_s)

    def _connect(self, deadline: float) -> Wire:
        parts = urlsplit(self._address)
        scheme = "http" if self._tls is None else "https"
        if parts.scheme != scheme or not parts.hostname or not parts.port:
            raise ValueError(f"this is no address of the form {scheme}://host:port")
        context = None if self._tls is None else self._tls.client_context()
        failure = OSError("the host has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM):
            connection = socket.socket(family, kind, protocol)
            if context is not None:
                connection = context.wrap_socket(connection, do_handshake_on_connect=False)
            wire = self._hold(Wire(connection))
            try:
                wire.connect(place, deadline, self._idle_s)
            except OSError as error:
                self._drop()
                failure = error
                continue
            return wire
        raise failure

    def _hold(self, wire: Wire) -> Wire:
        with self._guard:
            if self._closed:
                wire.close()
                raise ConnectionAbortedError("this side has closed it")
            self._wire = wire
            return wire

    def _drop(self) -> None:
        with self._guard:
            if self._wire is not None:
                self._wire.close()
                self._wire = None


@contextmanager
def request(
    address: str, target: str, token: str, *, timeout_s: float, body: object = None, tls: Tls | None = None
) -> Iterator[Answer]:
    """Ask for ``target`` at ``address`` (``http://host:port``; with ``tls``: ``https://host:port``), only this.

    Args:
        timeout_s: bound on everything, from the connection to the last byte of the answer. A silence of ten seconds
            ends it sooner.
        body: sent along as JSON, by POST; None: a GET.

    Raises:
        RequestFailed: no connection, no answer, an answer that is an error, or the time is up; also for an OSError
            or ValueError of the one who reads the answer.
    """
    deadline = time.monotonic() + timeout_s
    with (
        Connection(address, token, tls=tls) as connection,
        connection.request(target, deadline=deadline, body=body) as answer,
    ):
        yield answer


def ask(address: str, target: str, token: str, *, timeout_s: float, body: object = None, tls: Tls | None = None) -> Any:
    """The JSON that is answered; arguments and errors as for ``request``."""
    with request(address, target, token, timeout_s=timeout_s, body=body, tls=tls) as answer:
        if answer.length > _JSON_LIMIT:
            raise ValueError(f"an answer of {answer.length} bytes")
        return json.loads(answer.read(answer.length))
