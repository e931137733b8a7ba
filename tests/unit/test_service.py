"""The server under strangers of every kind, and what it keeps of them."""

import errno
import logging
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from logging.handlers import QueueHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.peer_ckpt import service
from elastic_train.peer_ckpt.request import Connection, RequestFailed, ask
from elastic_train.peer_ckpt.service import Exchange, TokenServer
from elastic_train.peer_ckpt.wire import HEAD_LIMIT

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
AUTHORIZED = b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"


def respond(exchange: Exchange) -> None:
    match exchange.place:
        case "/fails":
            raise RuntimeError("no idea")
        case "/fails/later":
            exchange.begin(10, "text/plain")
            raise RuntimeError("no idea")
        case "/short":
            exchange.begin(10, "text/plain")
            exchange.send(memoryview(b"short"))
        case "/mute":
            return
        case "/body":
            exchange.answer(exchange.read_json())
        case "/refuses":
            exchange.refuse(HTTPStatus.GONE, "not here")
        case _:
            exchange.answer([exchange.command, exchange.place, exchange.arguments])


@contextmanager
def serving(answer: Callable[[Exchange], None] = respond) -> Iterator[TokenServer]:
    server = TokenServer("127.0.0.1", 0, TOKEN, answer)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[TokenServer]:
    with serving() as made:
        yield made


def connect(server: TokenServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), TIMEOUT_S)


def read_all(connection: socket.socket) -> bytes:
    """Until the other side ends it."""
    content = b""
    try:
        while piece := connection.recv(65536):
            content += piece
    except ConnectionError:
        # Ended while something that was sent lay unread.
        return content
    return content


def say(server: TokenServer, *words: bytes) -> bytes:
    with connect(server) as connection:
        for word in words:
            connection.sendall(word)
        return read_all(connection)


def get(peer: Connection, target: str = "/") -> None:
    with peer.request(target, deadline=time.monotonic() + TIMEOUT_S) as answer:
        answer.read(answer.length)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("serves ", "answers "))]


def test_requests_are_answered_in_their_order(server: TokenServer) -> None:
    request = b"GET /a?b=%%20&c=%d HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
    last = b"POST /body HTTP/1.1\r\nContent-Length: 3\r\nConnection: close\r\n" + AUTHORIZED + b"\r\n[7]"
    said = say(server, request % 1 + request % 2 + last)
    assert said.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert said.index(b'["GET", "/a", {"b": " ", "c": "1"}]') < said.index(b'"2"') < said.index(b"[7]")


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"PUT / HTTP/1.1", b""),
        (b"GET / HTTP/2.0", b""),
        (b"GET / ", b""),
        (b"GET /", b""),
        (b"GET  / HTTP/1.1", b""),
        (b"", b""),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nContent-Length: many", b""),
        (b"GET / HTTP/1.1\r\nno field", b""),
        (b"POST /body HTTP/1.1\r\nContent-Length: 9999999", b""),
        (b"POST /body HTTP/1.1\r\nContent-Length: 3", b"{{{"),
        (b"POST /body HTTP/1.1\r\nContent-Length: 100000", b"[" * 100000),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(server: TokenServer, head: bytes, body: bytes) -> None:
    said = say(server, head + b"\r\nConnection: close\r\n" + AUTHORIZED + b"\r\n" + body)
    assert said.startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_body_that_nobody_reads_is_no_request(server: TokenServer) -> None:
    hidden = b"GET /hidden HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
    said = say(server, b"POST /refuses HTTP/1.1\r\nContent-Length: %d\r\n%b\r\n%b" % (len(hidden), AUTHORIZED, hidden))
    assert said.startswith(b"HTTP/1.1 410 Gone\r\n")
    assert b"hidden" not in said


