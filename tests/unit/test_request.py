"""Requests over connections that are kept, lost and closed, to servers that mean well and to others."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

import pytest

from elastic_train.peer_ckpt import service
from elastic_train.peer_ckpt.request import Connection, RequestFailed, ask, request
from elastic_train.peer_ckpt.service import Exchange, TokenServer

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


class Servant:
    """Answers with what was sent; knows which thread, and so which connection, each request came over."""

    def __init__(self, port: int = 0) -> None:
        self.threads: list[threading.Thread] = []
        self.server = TokenServer("127.0.0.1", port, TOKEN, self.respond)
        self.address = self.server.address

    def respond(self, exchange: Exchange) -> None:
        self.threads.append(threading.current_thread())
        if exchange.place == "/none":
            exchange.refuse(HTTPStatus.NOT_FOUND, exchange.arguments.get("reason", ""))
        else:
            exchange.answer(exchange.read_json() if exchange.command == "POST" else exchange.path)


@pytest.fixture
def servant() -> Iterator[Servant]:
    made = Servant()
    yield made
    made.server.close()


@pytest.fixture
def connection(servant: Servant) -> Iterator[Connection]:
    with Connection(servant.address, TOKEN) as made:
        yield made


def get(connection: Connection, target: str, body: object = None) -> object:
    with connection.request(target, deadline=soon(), body=body) as answer:
        return json.loads(answer.read(answer.length))


@contextmanager
def scripted(*scripts: Callable[[socket.socket], None]) -> Iterator[str]:
    """Somebody who does this with the first connection, that with the second, and takes no further one."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            listener.settimeout(TIMEOUT_S)
            for script in scripts:
                taken, _ = listener.accept()
                with taken:
                    taken.settimeout(TIMEOUT_S)
                    script(taken)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join()


def saying(content: bytes) -> Callable[[socket.socket], None]:
    def script(taken: socket.socket) -> None:
        taken.recv(65536)
        taken.sendall(content)

    return script


def test_several_requests_go_over_one_connection(servant: Servant, connection: Connection) -> None:
    assert get(connection, "/a?b=c") == "/a?b=c"
    assert get(connection, "/", {"ä": [1, None]}) == {"ä": [1, None]}
    with pytest.raises(RequestFailed, match="404 not here"):
        get(connection, "/none?reason=not+here")
    assert get(connection, "/again") == "/again"
    assert len(set(servant.threads)) == 1


def test_an_answer_that_was_not_read_is_not_taken_for_the_next(servant: Servant, connection: Connection) -> None:
    with connection.request("/first", deadline=soon()) as answer:
        answer.read(1)
    assert get(connection, "/second") == "/second"
    with pytest.raises(RequestFailed, match="404"):
        get(connection, "/none?reason=" + "x" * 1000)
    assert get(connection, "/third") == "/third"
    assert len(set(servant.threads)) == 3


def test_a_reader_that_fails_leaves_nothing_behind(servant: Servant, connection: Connection) -> None:
    with pytest.raises(KeyError), connection.request("/first", deadline=soon()):
        raise KeyError
    with pytest.raises(RequestFailed, match="disk full"), connection.request("/first", deadline=soon()):
        raise OSError("disk full")
    assert get(connection, "/second") == "/second"


