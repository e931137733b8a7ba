"""What goes from one rank's server to another's client, over a real connection."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load

from elastic_train.peer_ckpt.client import PeerClient, TransferFailed
from elastic_train.peer_ckpt.layout import Layout
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.snapshot import Snapshot

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
# More than the kernel holds between two ends that do not read.
LARGE = 16 << 20


def sections() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "outer": {
            "weight": torch.arange(6.0).reshape(2, 3),
            "momentum/1": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        },
        "inner": {"step": torch.tensor(7), "mask": torch.tensor([True, False]), "nothing": torch.empty(0, 4)},
        "none": {},
    }


HEADER = {"outer_step": 12, "rank_hash": -5, "state_hash": "ab", "history": {"11": "cd"}, "extra": {"lr": [0.1]}}


def stands(attempt: str, dead: frozenset[int]) -> Mapping[str, Any]:
    return {"attempt": attempt, "dead": sorted(dead)}


@pytest.fixture
def server() -> Iterator[PeerServer]:
    made = PeerServer("127.0.0.1", TOKEN, stands)
    yield made
    made.close()


@pytest.fixture
def client() -> PeerClient:
    return PeerClient(TOKEN)


def get(address: str, target: str, **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(address).netloc, timeout=TIMEOUT_S)
    connection.request("GET", target, headers=headers)
    with connection.getresponse() as response:
        return response.status, response.read()


def test_a_snapshot_arrives_as_it_was_published(server: PeerServer, client: PeerClient) -> None:
    server.publish(Snapshot(HEADER, sections()))
    seen: list[tuple[int, int]] = []

    received = client.fetch(
        server.address, ["inner", "outer", "none"], TIMEOUT_S, lambda done, total: seen.append((done, total))
    )

    assert received.header == HEADER
    assert list(received.sections) == ["inner", "outer", "none"]
    for section, tensors in sections().items():
        assert received.sections[section].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert received.sections[section][name].dtype == tensor.dtype
            assert torch.equal(received.sections[section][name], tensor)
    total = 6 * 4 + 2 * 2 + 8 + 2
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_only_the_sections_that_were_asked_for_are_sent(server: PeerServer, client: PeerClient) -> None:
    server.publish(Snapshot(HEADER, sections()))
    assert list(client.fetch(server.address, ["outer"], TIMEOUT_S).sections) == ["outer"]


def test_what_was_fetched_can_be_published_again(server: PeerServer, client: PeerClient) -> None:
    server.publish(Snapshot(HEADER, sections()))
    server.publish(client.fetch(server.address, ["outer"], TIMEOUT_S))
    again = client.fetch(server.address, ["outer"], TIMEOUT_S)
    assert again.header == HEADER
    assert torch.equal(again.sections["outer"]["weight"], sections()["outer"]["weight"])


def test_the_wire_is_a_safetensors_file(server: PeerServer) -> None:
    server.publish(Snapshot(HEADER, sections()))
    status, body = get(server.address, "/state?sections=outer,inner", Authorization=f"Bearer {TOKEN}")
    read = load(body)
    assert status == 200
    assert torch.equal(read["outer/weight"], sections()["outer"]["weight"])
    assert torch.equal(read["outer/momentum/1"], sections()["outer"]["momentum/1"])
    assert read["inner/step"].item() == 7


@pytest.mark.parametrize("target", ["/status", "/state?sections=outer", "/nowhere"])
@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", TOKEN, f"Bearer {TOKEN}0", "\xe4"]
)
def test_without_the_token_nothing_is_told(server: PeerServer, target: str, given: str | None) -> None:
    server.publish(Snapshot(HEADER, sections()))
    headers = {} if given is None else {"Authorization": given}
    status, body = get(server.address, target, **headers)
    assert (status, body) == (401, b"this needs the token of the run")


def test_a_client_with_another_token_gets_nothing(server: PeerServer) -> None:
    server.publish(Snapshot(HEADER, sections()))
    stranger = PeerClient("another")
    assert stranger.status(server.address, timeout_s=TIMEOUT_S) is None
    with pytest.raises(TransferFailed, match="401"):
        stranger.fetch(server.address, ["outer"], TIMEOUT_S)


def test_a_server_without_a_token_does_not_start() -> None:
    with pytest.raises(ValueError, match="token"):
        PeerServer("127.0.0.1", "", stands)


def test_the_token_is_never_logged(server: PeerServer, client: PeerClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        client.status(server.address, timeout_s=TIMEOUT_S)
        get(server.address, "/status", Authorization="Bearer wrong")
        with pytest.raises(TransferFailed) as failure:
            client.fetch(server.address, ["outer"], TIMEOUT_S)
    assert "/status" in caplog.text
    assert TOKEN not in caplog.text + str(failure.value)


def test_a_question_carries_the_attempt_and_the_dead(server: PeerServer, client: PeerClient) -> None:
    assert client.status(server.address, "3/1 &=ü", {4, 0}, TIMEOUT_S) == {"attempt": "3/1 &=ü", "dead": [0, 4]}
    assert client.status(server.address, timeout_s=TIMEOUT_S) == {"attempt": "", "dead": []}


def test_a_question_that_makes_no_sense_is_refused(server: PeerServer) -> None:
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    assert get(server.address, "/status?dead=1,x", **authorized)[0] == 400
    assert get(server.address, "/nowhere", **authorized)[0] == 404


def test_a_peer_that_cannot_answer_is_no_answer(client: PeerClient, caplog: pytest.LogCaptureFixture) -> None:
    def fails(attempt: str, dead: frozenset[int]) -> Mapping[str, Any]:
        raise RuntimeError("no idea")

    server = PeerServer("127.0.0.1", TOKEN, fails)
    assert client.status(server.address, timeout_s=TIMEOUT_S) is None
    server.close()
    assert "no idea" in caplog.text


def test_a_peer_that_is_gone_is_no_answer(server: PeerServer, client: PeerClient) -> None:
    server.close()
    server.close()
    assert client.status(server.address, timeout_s=TIMEOUT_S) is None
    with pytest.raises(TransferFailed, match=r"127\.0\.0\.1"):
        client.fetch(server.address, ["outer"], TIMEOUT_S)


@pytest.mark.parametrize("address", ["", "nonsense", "http://127.0.0.1:x", "http://"])
def test_an_address_that_is_none_is_no_answer(client: PeerClient, address: str) -> None:
    assert client.status(address) is None


def test_only_a_published_section_can_be_fetched(server: PeerServer, client: PeerClient) -> None:
    with pytest.raises(TransferFailed, match="nothing is published yet"):
        client.fetch(server.address, ["outer"], TIMEOUT_S)
    snapshot = Snapshot(HEADER, sections())
    server.publish(snapshot)
    with pytest.raises(TransferFailed, match="there is no section other"):
        client.fetch(server.address, ["outer", "other"], TIMEOUT_S)
    snapshot.retire("inner")
    with pytest.raises(TransferFailed, match="being written anew: inner"):
        client.fetch(server.address, ["outer", "inner"], TIMEOUT_S)
    assert client.fetch(server.address, ["outer"], TIMEOUT_S).header == HEADER


class InTheMiddle:
    """A transfer of ones that is interrupted once its first bytes are there."""

    def __init__(self, server: PeerServer, client: PeerClient, interrupt: Callable[[], None]) -> None:
        self.interrupted = 0

        def progress(done: int, total: int) -> None:
            if not self.interrupted:
                interrupt()
            self.interrupted = done

        self.received: Snapshot | None = None
        try:
            self.received = client.fetch(server.address, ["outer"], TIMEOUT_S, progress)
        except TransferFailed:
            assert 0 < self.interrupted < LARGE * 4


def test_a_transfer_is_cut_off_before_its_memory_is_overwritten(server: PeerServer, client: PeerClient) -> None:
    memory = torch.ones(LARGE)
    snapshot = Snapshot(HEADER, {"outer": {"weight": memory}, "inner": {"x": torch.zeros(1)}})
    server.publish(snapshot)

    def overwrite() -> None:
        snapshot.retire("outer")
        memory.zero_()

    assert InTheMiddle(server, client, overwrite).received is None


def test_a_transfer_outlives_the_publication_of_the_next_snapshot(server: PeerServer, client: PeerClient) -> None:
    first = Snapshot(HEADER, {"outer": {"weight": torch.ones(LARGE)}, "inner": {"x": torch.zeros(1)}})
    server.publish(first)

    def publish() -> None:
        first.retire("inner")
        server.publish(Snapshot(HEADER | {"outer_step": 13}, {"outer": {"weight": torch.zeros(LARGE)}}))

    received = InTheMiddle(server, client, publish).received
    assert received is not None
    assert received.header["outer_step"] == 12
    assert bool((received.sections["outer"]["weight"] == 1).all())


def test_a_server_that_closes_cuts_off_its_transfers(server: PeerServer, client: PeerClient) -> None:
    server.publish(Snapshot(HEADER, {"outer": {"weight": torch.ones(LARGE)}}))
    assert InTheMiddle(server, client, server.close).received is None


@contextmanager
def liar(answer: bytes, *, then_silent: bool = False) -> Iterator[str]:
    """Somebody at the address of a peer who gives this answer, whatever is asked."""
    done = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)
            if then_silent:
                done.wait(TIMEOUT_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        thread.join()


def answered(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body) if length is None else length, body)


HEAD = Layout.of(Snapshot(HEADER, {"outer": {"weight": torch.ones(4)}}), ["outer"]).encode()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed connection"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + HEAD + bytes(16), "too early"),
        (answered(b""), "too early"),
        (answered((1 << 62).to_bytes(8, "little") + bytes(100)), "a header of"),
        (answered((8).to_bytes(8, "little") + b"[1, 2]  "), "cannot be understood"),
        (answered(HEAD + bytes(15)), "describes 16 bytes and has 15"),
        (answered(HEAD + bytes(17)), "describes 16 bytes and has 17"),
        (answered(HEAD + bytes(15), len(HEAD) + 16), "cut off"),
        (answered(Layout(header={}, sections=("inner",), places=()).encode()), "it has the sections inner"),
    ],
)
def test_an_answer_that_is_no_snapshot_is_a_failed_transfer(client: PeerClient, answer: bytes, words: str) -> None:
    with liar(answer) as address, pytest.raises(TransferFailed, match=words):
        client.fetch(address, ["outer"], TIMEOUT_S)


@pytest.mark.parametrize("answer", [b"", answered(b"", 4), answered(b"12", 4)])
def test_a_peer_that_falls_silent_is_waited_for_so_long(client: PeerClient, answer: bytes) -> None:
    with liar(answer, then_silent=True) as address:
        assert client.status(address, timeout_s=0.2) is None
    with liar(answer, then_silent=True) as address, pytest.raises(TransferFailed, match="timed out"):
        client.fetch(address, ["outer"], 0.2)


@pytest.mark.parametrize("body", [b"[1]", b"nonsense", b"\xff"])
def test_a_status_that_is_no_object_is_no_answer(client: PeerClient, body: bytes) -> None:
    with liar(answered(body)) as address:
        assert client.status(address, timeout_s=TIMEOUT_S) is None
