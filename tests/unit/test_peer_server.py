"""What one rank's server says to whoever asks it, over a real connection."""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import xxhash
from safetensors.torch import load

from elastic_train.peer_ckpt.client import Donor, PeerClient
from elastic_train.peer_ckpt.layout import LENGTH_BYTES, Layout
from elastic_train.peer_ckpt.manifest import CHECKSUM_BYTES, encode_manifest
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.snapshot import Snapshot
from tests.liar import Liar

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
PART = 10
BEARER = {"Authorization": f"Bearer {TOKEN}"}


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


def snapshot(outer_step: int = 12) -> Snapshot:
    return Snapshot(HEADER | {"outer_step": outer_step}, sections())


def stands(attempt: str, dead: frozenset[int]) -> Mapping[str, Any]:
    return {"attempt": attempt, "dead": sorted(dead)}


@contextmanager
def serving(*arguments: Any, **settings: Any) -> Iterator[PeerServer]:
    made = PeerServer("127.0.0.1", TOKEN, stands, *arguments, part_bytes=PART, **settings)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def server() -> Iterator[PeerServer]:
    with serving() as made:
        yield made


@pytest.fixture
def client() -> PeerClient:
    return PeerClient(TOKEN)


def get(address: str, target: str, headers: Mapping[str, str] = BEARER) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(address).netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", target, headers=dict(headers))
        with connection.getresponse() as response:
            return response.status, response.read()
    finally:
        connection.close()


def manifest(address: str, query: str) -> Layout:
    status, body = get(address, f"/manifest?{query}")
    assert status == 200, body
    layout = Layout.decode(body[LENGTH_BYTES:-CHECKSUM_BYTES])
    assert body == encode_manifest(layout)
    return layout


def content(address: str, query: str) -> bytes:
    status, body = get(address, f"/part?{query}")
    assert status == 200, body
    content, checksum = body[:-CHECKSUM_BYTES], body[-CHECKSUM_BYTES:]
    assert checksum == xxhash.xxh3_64_digest(content)
    return content


def test_a_manifest_says_what_the_parts_are_that_can_be_fetched(server: PeerServer) -> None:
    server.publish(snapshot())
    layout = manifest(server.address, "outer_step=12&sections=inner,outer,none")
    assert layout == Layout.of(snapshot(), ["inner", "outer", "none"], PART)
    parts = list(layout.parts())
    assert [(part.section, part.start, part.stop) for part in parts] == [
        ("inner", 0, 10),
        ("outer", 0, 10),
        ("outer", 10, 20),
        ("outer", 20, 28),
    ]
    for part in parts:
        query = f"outer_step=12&section={part.section}&start={part.start}&stop={part.stop}"
        assert len(content(server.address, query)) == part.size


def test_layout_and_parts_are_a_safetensors_file(server: PeerServer) -> None:
    server.publish(snapshot())
    layout = manifest(server.address, "sections=outer,inner")
    parts = [f"section={part.section}&start={part.start}&stop={part.stop}" for part in layout.parts()]
    read = load(layout.encode() + b"".join(content(server.address, part) for part in parts))
    assert torch.equal(read["outer/weight"], sections()["outer"]["weight"])
    assert torch.equal(read["outer/momentum/1"], sections()["outer"]["momentum/1"])
    assert read["inner/step"].item() == 7


def test_the_last_states_are_served_each_under_its_outer_step(server: PeerServer) -> None:
    for outer_step in (10, 11, 12):
        server.publish(snapshot(outer_step))
    assert manifest(server.address, "sections=outer").header["outer_step"] == 12
    for outer_step in (11, 12):
        assert manifest(server.address, f"outer_step={outer_step}&sections=outer").header["outer_step"] == outer_step
        content(server.address, f"outer_step={outer_step}&section=outer&start=0&stop=1")


def test_a_state_that_was_left_behind_is_not_served_but_the_newest_is_named(server: PeerServer) -> None:
    for outer_step in (10, 11, 12):
        server.publish(snapshot(outer_step))
    layout = manifest(server.address, "outer_step=10&sections=outer")
    assert (layout.header, layout.sections) == ({"outer_step": 12}, ())
    assert get(server.address, "/part?outer_step=10&section=outer&start=0&stop=1") == (
        410,
        b"outer step 10 is not kept any more",
    )


def test_only_so_many_states_are_kept() -> None:
    with serving(keep=1) as server:
        server.publish(snapshot(11))
        server.publish(snapshot(12))
        assert manifest(server.address, "outer_step=11&sections=outer").sections == ()


