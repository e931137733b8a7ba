"""An HTTP server that answers only who has the run's token.

What ranks serve to their peers, and what the registry serves to the ranks, stands on it. It listens where strangers can
reach it, inside processes that train. So whoever has not shown the token gets little: a place among a few, which the
next stranger takes over, a few seconds, a few kilobytes, and one line of log a second for all of them together.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qsl

from elastic_train.peer_ckpt.tls import Tls
from elastic_train.peer_ckpt.wire import BadHead, Head, Wire

logger = logging.getLogger(__name__)

_UNPROVEN = 64
"""Connections that have not shown the token and may be open at once, each with its thread."""
_HEAD_S = 5.0
"""How long the head of a request may take, with TLS's handshake if there is one."""
_SILENCE_S = 30.0
"""How long the other side may take for the body of its request, or for a piece of the answer."""
_IDLE_S = 30.0
"""How long a connection is kept for the next request."""
_BODY_LIMIT = 1 << 20
# A burst of peers that ask at once must not be refused, nor one that comes behind a crowd of strangers.
_BACKLOG = 1024
_LOOK_S = 0.05
_LEAVE_S = 1.0
_QUIET_S = 1.0


class BadRequest(ValueError):
    """What was asked cannot be understood; its text says why."""


class Closeable(Protocol):
    """What has an end."""

    def close(self) -> None: ...