@pytest.mark.parametrize(("place", "said"), [("/fails/later", "cut off|closed"), ("/short", "cut off")])
def test_an_answer_that_is_too_short_ends_the_connection(server: TokenServer, place: str, said: str) -> None:
    with pytest.raises(RequestFailed, match=said):
        ask(server.address, place, TOKEN, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("place", ["/fails", "/mute"])
def test_what_cannot_be_answered_is_said_so(server: TokenServer, place: str) -> None:
    with Connection(server.address, TOKEN) as connection:
        for _ in range(2):
            with pytest.raises(RequestFailed, match="500 this could not be answered"):
                get(connection, place)


def test_garbage_is_refused_or_cut_off() -> None:
    with serving() as server:

        @given(junk=st.binary(max_size=300))
        def refuses(junk: bytes) -> None:
            with connect(server) as connection:
                connection.sendall(junk)
                connection.shutdown(socket.SHUT_WR)
                said = read_all(connection)
            assert not said or said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))

        refuses()
        assert ask(server.address, "/", TOKEN, timeout_s=TIMEOUT_S) == ["GET", "/", {}]


def test_a_wrong_token_ends_the_connection(server: TokenServer) -> None:
    wrong = b"GET / HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n"
    right = b"GET / HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
    said = say(server, wrong + right)
    assert said.startswith(b"HTTP/1.1 401 ")
    assert said.count(b"HTTP/1.1") == 1
    # Nor is one who had it once believed from then on.
    said = say(server, right + wrong + right)
    assert said.count(b"HTTP/1.1 200 ") == 1
    assert said.count(b"HTTP/1.1 401 ") == 1


