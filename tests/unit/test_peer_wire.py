"""Heads of messages, as they come in over a socket, in pieces, from anybody."""

import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.peer_ckpt.wire import FIELD_LIMIT, HEAD_LIMIT, BadHead, Head, Wire

TIMEOUT_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    here, there = socket.socketpair()
    wire = Wire(here)
    yield wire, there
    wire.close()
    there.close()


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def test_a_head_is_its_first_line_and_its_fields() -> None:
    head = Head.parse(b"POST /held HTTP/1.1\r\nContent-Length: 12\r\nHOST:a:1 \r\nConnection: Close")
    assert head.start == "POST /held HTTP/1.1"
    assert head.fields == {"content-length": "12", "host": "a:1", "connection": "Close"}
    assert head.length == 12
    assert head.is_last
    assert not Head.parse(b"GET / HTTP/1.1").is_last
    assert Head.parse(b"").length == 0


@pytest.mark.parametrize(
    "field",
    [
        b"no colon",
        b": no name",
        b"a name: x",
        b" folded: x",
        b"Content-Length: -1",
        b"Content-Length: ",
        b"Content-Length: 0x10",
        b"Content-Length: \xb2",
        b"Content-Length: 1\r\nContent-Length: 1",
        b"Content-Length: " + b"9" * 5000,
        b"Transfer-Encoding: chunked",
        b"\r\n".join(b"f%d: x" % number for number in range(FIELD_LIMIT + 1)),
    ],
)
def test_a_head_that_could_be_misunderstood_is_none(field: bytes) -> None:
    with pytest.raises(BadHead):
        Head.parse(b"GET / HTTP/1.1\r\n" + field)


@given(content=st.binary(max_size=200))
def test_whatever_comes_is_a_head_or_is_none(content: bytes) -> None:
    try:
        assert Head.parse(content).length >= 0
    except BadHead:
        return


@given(pieces=st.lists(st.integers(1, 40), max_size=8), body=st.binary(max_size=50))
def test_messages_arrive_whole_in_whatever_pieces_they_come(pieces: list[int], body: bytes) -> None:
    message = b"GET /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    left = message + message
    here, there = socket.socketpair()
    with here, there:
        wire = Wire(here)
        for size in pieces:
            there.sendall(left[:size])
            left = left[size:]
        there.sendall(left)
        for _ in range(2):
            assert wire.wait(TIMEOUT_S)
            head = wire.read_head(soon(), TIMEOUT_S)
            assert head.start == "GET /a HTTP/1.1"
            received = bytearray(head.length)
            wire.read_into(memoryview(received), soon(), TIMEOUT_S)
            assert received == body


def test_a_head_is_waited_for_so_long(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    there.sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(TimeoutError):
        wire.read_head(soon(), 0.01)
    with pytest.raises(TimeoutError):
        wire.read_head(time.monotonic(), TIMEOUT_S)
    there.sendall(b"\r\n")
    assert wire.read_head(soon(), TIMEOUT_S).start == "GET / HTTP/1.1"


def test_a_head_may_have_so_many_bytes(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    there.sendall(b"x" * HEAD_LIMIT)
    with pytest.raises(BadHead, match="more than"):
        wire.read_head(soon(), TIMEOUT_S)


def test_the_end_of_the_connection_is_no_message(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    there.sendall(b"GET / HTTP/1.1\r\n")
    there.close()
    with pytest.raises(ConnectionError):
        wire.read_head(soon(), TIMEOUT_S)
    with pytest.raises(ConnectionError):
        wire.read_into(memoryview(bytearray(100)), soon(), TIMEOUT_S)


def test_nothing_is_no_message_either(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    assert not wire.wait(0.01)
    there.close()
    assert not wire.wait(TIMEOUT_S)


def test_nothing_is_sent_or_received_once_it_is_cut_off(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    wire.cut_off()
    wire.cut_off()
    with pytest.raises(ConnectionError):
        wire.send(b"x", soon(), TIMEOUT_S)
    with pytest.raises(ConnectionError):
        wire.read_head(soon(), TIMEOUT_S)
    assert there.recv(1) == b""
