"""Parts that leave from shared memory without a copy: the same bytes, the same bounds, and never a mixture."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
import xxhash

from elastic_train.peer_ckpt.client import Donor, PeerClient
from elastic_train.peer_ckpt.manifest import CHECKSUM_BYTES
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shared_memory import SharedMemory
from elastic_train.peer_ckpt.snapshot import Snapshot
from elastic_train.peer_ckpt.wire import Wire
from tests.unit.test_tls import make_authority, make_member
from tests.waiting import wait_until

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
ROOM = 64 << 20
STEP = 4
PART = 128 << 10
HOST = "127.0.0.1"
OTHER_HOST = "127.0.0.2"
"""Who connects to it does so from ``HOST``."""


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_CLOEXEC)
    yield made
    os.close(made)


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        here, _ = listener.accept()
    with closing(Wire(here)) as wire, there:
        yield wire, there


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def read(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size and (piece := connection.recv(size - len(content))):
        content += piece
    return bytes(content)


# -- a connection ------------------------------------------------------------------------------------------------------


def test_bytes_of_a_file_arrive_as_they_are(file: int, ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    content = torch.arange(3 << 20, dtype=torch.int32).numpy().tobytes()
    os.write(file, content)
    # More than the sockets hold, so that it has to wait for room.
    sender = threading.Thread(target=wire.send_file, args=(file, 5, len(content) - 9, soon(), TIMEOUT_S))
    sender.start()

    assert read(there, len(content) - 9) == content[5:-4]
    sender.join()


def test_it_waits_for_room_so_long(file: int, ends: tuple[Wire, socket.socket]) -> None:
    wire, _ = ends
    os.truncate(file, 64 << 20)

    with pytest.raises(TimeoutError):
        wire.send_file(file, 0, 64 << 20, soon(), 0.05)
    with pytest.raises(TimeoutError):
        wire.send_file(file, 0, 1, time.monotonic(), TIMEOUT_S)


def test_a_file_that_ends_too_early_is_an_error(file: int, ends: tuple[Wire, socket.socket]) -> None:
    os.write(file, b"abc")
    with pytest.raises(OSError, match="ends at byte 3"):
        ends[0].send_file(file, 0, 4, soon(), TIMEOUT_S)


def test_who_waits_for_room_is_cut_off(file: int, ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    os.truncate(file, 64 << 20)
    failures: list[OSError] = []

    def send() -> None:
        try:
            wire.send_file(file, 0, 64 << 20, soon(), TIMEOUT_S)
        except OSError as error:
            failures.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    assert read(there, 1 << 20) == bytes(1 << 20)
    wire.cut_off()
    sender.join(TIMEOUT_S)

    assert [type(error) for error in failures] == [BrokenPipeError]


# -- a server ----------------------------------------------------------------------------------------------------------


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "outer": {
            "small": torch.arange(9.0),
            "anchor": torch.arange(500_000, dtype=torch.int32),
            "odd": torch.arange(100_001, dtype=torch.int16).view(torch.bfloat16),
        },
        "inner": {"step": torch.tensor(3.0), "nothing": torch.empty(0)},
    }


def state(memory: SharedMemory | None) -> Snapshot:
    sections = tensors()
    if memory is not None:
        sections = {
            section: {
                name: memory.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor) for name, tensor in those.items()
            }
            for section, those in sections.items()
        }
    return Snapshot({"outer_step": STEP}, sections)


def serve(snapshot: Snapshot, memory: SharedMemory | None, host: str = OTHER_HOST, **settings: object) -> PeerServer:
    server = PeerServer(
        host,
        TOKEN,
        lambda attempt, dead: {},
        memory=memory,
        part_bytes=PART,
        **settings,  # type: ignore[arg-type]
    )
    server.publish(snapshot)
    return server


def is_whole(sections: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
    return all(
        torch.equal(sections[section][name].view(torch.uint8), tensor.view(torch.uint8))
        for section, those in tensors().items()
        for name, tensor in those.items()
        if tensor.dim()
    ) and bool(sections["inner"]["step"] == 3)


def donor(server: PeerServer, slot: int = 0) -> Donor:
    return Donor(slot=slot, incarnation=0, address=server.address)


@pytest.mark.parametrize(("in_memory", "host"), [(True, OTHER_HOST), (True, HOST), (False, OTHER_HOST)])
def test_a_state_arrives_the_same_from_wherever_it_lies(
    file: int, in_memory: bool, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory(f"/proc/self/fd/{file}", room=ROOM)
    sent: list[int] = []
    send_file = Wire.send_file

    def counted(wire: Wire, file: int, start: int, size: int, deadline: float, idle_s: float) -> None:
        sent.append(size)
        send_file(wire, file, start, size, deadline, idle_s)

    monkeypatch.setattr(Wire, "send_file", counted)
    with closing(serve(state(memory if in_memory else None), memory, host)) as server:
        fetched = PeerClient(TOKEN).fetch([donor(server)], ["outer", "inner"], want=STEP, timeout_s=TIMEOUT_S)

    assert is_whole(fetched.snapshot.sections)
    # Nearly all of it, but for what is too small.
    assert sum(sent) > 2_000_000 if in_memory and host == OTHER_HOST else not sent


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
def test_what_is_encrypted_is_not_sent_from_the_file(
    file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = make_member(tmp_path, "member", make_authority(tmp_path, "run"))
    memory = SharedMemory(f"/proc/self/fd/{file}", room=ROOM)

    def fail(*arguments: object) -> None:
        raise AssertionError("that would be plain text")

    monkeypatch.setattr(Wire, "send_file", fail)
    with closing(serve(state(memory), memory, tls=member)) as server:
        fetched = PeerClient(TOKEN, tls=member).fetch([donor(server)], ["outer"], want=STEP, timeout_s=TIMEOUT_S)

    assert torch.equal(fetched.snapshot.sections["outer"]["anchor"], tensors()["outer"]["anchor"])


def test_what_is_written_while_it_is_on_its_way_does_not_fit_its_checksum(file: int) -> None:
    memory = SharedMemory(f"/proc/self/fd/{file}", room=ROOM)
    snapshot = state(memory)
    start, stop = 36, 36 + PART
    original = snapshot.sections["outer"]["anchor"].numpy().tobytes()[:PART]
    with closing(serve(snapshot, memory)) as server:
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
            target = f"/part?section=outer&start={start}&stop={stop}&for=1.0"
            connection.sendall(f"GET {target} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            # The head comes first; the rest has left the server's hands, and nobody has read it.
            head = read_head(connection)
            wait_until(lambda: server.load == 0)
            snapshot.retire("outer")
            snapshot.sections["outer"]["anchor"].fill_(-1)
            body = read(connection, PART + CHECKSUM_BYTES)

    assert b"200 OK" in head
    content, checksum = body[:-CHECKSUM_BYTES], body[-CHECKSUM_BYTES:]
    assert len(content) == PART
    # A kernel that had copied them sends what they were.
    assert content == original or xxhash.xxh3_64_digest(content) != checksum


def read_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return head


def test_a_part_that_was_written_meanwhile_comes_from_another_donor() -> None:
    first, second = (os.memfd_create("test", os.MFD_CLOEXEC) for _ in range(2))
    memories = [SharedMemory(f"/proc/self/fd/{file}", room=ROOM) for file in (first, second)]
    snapshots = [state(memory) for memory in memories]
    servers = [serve(snapshot, memory) for snapshot, memory in zip(snapshots, memories, strict=True)]
    written = threading.Event()

    def progress(received: int, total: int, donors: Mapping[Donor, int]) -> None:
        if received and not written.is_set():
            written.set()
            snapshots[0].retire("outer")
            snapshots[0].sections["outer"]["anchor"].fill_(-1)

    try:
        fetched = PeerClient(TOKEN).fetch(
            [donor(servers[0], 0), donor(servers[1], 1)],
            ["inner", "outer"],
            want=STEP,
            timeout_s=TIMEOUT_S,
            shared=("outer",),
            on_progress=progress,
        )
    finally:
        for server in servers:
            server.close()
        os.close(first)
        os.close(second)

    assert written.is_set()
    assert is_whole(fetched.snapshot.sections)