@pytest.mark.parametrize("beginning", [b"", AUTHORIZED, b"GET / HTTP/1.1\r\n" + AUTHORIZED, b"\0"])
def test_a_head_that_is_never_complete_is_not_waited_for(
    server: TokenServer, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_HEAD_S", 0.1)
    with connect(server) as connection:
        connection.sendall(beginning)
        # Something now and then does not prolong it.
        connection.settimeout(0.02)
        for _ in range(10_000):
            try:
                connection.sendall(b"x")
                assert connection.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it still listens")


def test_an_endless_head_is_refused(server: TokenServer) -> None:
    assert say(server, b"x" * HEAD_LIMIT)[:13] in (b"", b"HTTP/1.1 400 ")
    many = b"".join(b"f%d: x\r\n" % number for number in range(100))
    assert say(server, b"GET / HTTP/1.1\r\n" + AUTHORIZED + many + b"\r\n").startswith(b"HTTP/1.1 400 ")


def test_an_idle_connection_ends(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_IDLE_S", 0.05)
    assert say(server, b"GET / HTTP/1.1\r\n" + AUTHORIZED + b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_further_stranger_takes_the_place_of_the_oldest(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_UNPROVEN", 2)
    with Connection(server.address, TOKEN) as peer, connect(server) as first, connect(server) as second:
        # The peer is the third stranger, until it has shown the token.
        get(peer)
        assert read_all(first) == b""
        with connect(server) as third, connect(server):
            assert read_all(second) == b""
            get(peer)
            third.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n" + AUTHORIZED + b"\r\n")
            assert read_all(third).startswith(b"HTTP/1.1 200 ")


def test_it_accepts_again_once_there_are_file_descriptors(
    server: TokenServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = iter(range(3))
    accept = socket.socket.accept

    def accept_in_the_end(self: socket.socket) -> Any:
        if next(failing, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    with caplog.at_level(logging.INFO), connect(server) as stranger:
        ask(server.address, "/", TOKEN, timeout_s=TIMEOUT_S)
        monkeypatch.setattr(socket.socket, "accept", accept_in_the_end)
        # The first may still be accepted by a call that began before.
        for _ in range(2):
            assert ask(server.address, "/", TOKEN, timeout_s=TIMEOUT_S) == ["GET", "/", {}]
        assert next(failing, None) is None
        assert read_all(stranger) == b""
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert "Too many open files" in caplog.text


def test_it_serves_again_once_there_are_threads(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert say(server) == b""
    assert ask(server.address, "/", TOKEN, timeout_s=TIMEOUT_S) == ["GET", "/", {}]


def test_strangers_are_counted_rather_than_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_QUIET_S", 3600.0)
    with caplog.at_level(logging.INFO), serving() as server:
        for _ in range(5):
            say(server, b"GET / HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert "127.0.0.1 has not the token of the run" in caplog.text
    assert "4 more" in caplog.text
    assert "secret" not in caplog.text


def test_a_closed_server_leaves_no_thread() -> None:
    before = set(threads())
    with serving() as server, connect(server) as silent, Connection(server.address, TOKEN) as peer:
        get(peer)
        server.close()
        left = set(threads()) - before
        for thread in left:
            thread.join(TIMEOUT_S)
        assert not [thread for thread in left if thread.is_alive()]
        assert read_all(silent) == b""


STRANGERS: list[Callable[[], bytes]] = [
    lambda: b"",
    lambda: random.randbytes(200),
    lambda: b"\r\n\r\n",
    lambda: b"GET /a HTTP/1.1\r\nAuthor",
    lambda: b"GET /a HTTP/1.1\r\n\r\n",
    lambda: b"GET /a HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n",
    lambda: b"POST /a HTTP/1.1\r\nAuthorization: Bearer\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 2000,
    lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    lambda: b"x" * 20_000,
]


def withstand(strangers: int) -> dict[str, float]:
    """Hold the connections of so many strangers while peers ask, and look at what the server spends on them.

    By hand, with more file descriptors than strangers, from the root of the repository:
    ``python -c "import runpy; print(runpy.run_path('tests/unit/test_service.py')['withstand'](10_000))"``

    Returns:
        strangers, answers that peers got, most_threads, seconds.
    """
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(lines)
    service.logger.addHandler(handler)
    level = service.logger.level
    service.logger.setLevel(logging.INFO)
    failures: list[RequestFailed] = []
    answers = most_threads = most_files = 0
    flooded = threading.Event()
    files_before = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()

    def be_a_peer(server: TokenServer) -> None:
        nonlocal answers
        with Connection(server.address, TOKEN) as kept:
            while not flooded.is_set():
                try:
                    assert ask(server.address, "/", TOKEN, timeout_s=TIMEOUT_S) == ["GET", "/", {}]
                    get(kept)
                except RequestFailed as failure:
                    failures.append(failure)
                answers += 2

    with ExitStack() as held, serving() as server:
        peer = threading.Thread(target=be_a_peer, args=(server,))
        peer.start()
        held.callback(peer.join)
        held.callback(flooded.set)
        crowd: list[socket.socket] = []
        for number in range(strangers):
            stranger = held.enter_context(connect(server))
            crowd.append(stranger)
            # One that came earlier says a little more, if it is still there.
            for one, words in ((stranger, STRANGERS[number % len(STRANGERS)]()), (crowd[number // 2], b"x")):
                with suppress(ConnectionError):
                    one.sendall(words)
            if number % 10 == 0:
                most_threads = max(most_threads, len(threads()))
                most_files = max(most_files, len(os.listdir("/proc/self/fd")) - len(crowd) - files_before)
        flooded.set()
        peer.join()
        for stranger in crowd:
            said = read_all(stranger)
            assert not said or said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 ")), said
    took = time.monotonic() - began
    service.logger.removeHandler(handler)
    service.logger.setLevel(level)

    assert not failures
    assert answers
    # What has given its place back may need a moment more to be gone.
    assert most_threads <= service._UNPROVEN * 3 // 2
    assert most_files <= service._UNPROVEN * 3 // 2
    assert lines.qsize() <= took / service._QUIET_S + 2
    assert all(lines.get().levelno <= logging.INFO for _ in range(lines.qsize()))
    return {"strangers": strangers, "answers": answers, "most_threads": most_threads, "seconds": round(took, 1)}


def test_a_crowd_of_strangers_keeps_no_peer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last of them stay until their time is up.
    monkeypatch.setattr(service, "_HEAD_S", 1.5)
    withstand(300)
