"""An HTTP server that answers only who has the run's token.

What ranks serve to their peers, and what the registry serves to the ranks, stands on it: the standard library's
server with what it lacks. It never looks up names, keeps quiet, and its connections can be cut off from outside.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

logger = logging.getLogger(__name__)

_SILENCE_S = 30.0
"""How long the other side may take for its request, or for a piece of the answer."""
_BODY_LIMIT = 1 << 20
_PIECE = 4 << 20
_LOOK_S = 0.05


class BadRequest(ValueError):
    """What was asked cannot be understood; its text says why."""


class Exchange(BaseHTTPRequestHandler):
    """One request of somebody who has the token, and its answer."""

    server: _Server
    timeout = _SILENCE_S
    disable_nagle_algorithm = True

    @property
    def place(self) -> str:
        """What was asked for, without its arguments, as in ``/status``."""
        return urlsplit(self.path).path

    @property
    def arguments(self) -> dict[str, str]:
        """What stands behind the question mark."""
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    def read_json(self) -> Any:
        """What was sent along. Raises BadRequest."""
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 <= length <= _BODY_LIMIT:
                raise BadRequest(f"a body of {length} bytes")
            return json.loads(self.rfile.read(length))
        except ValueError as error:
            raise BadRequest(f"the body is no JSON: {error}") from error

    def answer(self, value: object) -> None:
        """Answer with JSON."""
        body = json.dumps(value).encode()
        self.begin(len(body), "application/json")
        self.send(memoryview(body))

    def refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer with an error, in words."""
        body = text.encode()
        self.begin(len(body), "text/plain; charset=utf-8", status)
        self.send(memoryview(body))

    def begin(self, length: int, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Begin an answer of so many bytes, which ``send`` must follow up with."""
        self._begun = True
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def send(self, content: memoryview) -> None:
        """Send a part of the answer straight from its memory.

        Raises:
            OSError: the connection is gone, was cut off, or takes nothing for too long.
        """
        for start in range(0, len(content), _PIECE):
            self.connection.sendall(content[start : start + _PIECE])

    def cut_off(self) -> None:
        """End the connection from another thread: once this returns, ``send`` reads no memory any more."""
        _shut(self.connection)

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: %s", self.address_string(), format % args)

    def _serve(self) -> None:
        self._begun = False
        try:
            if not self._has_token():
                self.refuse(HTTPStatus.UNAUTHORIZED, "this needs the token of the run")
                return
            self.server.respond(self)
        except BadRequest as error:
            self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        except OSError:
            raise
        except Exception:
            logger.exception("%s could not be answered", self.place)
            if not self._begun:
                self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "this could not be answered")

    def _has_token(self) -> bool:
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self.server.token}".encode())


class TokenServer:
    """Listens from when it is made until ``close``, and answers each request in a thread of its own."""

    def __init__(self, host: str, port: int, token: str, respond: Callable[[Exchange], None]) -> None:
        """
        Args:
            host: name or address to listen at, and under which others connect.
            port: 0: any that is free.
            respond: called in the request's thread; must answer or refuse it.

        Raises:
            OSError: it cannot listen there.
            ValueError: the token is empty, which would let everybody in.
        """
        if not token:
            raise ValueError("a server needs a token, or it would answer everybody")
        self._server = _Server(host, port, token, respond)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name=f"serves {self.address}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut off every connection; a second call does nothing."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut_off_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A burst of peers that ask at once must not be refused.
    request_queue_size = 128

    def __init__(self, host: str, port: int, token: str, respond: Callable[[Exchange], None]) -> None:
        self.token = token
        self.respond = respond
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), Exchange)

    def server_bind(self) -> None:
        # HTTPServer's looks up the full name of the host, which can take as long as the resolver likes.
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def cut_off_all(self) -> None:
        with self._guard:
            for connection in self._open:
                _shut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("a connection of %s broke: %r", client_address, sys.exception())


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The other side was faster.
        return
