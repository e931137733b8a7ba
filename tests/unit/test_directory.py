from collections.abc import Iterator
from typing import Any

import pytest

from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.peer_ckpt.directory import Directory
from elastic_train.peer_ckpt.donor_list import DonorList, ListedDonor
from elastic_train.peer_ckpt.request import RequestFailed, ask

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
RANKS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
HASH = -(2**63)


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    made = RegistryServer("127.0.0.1", 0, TOKEN)
    yield made
    made.close()


@pytest.fixture
def directory(server: RegistryServer) -> Directory:
    return Directory(server.url, TOKEN)


def hold(directory: Directory, slot: int, outer_step: int, incarnation: int = 0) -> None:
    directory.held(slot, incarnation, outer_step=outer_step, state_hash=HASH, host="a")


def slots(found: DonorList | None) -> list[int]:
    assert found is not None
    return [donor.slot for donor in found.donors]


def successor_of(server: RegistryServer) -> RegistryServer:
    """Started anew at the same place, knowing nothing."""
    server.close()
    return RegistryServer("127.0.0.1", int(server.url.rpartition(":")[2]), TOKEN)


def test_a_joiner_learns_who_has_the_newest_state(directory: Directory) -> None:
    for slot in (0, 1):
        directory.register(slot, 2, RANKS[: slot + 1])
        hold(directory, slot, slot + 4, incarnation=2)
    donor = ListedDonor(slot=1, incarnation=2, addresses=RANKS)
    expected = DonorList(outer_step=5, state_hash=HASH, donors=(donor,))
    assert directory.donors(3, 0, "b", at_least=0, count=2) == expected
    assert directory.donors(3, 0, "b", at_least=6, count=2) == DonorList()


def test_a_joiner_says_whom_it_can_use(directory: Directory) -> None:
    for slot in range(4):
        directory.register(slot, 0, RANKS)
        hold(directory, slot, 4)
        hold(directory, slot, 5)
    assert slots(directory.donors(2, 0, "a", at_least=0, count=2, avoid={(3, 0)})) == [0, 1]
    assert slots(directory.donors(2, 0, "a", at_least=0, count=4, among={1, 2})) == [1]
    replaced = directory.donors(2, 0, "a", at_least=4, at_most=4, count=1)
    assert replaced is not None
    assert replaced.outer_step == 4


def test_joiners_are_sent_to_different_donors_until_they_are_done(directory: Directory) -> None:
    for slot in (0, 1):
        directory.register(slot, 0, RANKS)
        hold(directory, slot, 4)
    asked = [slots(directory.donors(joiner, 0, "a", at_least=0, count=1)) for joiner in (2, 3)]
    assert asked == [[0], [1]]
    directory.taken(3, 0)
    assert slots(directory.donors(4, 0, "a", at_least=0, count=1)) == [1]


def test_the_dead_neither_give_nor_take(directory: Directory) -> None:
    directory.register(0, 0, RANKS)
    hold(directory, 0, 4)
    directory.ended(0, 0)
    hold(directory, 0, 5)
    assert directory.donors(1, 0, "a", at_least=0, count=1) == DonorList()
    assert directory.donors(0, 0, "a", at_least=0, count=1) is None


def test_nobody_waits_for_a_registry_that_is_away(server: RegistryServer, directory: Directory) -> None:
    directory.register(0, 0, RANKS)
    server.close()
    hold(directory, 0, 4)
    directory.taken(0, 0)
    assert directory.donors(1, 0, "a", at_least=0, count=1) is None
    assert not directory.retired(2)


def test_everybody_learns_of_the_retired_in_one_order(server: RegistryServer, directory: Directory) -> None:
    other = Directory(server.url, TOKEN)
    for teller, slot in ((directory, 3), (other, 1), (directory, 3)):
        assert teller.retired(slot)
    assert directory.roll().retired == other.roll().retired == (3, 1)


def test_a_registry_that_starts_anew_learns_again_what_is_held(server: RegistryServer, directory: Directory) -> None:
    directory.register(0, 1, RANKS)
    hold(directory, 0, 4, incarnation=1)
    directory.retired(3)
    directory.retired(2)
    with_nothing = successor_of(server)
    try:
        fresh = Directory(with_nothing.url, TOKEN)
        assert fresh.donors(1, 0, "a", at_least=0, count=1) == DonorList()
        hold(directory, 0, 5, incarnation=1)
        found = fresh.donors(1, 0, "a", at_least=0, count=1)
        assert found is not None
        assert [donor.addresses for donor in found.donors] == [RANKS]
        assert fresh.roll().retired == (3, 2)
    finally:
        with_nothing.close()


def test_the_order_of_the_retired_outlives_the_registry(server: RegistryServer, directory: Directory) -> None:
    directory.retired(3)
    with_nothing = successor_of(server)
    try:
        assert directory.retired(1)
        assert Directory(with_nothing.url, TOKEN).roll().retired == (3, 1)
    finally:
        with_nothing.close()


GOOD_WISH = {"slot": 1, "incarnation": 0, "host": "a", "at_least": 0, "count": 1, "among": None, "avoid": []}
GOOD_STATE = {"slot": 0, "incarnation": 0, "outer_step": 1, "state_hash": 1, "host": "a", "load": 0}


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/held", []),
        ("/held", {**GOOD_STATE, "slot": -1}),
        ("/held", {**GOOD_STATE, "outer_step": -1}),
        ("/held", {**GOOD_STATE, "state_hash": 2**63}),
        ("/held", {**GOOD_STATE, "state_hash": "1"}),
        ("/held", {**GOOD_STATE, "host": None}),
        ("/held", {**GOOD_STATE, "load": True}),
        ("/donors", {**GOOD_WISH, "count": 0}),
        ("/donors", {**GOOD_WISH, "at_least": None}),
        ("/donors", {**GOOD_WISH, "at_most": "x"}),
        ("/donors", {**GOOD_WISH, "among": 3}),
        ("/donors", {**GOOD_WISH, "among": ["0"]}),
        ("/donors", {**GOOD_WISH, "avoid": None}),
        ("/donors", {**GOOD_WISH, "avoid": [[0]]}),
        ("/donors", {**GOOD_WISH, "avoid": [[0, "x"]]}),
        ("/taken", {"slot": 0}),
        ("/retired", {"slot": None}),
        ("/retired", 3),
    ],
)
def test_what_makes_no_sense_is_refused(server: RegistryServer, target: str, body: Any) -> None:
    with pytest.raises(RequestFailed, match="400"):
        ask(server.url, target, TOKEN, timeout_s=TIMEOUT_S, body=body)


@pytest.mark.parametrize("target", ["/held", "/donors", "/taken", "/retired"])
def test_without_the_token_nothing_is_told_or_taken(server: RegistryServer, target: str) -> None:
    with pytest.raises(RequestFailed, match="401"):
        ask(server.url, target, "another", timeout_s=TIMEOUT_S, body={**GOOD_WISH, **GOOD_STATE})
    assert Directory(server.url, TOKEN).roll().retired == ()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"donors": None},
        {"donors": [{"slot": 0, "incarnation": 0}], "outer_step": 1, "state_hash": 1},
        {"donors": [{"slot": 0, "incarnation": 0, "addresses": []}]},
    ],
)
def test_what_is_no_list_of_donors_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="this is no list of donors"):
        DonorList.from_json(value)
