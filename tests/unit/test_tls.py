"""Certificates of a run, made by openssl: who belongs to it is served, and nobody else."""

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_train.peer_ckpt import service
from elastic_train.peer_ckpt.request import Connection, RequestFailed, ask
from elastic_train.peer_ckpt.service import Exchange, TokenServer
from elastic_train.peer_ckpt.tls import Tls, TlsProblem

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=TIMEOUT_S)


def make_authority(folder: Path, name: str) -> Path:
    certificate = folder / f"{name}.pem"
    openssl("req", "-x509", *CURVE, "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", certificate)
    return certificate


def make_member(folder: Path, name: str, authority: Path) -> Tls:
    wish, key, certificate = (folder / f"{name}.{kind}" for kind in ("csr", "key", "pem"))
    openssl("req", "-new", *CURVE[:-2], "-subj", f"/CN={name}", "-keyout", key, "-out", wish)
    signer = ("-CA", authority, "-CAkey", authority.with_suffix(".key"), "-CAcreateserial", "-days", "2")
    openssl("x509", "-req", "-in", wish, *signer, "-out", certificate)
    return Tls(certificate=certificate, key=key, authority=authority)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def member(folder: Path) -> Tls:
    return make_member(folder, "member", make_authority(folder, "run"))


@pytest.fixture(scope="module")
def stranger(folder: Path, member: Tls) -> Tls:
    """Has a certificate of another authority, though it trusts that of the run."""
    made = make_member(folder, "stranger", make_authority(folder, "another"))
    return Tls(certificate=made.certificate, key=made.key, authority=member.authority)


def echo(exchange: Exchange) -> None:
    exchange.answer([exchange.place, exchange.read_json() if exchange.command == "POST" else None])


@contextmanager
def serving(tls: Tls | None, respond: Callable[[Exchange], None] = echo) -> Iterator[str]:
    server = TokenServer("127.0.0.1", 0, TOKEN, respond, tls=tls)
    yield server.address
    server.close()


def test_members_of_the_run_talk(member: Tls) -> None:
    with serving(member) as address:
        assert address.startswith("https://127.0.0.1:")
        assert ask(address, "/a", TOKEN, timeout_s=TIMEOUT_S, body=[1], tls=member) == ["/a", [1]]
        assert ask(address, "/b", TOKEN, timeout_s=TIMEOUT_S, tls=member) == ["/b", None]


def test_much_goes_over_one_connection(member: Tls) -> None:
    content = bytes(range(256)) * (20 << 10)

    def send(exchange: Exchange) -> None:
        exchange.begin(len(content), "application/octet-stream")
        exchange.send(memoryview(content))

    with serving(member, send) as address, Connection(address, TOKEN, tls=member) as connection:
        for _ in range(2):
            with connection.request("/", deadline=float("inf")) as answer:
                assert answer.read(answer.length) == content


def test_a_member_still_needs_the_token(member: Tls) -> None:
    with serving(member) as address, pytest.raises(RequestFailed, match="401"):
        ask(address, "/", "another", timeout_s=TIMEOUT_S, tls=member)


def test_a_certificate_of_another_authority_lets_nobody_in(member: Tls, stranger: Tls) -> None:
    with serving(member) as address, pytest.raises(RequestFailed):
        ask(address, "/", TOKEN, timeout_s=TIMEOUT_S, tls=stranger)


def test_a_server_of_another_authority_is_not_trusted(member: Tls, stranger: Tls) -> None:
    with serving(stranger) as address, pytest.raises(RequestFailed, match="certificate verify failed"):
        ask(address, "/", TOKEN, timeout_s=TIMEOUT_S, tls=member)


def test_the_token_is_not_sent_in_plain_text(member: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HEAD_S", 0.1)
    with serving(None) as address:
        with pytest.raises(RequestFailed, match="https://host:port"):
            ask(address, "/", TOKEN, timeout_s=TIMEOUT_S, tls=member)
        with pytest.raises(RequestFailed):
            ask(address.replace("http:", "https:"), "/", TOKEN, timeout_s=TIMEOUT_S, tls=member)
    with serving(member) as address, pytest.raises(RequestFailed, match="http://host:port"):
        ask(address, "/", TOKEN, timeout_s=TIMEOUT_S)


def test_who_does_not_shake_hands_is_let_go(member: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HEAD_S", 0.1)
    with serving(member) as address:
        port = int(address.rpartition(":")[2])
        for word in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
                connection.sendall(word)
                try:
                    while connection.recv(4096):
                        continue
                except ConnectionError:
                    continue
        monkeypatch.undo()
        assert ask(address, "/", TOKEN, timeout_s=TIMEOUT_S, tls=member) == ["/", None]


def test_a_transfer_that_is_cut_off_never_goes_on_in_plain_text(member: Tls) -> None:
    content = bytes(64 << 20)
    exchanges: list[Exchange] = []

    def send(exchange: Exchange) -> None:
        exchanges.append(exchange)
        exchange.begin(len(content), "application/octet-stream")
        exchange.send(memoryview(content))

    def read(connection: Connection) -> None:
        with connection.request("/", deadline=float("inf")) as answer:
            answer.read(1)
            exchanges[0].cut_off()
            answer.read(answer.length)

    with (
        serving(member, send) as address,
        Connection(address, TOKEN, tls=member) as connection,
        # Plain text in the middle would be another failure.
        pytest.raises(RequestFailed, match="the connection was cut off"),
    ):
        read(connection)


@pytest.mark.parametrize("file", ["certificate", "key", "authority"])
@pytest.mark.parametrize("side", ["server_context", "client_context"])
def test_a_file_that_is_not_as_it_must_be_is_named(member: Tls, file: str, side: str, tmp_path: Path) -> None:
    files = {"certificate": member.certificate, "key": member.key, "authority": member.authority}
    wrong = tmp_path / "wrong.pem"
    make = getattr(Tls(**files | {file: wrong}), side)
    with pytest.raises(TlsProblem, match=r"wrong\.pem cannot be read"):
        make()
    wrong.write_text(json.dumps("nothing"))
    with pytest.raises(TlsProblem, match=r"wrong\.pem is no"):
        make()


def test_a_key_of_something_else_is_named(member: Tls, stranger: Tls) -> None:
    mixed = Tls(certificate=member.certificate, key=stranger.key, authority=member.authority)
    with pytest.raises(TlsProblem, match=r"stranger\.key is not the private key of .*member\.pem"):
        mixed.client_context()


def test_nobody_is_asked_for_a_passphrase(member: Tls, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", member.key, "-out", locked, "-aes256", "-passout", "pass:secret")
    with pytest.raises(TlsProblem, match=r"locked\.key has a passphrase"):
        Tls(certificate=member.certificate, key=locked, authority=member.authority).server_context()


def test_a_server_with_bad_files_does_not_start(member: Tls, tmp_path: Path) -> None:
    bad = Tls(certificate=member.certificate, key=tmp_path / "none", authority=member.authority)
    with pytest.raises(ValueError, match="none cannot be read"):
        TokenServer("127.0.0.1", 0, TOKEN, echo, tls=bad)


def test_certificates_that_would_not_do_are_found_at_the_start(member: Tls, stranger: Tls) -> None:
    member.check()
    with pytest.raises(TlsProblem, match=r"stranger\.pem is no certificate that .*run\.pem lets in"):
        stranger.check()