def test_a_connection_that_was_closed_meanwhile_is_made_again(
    servant: Servant, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_IDLE_S", 0.0)
    assert get(connection, "/a") == "/a"
    servant.threads[0].join(TIMEOUT_S)
    assert get(connection, "/b", ["b"]) == ["b"]
    assert len(set(servant.threads)) == 2


def test_a_server_that_was_started_anew_is_found_again(servant: Servant, connection: Connection) -> None:
    assert get(connection, "/a") == "/a"
    servant.server.close()
    with pytest.raises(RequestFailed):
        get(connection, "/b")
    successor = Servant(int(servant.address.rpartition(":")[2]))
    assert get(connection, "/b") == "/b"
    successor.server.close()


def test_only_a_kept_connection_is_tried_again() -> None:
    with (
        scripted(lambda taken: None) as address,
        Connection(address, TOKEN) as connection,
        pytest.raises(RequestFailed, match=r"(?i)connection|pipe"),
    ):
        get(connection, "/")


def test_an_answer_of_the_old_protocol_ends_its_connection() -> None:
    old = saying(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n7")
    last = saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\n8")
    with scripted(old, last) as address, Connection(address, TOKEN) as connection:
        assert [get(connection, "/"), get(connection, "/")] == [7, 8]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 1\r\n\r\n1",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n1",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{",
        b"x" * 100_000,
    ],
)
def test_what_is_no_answer_is_a_failed_request(content: bytes) -> None:
    with scripted(saying(content)) as address, pytest.raises(RequestFailed, match=address):
        ask(address, "/", TOKEN, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"])
def test_who_says_a_little_now_and_then_is_given_up_in_the_end(beginning: bytes) -> None:
    def dribble(taken: socket.socket) -> None:
        taken.sendall(beginning)
        try:
            for _ in range(10_000):
                taken.sendall(b"x")
                taken.settimeout(0.01)
                try:
                    if not taken.recv(65536):
                        return
                except TimeoutError:
                    continue
        except ConnectionError:
            return

    with scripted(dribble) as address, pytest.raises(RequestFailed, match="timed out"):
        ask(address, "/", TOKEN, timeout_s=0.2)


def wait_for_the_end(taken: socket.socket) -> None:
    try:
        while taken.recv(65536):
            continue
    except ConnectionError:
        return


def test_who_says_nothing_is_given_up_sooner() -> None:
    with (
        scripted(wait_for_the_end) as address,
        Connection(address, TOKEN, idle_s=0.05) as connection,
        pytest.raises(RequestFailed, match="timed out"),
    ):
        get(connection, "/")


def test_no_time_is_no_request(connection: Connection) -> None:
    with pytest.raises(RequestFailed, match="timed out"), connection.request("/", deadline=time.monotonic()):
        pass


def test_another_thread_can_close_it_in_the_middle() -> None:
    asked = threading.Event()

    def hold(taken: socket.socket) -> None:
        taken.recv(65536)
        asked.set()
        wait_for_the_end(taken)

    with scripted(hold) as address:
        connection = Connection(address, TOKEN)

        def close() -> None:
            asked.wait(TIMEOUT_S)
            connection.close()

        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises(RequestFailed, match="closed connection"):
            get(connection, "/")
        closer.join()
        with pytest.raises(RequestFailed, match="this side has closed it"):
            get(connection, "/")
        connection.close()


def test_another_thread_can_close_it_while_it_connects() -> None:
    # A full queue of connections that nobody accepts: the next one is not answered.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as waiting:
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        connection = Connection(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, idle_s=TIMEOUT_S)
        failures: list[RequestFailed] = []

        def ask_in_vain() -> None:
            try:
                get(connection, "/")
            except RequestFailed as failure:
                failures.append(failure)

        asker = threading.Thread(target=ask_in_vain)
        asker.start()
        while asker.is_alive() and connection._wire is None:
            asker.join(0.01)
        connection.close()
        asker.join(TIMEOUT_S)
        assert len(failures) == 1


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "127.0.0.1:80", "http://", "http://127.0.0.1", "http://127.0.0.1:x", "ftp://a:1", "http://["],
)
def test_an_address_must_be_one(address: str) -> None:
    with pytest.raises(RequestFailed), request(address, "/", TOKEN, timeout_s=TIMEOUT_S):
        pass


def test_the_body_goes_where_it_is_wanted(servant: Servant) -> None:
    target = bytearray(b"." * 8)
    with request(servant.address, "/abc", TOKEN, timeout_s=TIMEOUT_S) as answer:
        assert answer.length == 6
        answer.read_into(memoryview(target)[1:3])
        answer.read_into(memoryview(target)[3:7])
        assert answer.length == 0
        with pytest.raises(ConnectionError, match="too early"):
            answer.read(1)
    assert target == b'."/abc".'
