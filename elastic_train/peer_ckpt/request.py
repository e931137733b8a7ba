"""A request to somebody who serves this run, with a bound on the time that it takes as a whole."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

_SILENCE_S = 10.0
"""A side that says nothing for so long is gone, however much time the whole may take."""
_JSON_LIMIT = 16 << 20
_REASON_LIMIT = 300


class RequestFailed(Exception):
    """No answer, or not one to what was asked; its text says who was asked and what happened."""


class Answer:
    """The body of an answer, read as it comes in."""

    def __init__(self, response: HTTPResponse, connection: socket.socket, deadline: float) -> None:
        self._response = response
        self._connection = connection
        self._deadline = deadline
        self.length = response.length or 0
        """Bytes that are still to be read."""

    def read(self, size: int) -> bytes:
        """Exactly so many bytes. Raises OSError."""
        content = bytearray(size)
        self.read_into(memoryview(content))
        return bytes(content)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target``.

        Raises:
            OSError: the time is up, or the answer ends before.
        """
        while target:
            if not self.length:
                raise ConnectionError("the answer ends too early")
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._connection.settimeout(min(left, _SILENCE_S))
            # Not through the response, whose readinto waits until all is there, without looking at the time.
            count = self._response.fp.readinto1(target[: self.length])
            if not count:
                raise ConnectionError("the connection was cut off")
            self.length -= count
            target = target[count:]


@contextmanager
def request(address: str, target: str, token: str, *, timeout_s: float, body: object = None) -> Iterator[Answer]:
    """Ask for ``target`` at ``address`` (``http://host:port``).

    Args:
        timeout_s: bound on everything, from the connection to the last byte of the answer. A silence of ten seconds
            ends it sooner.
        body: sent along as JSON, by POST; None: a GET.

    Raises:
        RequestFailed: no connection, no answer, an answer that is an error, or the time is up; also for an OSError
            or ValueError of the one who reads the answer.
    """
    deadline = time.monotonic() + timeout_s
    try:
        parts = urlsplit(address)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=min(timeout_s, _SILENCE_S))
    except (HTTPException, ValueError) as error:
        raise RequestFailed(f"{address} is no address: {error}") from error
    try:
        connection.connect()
        # The connection forgets its socket once the answer has begun.
        wire = connection.sock
        wire.settimeout(min(max(deadline - time.monotonic(), 1e-3), _SILENCE_S))
        content = None if body is None else json.dumps(body).encode()
        connection.request("GET" if content is None else "POST", target, content, {"Authorization": f"Bearer {token}"})
        with connection.getresponse() as response:
            answer = Answer(response, wire, deadline)
            if response.status != 200:
                reason = answer.read(min(answer.length, _REASON_LIMIT)).decode(errors="replace")
                raise RequestFailed(f"{address}{target} is refused: {response.status} {reason}")
            yield answer
    except (OSError, HTTPException, ValueError) as error:
        raise RequestFailed(f"{address}{target}: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()


def ask(address: str, target: str, token: str, *, timeout_s: float, body: object = None) -> Any:
    """The JSON that is answered; arguments and errors as for ``request``."""
    with request(address, target, token, timeout_s=timeout_s, body=body) as answer:
        if answer.length > _JSON_LIMIT:
            raise ValueError(f"an answer of {answer.length} bytes")
        return json.loads(answer.read(answer.length))