def test_a_state_whose_memory_is_all_written_anew_is_forgotten(server: PeerServer) -> None:
    first = snapshot(11)
    server.publish(first)
    for section in first.sections:
        first.retire(section)
    server.publish(snapshot(12))
    assert manifest(server.address, "outer_step=11&sections=outer").sections == ()


def test_a_rank_that_goes_on_from_an_earlier_state_serves_no_later_one(server: PeerServer) -> None:
    for outer_step in (11, 12, 11):
        server.publish(snapshot(outer_step))
    assert manifest(server.address, "sections=outer").header["outer_step"] == 11
    assert get(server.address, "/manifest?outer_step=12&sections=outer")[0] == 503


@pytest.mark.parametrize("settings", [{"keep": 0}, {"part_bytes": 0}])
def test_a_server_that_could_serve_nothing_does_not_start(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be served"):
        PeerServer("127.0.0.1", TOKEN, stands, **settings)


@pytest.mark.parametrize("header", [{}, {"outer_step": "12"}, {"outer_step": -1}, {"outer_step": True}])
def test_a_state_of_no_outer_step_cannot_be_published(server: PeerServer, header: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be published"):
        server.publish(Snapshot(header, sections()))


@pytest.mark.parametrize("query", ["", "outer_step=0&", "outer_step=12&"])
@pytest.mark.parametrize("rest", ["/manifest?{}sections=outer", "/part?{}section=outer&start=0&stop=1"])
def test_before_anything_is_published_there_is_nothing(server: PeerServer, query: str, rest: str) -> None:
    assert get(server.address, rest.format(query)) == (503, b"nothing is published yet")


def test_what_is_about_to_be_published_can_be_waited_for(server: PeerServer) -> None:
    server.publish(snapshot(11))
    target = "/manifest?outer_step=12&sections=outer"
    assert get(server.address, target) == (503, b"outer step 12 is not published yet")
    assert get(server.address, f"{target}&wait_ms=1")[0] == 503
    seen: list[int] = []
    asker = threading.Thread(target=lambda: seen.append(get(server.address, f"{target}&wait_ms=30000")[0]))
    asker.start()
    server.publish(snapshot(12))
    asker.join(TIMEOUT_S)
    assert seen == [200]


def test_who_waits_for_a_state_is_not_kept_by_a_server_that_closes(server: PeerServer) -> None:
    failed: list[str] = []

    def ask() -> None:
        try:
            failed.append(str(get(server.address, "/manifest?outer_step=12&sections=outer&wait_ms=60000")[0]))
        except Exception as error:
            failed.append(type(error).__name__)

    asker = threading.Thread(target=ask)
    asker.start()
    server.close()
    asker.join(TIMEOUT_S)
    assert len(failed) == 1
    assert failed != ["200"]


def test_only_a_section_that_is_there_can_be_fetched(server: PeerServer) -> None:
    made = snapshot()
    server.publish(made)
    assert get(server.address, "/manifest?sections=outer,other") == (404, b"there is no section other")
    assert get(server.address, "/part?section=other&start=0&stop=1") == (404, b"there is no section other")
    made.retire("inner")
    assert get(server.address, "/manifest?sections=outer,inner") == (410, b"being written anew: inner")
    assert get(server.address, "/part?section=inner&start=0&stop=1") == (410, b"being written anew: inner")
    assert manifest(server.address, "sections=outer").sections == ("outer",)


@pytest.mark.parametrize(
    "target",
    [
        "/status?dead=1,x",
        "/manifest?outer_step=x&sections=outer",
        "/manifest?outer_step=-1&sections=outer",
        "/manifest?sections=outer&wait_ms=soon",
        "/manifest?sections=outer&for=1",
        "/manifest?sections=outer&for=1.2.3",
        "/part?section=outer",
        "/part?section=outer&start=0&stop=0",
        "/part?section=outer&start=3&stop=2",
        "/part?section=outer&start=20&stop=29",
        "/part?section=outer&start=0&stop=99999999999999999999999",
        "/part?section=none&start=0&stop=1",
        "/taken?for=1.2",
        "/taken?outer_step=12&for=x",
    ],
)
def test_a_question_that_makes_no_sense_is_refused(server: PeerServer, target: str) -> None:
    server.publish(snapshot())
    assert get(server.address, target)[0] == 400


def test_other_places_do_not_exist(server: PeerServer) -> None:
    for target in ("/nowhere", "/state?sections=outer"):
        assert get(server.address, target)[0] == 404


@pytest.mark.parametrize("target", ["/status", "/manifest?sections=outer", "/part?section=outer&start=0&stop=1"])
@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", TOKEN, f"Bearer {TOKEN}0", "\xe4"]
)
def test_without_the_token_nothing_is_told(server: PeerServer, target: str, given: str | None) -> None:
    server.publish(snapshot())
    headers = {} if given is None else {"Authorization": given}
    assert get(server.address, target, headers) == (401, b"this needs the token of the run")


def test_a_server_without_a_token_does_not_start() -> None:
    with pytest.raises(ValueError, match="token"):
        PeerServer("127.0.0.1", "", stands)


def test_a_joiner_says_once_that_it_has_a_state(client: PeerClient) -> None:
    seen: list[tuple[Mapping[str, Any], str]] = []
    with serving(lambda header, joiner: seen.append((header, joiner))) as server:
        donor = Donor(slot=0, incarnation=0, address=server.address)
        server.publish(snapshot())
        manifest(server.address, "sections=outer&for=3.1")
        manifest(server.address, "sections=inner&for=3.1")
        manifest(server.address, "sections=inner&for=4.0")
        # The state may be a thing of the past by then.
        for outer_step in (13, 14):
            server.publish(snapshot(outer_step))
        assert not client.taken(donor, 12, "5.0", TIMEOUT_S)
        assert not client.taken(donor, 13, "3.1", TIMEOUT_S)
        assert client.taken(donor, 12, "3.1", TIMEOUT_S)
        assert not client.taken(donor, 12, "3.1", TIMEOUT_S)
        assert client.taken(donor, 12, "4.0", TIMEOUT_S)
    assert seen == [(HEADER, "3.1"), (HEADER, "4.0")]
    assert not client.taken(donor, 12, "4.0", TIMEOUT_S)


def test_the_load_is_the_joiners_that_are_being_sent_something(server: PeerServer) -> None:
    # More than the kernel holds between two ends that do not read.
    large = torch.zeros(64 << 20, dtype=torch.uint8)
    server.publish(Snapshot({"outer_step": 1}, {"outer": {"w": large}}))
    assert server.load == 0
    connections = []
    for joiner in ("1.0", "1.0", "2.0"):
        connection = HTTPConnection(urlsplit(server.address).netloc, timeout=TIMEOUT_S)
        connection.request("GET", f"/part?section=outer&start=0&stop={64 << 20}&for={joiner}", headers=BEARER)
        connections.append((connection, connection.getresponse()))
    assert server.load == 2
    for connection, response in connections:
        response.close()
        connection.close()


def test_the_token_is_never_logged(server: PeerServer, client: PeerClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        client.status(server.address, timeout_s=TIMEOUT_S)
        get(server.address, "/status", {"Authorization": "Bearer wrong"})
        get(server.address, "/manifest")
    assert "/status" in caplog.text
    assert TOKEN not in caplog.text


def test_a_question_carries_the_attempt_and_the_dead(server: PeerServer, client: PeerClient) -> None:
    assert client.status(server.address, "3/1 &=ü", {4, 0}, TIMEOUT_S) == {"attempt": "3/1 &=ü", "dead": [0, 4]}
    assert client.status(server.address, timeout_s=TIMEOUT_S) == {"attempt": "", "dead": []}


def test_a_client_with_another_token_is_told_nothing(server: PeerServer) -> None:
    assert PeerClient("another").status(server.address, timeout_s=TIMEOUT_S) is None


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


@pytest.mark.parametrize("address", ["", "nonsense", "http://127.0.0.1:x", "http://"])
def test_an_address_that_is_none_is_no_answer(client: PeerClient, address: str) -> None:
    assert client.status(address) is None


@pytest.mark.parametrize("body", [b"[1]", b"nonsense", b"\xff"])
def test_a_status_that_is_no_object_is_no_answer(client: PeerClient, body: bytes) -> None:
    with closing(Liar(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))) as liar:
        assert client.status(liar.address, timeout_s=TIMEOUT_S) is None


def test_a_peer_that_falls_silent_is_waited_for_so_long(client: PeerClient) -> None:
    with closing(Liar(b"", then_silent=True)) as liar:
        assert client.status(liar.address, timeout_s=0.1) is None
