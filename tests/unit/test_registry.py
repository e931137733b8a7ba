import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_train.lighthouse.registry import IncarnationEnded, Registry, RegistryServer
from elastic_train.peer_ckpt.directory import Directory, RegistrationRefused
from elastic_train.peer_ckpt.request import RequestFailed, ask
from elastic_train.peer_ckpt.roll import PeerEntry, Roll

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
RANKS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


def entry(incarnation: int) -> PeerEntry:
    return PeerEntry(incarnation=incarnation, addresses=RANKS)


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    made = RegistryServer("127.0.0.1", 0, TOKEN)
    yield made
    made.close()


@pytest.fixture
def directory(server: RegistryServer) -> Directory:
    return Directory(server.url, TOKEN)


def test_the_dead_cannot_register() -> None:
    registry = Registry()
    registry.ended(0, 1)
    with pytest.raises(IncarnationEnded, match="incarnation 1 of replica 0"):
        registry.register(0, entry(1))
    registry.register(0, entry(2))
    with pytest.raises(IncarnationEnded):
        registry.register(0, entry(1))
    assert registry.roll.peers == {0: entry(2)}


def test_nothing_is_lost_when_several_register_at_once() -> None:
    registry, start = Registry(), threading.Barrier(8)

    def register(slot: int) -> None:
        start.wait()
        for incarnation in range(50):
            registry.register(slot, entry(incarnation))
            registry.ended(slot, incarnation)

    threads = [threading.Thread(target=register, args=(slot,)) for slot in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.roll.ended == dict.fromkeys(range(8), 49)


def test_replicas_find_each_other(server: RegistryServer, directory: Directory) -> None:
    other = Directory(server.url, TOKEN)
    directory.register(0, 0, RANKS)
    other.register(1, 4, RANKS[:1])
    expected = {0: entry(0), 1: PeerEntry(incarnation=4, addresses=RANKS[:1])}
    assert directory.peers() == other.peers() == expected


def test_an_end_reaches_everybody(server: RegistryServer, directory: Directory) -> None:
    directory.register(0, 2, RANKS)
    assert not directory.is_dead(0, 2)
    assert directory.is_dead(0, 1)
    assert Directory(server.url, TOKEN).ended(0, 2)
    assert directory.is_dead(0, 2)
    assert directory.peers() == {}


def test_a_newer_incarnation_proves_that_the_older_is_gone(server: RegistryServer, directory: Directory) -> None:
    directory.register(0, 2, RANKS)
    Directory(server.url, TOKEN).register(0, 3, RANKS)
    assert directory.is_dead(0, 2)
    assert not directory.is_dead(0, 3)


def test_who_is_not_known_is_not_dead(directory: Directory) -> None:
    assert not directory.is_dead(5, 0)


def test_what_was_known_holds_while_the_registry_is_away(server: RegistryServer, directory: Directory) -> None:
    directory.register(0, 1, RANKS)
    directory.register(1, 0, RANKS)
    directory.ended(1, 0)
    server.close()
    assert directory.peers() == {0: entry(1)}
    assert directory.is_dead(1, 0)
    assert not directory.is_dead(0, 1)
    assert not directory.ended(0, 1)
    directory.register(0, 1, RANKS)


def test_a_registry_that_starts_anew_revives_nobody(server: RegistryServer, directory: Directory) -> None:
    directory.register(0, 1, RANKS)
    directory.ended(1, 0)
    port = int(server.url.rpartition(":")[2])
    server.close()
    successor = RegistryServer("127.0.0.1", port, TOKEN)
    try:
        assert directory.roll().ended == {1: 0}
        assert directory.peers() == {0: entry(1)}
        assert Directory(server.url, TOKEN).peers() == {}
    finally:
        successor.close()


def test_one_that_was_given_what_is_known_says_it_from_the_beginning() -> None:
    roll = Roll(peers={0: entry(1)}, ended={0: 0, 2: 5}, retired=(3, 2))
    server = RegistryServer("127.0.0.1", 0, TOKEN, roll=roll)
    try:
        newcomer = Directory(server.url, TOKEN)
        assert newcomer.roll() == roll
        assert newcomer.is_dead(2, 5)
        with pytest.raises(RegistrationRefused):
            newcomer.register(2, 5, RANKS)
    finally:
        server.close()


def test_one_that_starts_anew_is_told_again_by_those_who_know(server: RegistryServer, directory: Directory) -> None:
    directory.register(0, 1, RANKS)
    directory.ended(1, 0)
    for slot in (3, 2):
        directory.retired(slot)
    port = int(server.url.rpartition(":")[2])
    server.close()
    assert not directory.refresh()
    assert not directory.ended(1, 4)
    successor = RegistryServer("127.0.0.1", port, TOKEN)
    try:
        assert directory.refresh()
        assert Directory(server.url, TOKEN).roll() == Roll(peers={0: entry(1)}, ended={1: 4}, retired=(3, 2))
    finally:
        successor.close()


def test_who_has_seen_an_end_knows_it_though_nobody_heard(server: RegistryServer, directory: Directory) -> None:
    server.close()
    assert not directory.ended(1, 0)
    assert directory.is_dead(1, 0)
    assert not directory.is_dead(1, 1)


def test_who_cannot_register_learns_why(server: RegistryServer) -> None:
    with pytest.raises(RegistrationRefused, match=r"replica 0 could not be registered: .*401"):
        Directory(server.url, "another").register(0, 0, RANKS)
    directory = Directory(server.url, TOKEN)
    directory.ended(0, 3)
    with pytest.raises(RegistrationRefused, match="409 incarnation 3 of replica 0 has ended"):
        directory.register(0, 3, RANKS)
    server.close()
    assert not directory.register(0, 4, RANKS)


def test_a_registry_that_is_away_is_a_line_and_not_a_flood(
    server: RegistryServer, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="elastic_train.peer_ckpt")
    port = int(server.url.rpartition(":")[2])
    server.close()
    for _ in range(20):
        directory.roll()
        directory.donors(0, 0, "a", at_least=0, count=1)
    successor = RegistryServer("127.0.0.1", port, TOKEN)
    try:
        for _ in range(3):
            directory.roll()
    finally:
        successor.close()
    told = [record.getMessage() for record in caplog.records if record.name.endswith("directory")]
    assert [text.partition(" of the replicas ")[2].split(",")[0].split(":")[0] for text in told] == [
        "does not answer and is asked again",
        "answers again",
    ]


@pytest.mark.parametrize("target", ["/roll", "/register", "/ended"])
def test_without_the_token_nothing_is_told_or_taken(server: RegistryServer, directory: Directory, target: str) -> None:
    body = None if target == "/roll" else {"slot": 0, "incarnation": 0, "addresses": []}
    with pytest.raises(RequestFailed, match="401"):
        ask(server.url, target, "another", timeout_s=TIMEOUT_S, body=body)
    assert directory.roll().to_json() == {"peers": {}, "ended": {}, "retired": ()}


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"slot": 0},
        {"slot": -1, "incarnation": 0, "addresses": []},
        {"slot": 0, "incarnation": True, "addresses": []},
        {"slot": "0", "incarnation": 0, "addresses": []},
        {"slot": 0, "incarnation": 0},
        {"slot": 0, "incarnation": 0, "addresses": "http://a:1"},
        {"slot": 0, "incarnation": 0, "addresses": [1]},
        {"slot": 0, "incarnation": 0, "addresses": ["x" * (2 << 20)]},
    ],
)
def test_what_makes_no_sense_is_refused(server: RegistryServer, directory: Directory, body: Any) -> None:
    with pytest.raises(RequestFailed):
        ask(server.url, "/register", TOKEN, timeout_s=TIMEOUT_S, body=body)
    assert directory.peers() == {}


def test_there_is_nothing_else(server: RegistryServer) -> None:
    with pytest.raises(RequestFailed, match="404"):
        ask(server.url, "/roll", TOKEN, timeout_s=TIMEOUT_S, body={})
    with pytest.raises(RequestFailed, match="404"):
        ask(server.url, "/ended", TOKEN, timeout_s=TIMEOUT_S)


def test_it_listens_where_it_was_told_to() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        RegistryServer("192.0.2.1", 0, TOKEN)


def test_a_server_without_a_token_does_not_start() -> None:
    with pytest.raises(ValueError, match="token"):
        RegistryServer("127.0.0.1", 0, "")