class Exchange:
    """One request of somebody who has the token, and its answer."""

    def __init__(self, wire: Wire, peer: str, head: Head, companions: dict[str, Closeable] | None = None) -> None:
        """
        Args:
            peer: who asks, for the log.
            companions: of the connection.

        Raises:
            BadRequest: this is the head of no request.
        """
        match head.start.split(" "):
            case ["GET" | "POST" as command, path, "HTTP/1.0" | "HTTP/1.1" as version]:
                pass
            case _:
                raise BadRequest("this is no GET and no POST of HTTP/1.1")
        self.command = command
        self.path = path
        self.companions = {} if companions is None else companions
        """What requests on this connection have left for later ones; closed when the connection ends."""
        self._wire = wire
        self._peer = peer
        self._unread = head.length
        self._owed: int | None = None
        self._is_last = version == "HTTP/1.0" or head.is_last

    @property
    def place(self) -> str:
        """What was asked for, without its arguments, as in ``/status``."""
        return self.path.partition("?")[0]

    @property
    def arguments(self) -> dict[str, str]:
        """What stands behind the question mark."""
        return dict(parse_qsl(self.path.partition("?")[2], keep_blank_values=True))

    @property
    def has_begun(self) -> bool:
        """Whether an answer was begun."""
        return self._owed is not None

    @property
    def leaves_open(self) -> bool:
        """Whether all was read and answered, and another request may follow."""
        return self._owed == 0 and not self._is_last

    def read_json(self) -> Any:
        """What was sent along. Raises BadRequest."""
        if self._unread > _BODY_LIMIT:
            raise BadRequest(f"a body of {self._unread} bytes")
        body = bytearray(self._unread)
        self._wire.read_into(memoryview(body), time.monotonic() + _SILENCE_S, _SILENCE_S)
        self._unread = 0
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from error

    def answer(self, value: object) -> None:
        """Answer with JSON."""
        self._say(HTTPStatus.OK, "application/json", json.dumps(value).encode())

    def refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer with an error, in words."""
        self._say(status, "text/plain; charset=utf-8", text.encode())

    def begin(self, length: int, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Begin an answer of so many bytes, which ``send`` must follow up with; what is left out ends the connection.

        Raises:
            OSError: as for ``send``.
        """
        self._transmit(self._opened(length, kind, status))

    def send(self, content: memoryview) -> None:
        """Send a part of the answer, bytes, straight from its memory.

        Raises:
            OSError: the connection is gone, was cut off, or takes nothing for too long.
        """
        self._transmit(content)
        self._owed = (self._owed or 0) - len(content)

    @property
    def takes_files(self) -> bool:
        """Whether ``send_file`` saves anything. Raises OSError."""
        return self._wire.takes_files

    def send_file(self, file: int, start: int, size: int) -> None:
        """Send bytes of a file as a part of the answer, without a copy. They are not fixed before the other side has
        them, so a checksum must follow (``Wire.send_file``).

        Args:
            file: descriptor.

        Raises:
            OSError: as for ``send``.
        """
        self._wire.send_file(file, start, size, float("inf"), _SILENCE_S)
        self._owed = (self._owed or 0) - size

    def cut_off(self) -> None:
        """End the connection from another thread.

        Once this returns, nothing is sent of what memory holds from then on, but for files' pages on their way.
        """
        self._wire.cut_off()

    def _say(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._transmit(self._opened(len(body), kind, status) + body)
        self._owed = 0

    def _opened(self, length: int, kind: str, status: HTTPStatus) -> bytes:
        logger.debug("%s: %s %s: %d", self._peer, self.command, self.path, status)
        # A body that nobody read would be taken for the next request.
        self._is_last = self._is_last or self._unread > 0
        self._owed = length
        return _opening(status, kind, length, self._is_last)

    def _transmit(self, content: bytes | memoryview) -> None:
        self._wire.send(content, float("inf"), _SILENCE_S)


class TokenServer:
    """Listens from when it is made until ``close``, and answers each connection's requests in a thread of its own."""

    def __init__(
        self, host: str, port: int, token: str, respond: Callable[[Exchange], None], *, tls: Tls | None = None
    ) -> None:
        """
        Args:
            host: name or address to listen at, and under which others connect.
            port: 0: any that is free.
            respond: called in the connection's thread; must answer or refuse the request.
            tls: None: in plain text, for networks that are the run's own.

        Raises:
            OSError: it cannot listen there.
            ValueError: the token is empty, which would let everybody in; or TLS's files are not as they must be.
        """
        if not token:
            raise ValueError("a server needs a token, or it would answer everybody")
        self._token = f"Bearer {token}".encode()
        self._respond = respond
        self._context = None if tls is None else tls.server_context()
        self._guests = _Guests()
        self._strangers = _Strangers()
        self._closing = threading.Event()
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Closing a socket wakes nobody who waits for it.
        self._listener.settimeout(_LOOK_S)
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        self.address = f"{scheme}://{name}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen, name=f"serves {self.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and cut off every connection; a second call does nothing."""
        self._closing.set()
        self._guests.cut_off_all()
        self._thread.join()
        self._listener.close()
        # Who answers may be busy with something else for longer, which is no reason to wait.
        self._guests.wait_until_gone(_LEAVE_S)
        self._strangers.sum_up()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                connection, place = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                # Mostly there is no file descriptor left. That passes, and a stranger's is the first to be given up.
                self._strangers.note(f"a connection could not be accepted: {error}")
                self._guests.cut_off_oldest()
                self._closing.wait(_LOOK_S)
                continue
            self._welcome(connection, str(place[0]))

    def _welcome(self, connection: socket.socket, peer: str) -> None:
        try:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            connection.close()
            self._strangers.note(f"a connection of {peer} ended at once: {error}")
            return
        wire = Wire(connection)
        if not self._guests.admit(wire):
            wire.close()
            return
        thread = threading.Thread(target=self._attend, args=(wire, peer), name=f"answers {peer}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._strangers.note(f"a connection of {peer} gets no thread: {error}")
            self._guests.see_off(wire)

    def _attend(self, wire: Wire, peer: str) -> None:
        try:
            self._converse(wire, peer)
        except OSError as error:
            if self._guests.is_proven(wire):
                logger.info("a connection of %s broke: %r", peer, error)
            else:
                self._strangers.note(f"{peer} did not show the token of the run: {error}")
        finally:
            self._guests.see_off(wire)

    def _converse(self, wire: Wire, peer: str) -> None:
        companions: dict[str, Closeable] = {}
        try:
            self._answer_requests(wire, peer, companions)
        finally:
            for companion in companions.values():
                companion.close()

    def _answer_requests(self, wire: Wire, peer: str, companions: dict[str, Closeable]) -> None:
        deadline = time.monotonic() + _HEAD_S
        wire.shake_hands(deadline, _HEAD_S)
        while True:
            try:
                head = wire.read_head(deadline, _HEAD_S)
                if not self._has_token(head):
                    self._strangers.note(f"{peer} has not the token of the run")
                    _turn_away(wire, HTTPStatus.UNAUTHORIZED, "this needs the token of the run")
                    return
                exchange = Exchange(wire, peer, head, companions)
            except (BadHead, BadRequest) as error:
                self._strangers.note(f"{peer} sends what is no request")
                _turn_away(wire, HTTPStatus.BAD_REQUEST, str(error))
                return
            self._guests.prove(wire)
            self._serve(exchange)
            if not exchange.leaves_open or not wire.wait(_IDLE_S):
                return
            deadline = time.monotonic() + _HEAD_S

    def _has_token(self, head: Head) -> bool:
        given = head.fields.get("authorization", "").encode("iso-8859-1")
        return hmac.compare_digest(given, self._token)

    def _serve(self, exchange: Exchange) -> None:
        try:
            self._respond(exchange)
        except BadRequest as error:
            exchange.refuse(HTTPStatus.BAD_REQUEST, str(error))
        except OSError:
            raise
        except Exception:
            logger.exception("%s could not be answered", exchange.place)
        if not exchange.has_begun:
            exchange.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "this could not be answered")


class _Guests:
    """The connections that are open, and those among them that have not shown the token, in the order they came."""

    def __init__(self) -> None:
        self._open: set[Wire] = set()
        self._unproven: dict[Wire, None] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def admit(self, wire: Wire) -> bool:
        """Give it a place, the oldest stranger's if need be, and not before that one's thread is done; False: closed.

        A peer shows the token with its first bytes, so that however many strangers come, it is rarely the oldest.
        """
        with self._changed:
            while len(self._unproven) >= _UNPROVEN and not self._is_closed:
                self._cut_off_oldest()
                self._changed.wait()
            if not self._is_closed:
                self._open.add(wire)
                self._unproven[wire] = None
            return not self._is_closed

    def prove(self, wire: Wire) -> None:
        """It has shown the token."""
        with self._changed:
            self._unproven.pop(wire, None)
            self._changed.notify_all()

    def is_proven(self, wire: Wire) -> bool:
        with self._changed:
            return wire not in self._unproven

    def see_off(self, wire: Wire) -> None:
        """Close it, and give its place back."""
        with self._changed:
            # Under the lock: nobody may cut off a socket whose number belongs to another by then.
            wire.close()
            self._open.discard(wire)
            self._unproven.pop(wire, None)
            self._changed.notify_all()

    def cut_off_oldest(self) -> None:
        """Let the oldest stranger go, if there is one."""
        with self._changed:
            self._cut_off_oldest()

    def cut_off_all(self) -> None:
        """Let everybody go, and nobody in any more."""
        with self._changed:
            self._is_closed = True
            for wire in self._open:
                wire.cut_off()
            self._changed.notify_all()

    def wait_until_gone(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)

    def _cut_off_oldest(self) -> None:
        for wire in self._unproven:
            wire.cut_off()
            return


class _Strangers:
    """What is logged of those who have no business here: a line a second, however many they are."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._unsaid = 0
        self._guard = threading.Lock()

    def note(self, text: str) -> None:
        """Log this, or count it."""
        with self._guard:
            now = time.monotonic()
            if now < self._quiet_until:
                self._unsaid += 1
                return
            self._quiet_until = now + _QUIET_S
            unsaid, self._unsaid = self._unsaid, 0
        logger.info("%s%s", text, f"; {unsaid} like that before" if unsaid else "")

    def sum_up(self) -> None:
        """Log how many were only counted since the last line."""
        with self._guard:
            unsaid, self._unsaid = self._unsaid, 0
        if unsaid:
            logger.info("%d more who did not show the token of the run", unsaid)


def _turn_away(wire: Wire, status: HTTPStatus, text: str) -> None:
    body = text.encode()
    opening = _opening(status, "text/plain; charset=utf-8", len(body), is_last=True)
    wire.send(opening + body, float("inf"), _HEAD_S)


def _opening(status: HTTPStatus, kind: str, length: int, is_last: bool) -> bytes:
    """The head of an answer."""
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {kind}", f"Content-Length: {length}"]
    if status is HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    if is_last:
        lines.append("Connection: close")
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
