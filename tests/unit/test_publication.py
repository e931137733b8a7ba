"""What a rank shows its peers, while the trainer goes on changing what it was made of."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.diloco.flat import FlatFragment, flatten
from elastic_train.diloco.publication import INNER, OUTER, Publication, whole_hash
from elastic_train.peer_ckpt.client import Donor, PeerClient
from elastic_train.peer_ckpt.memory_index import read_index
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import combine, hash_tensors
from elastic_train.peer_ckpt.shared_memory import SharedMemory
from elastic_train.peer_ckpt.snapshot import Snapshot

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
HEADER = {"outer_step": 3, "rank_hash": -7, "state_hash": 11, "history": {"3": 11}}


class Rank:
    """A trainee with one optimizer, which can be stopped where it copies."""

    def __init__(self) -> None:
        self.exp_avg = torch.arange(6.0).reshape(2, 3)
        self.step = torch.tensor(4.0)
        self.points: list[str] = []
        self.at_copy: Callable[[], None] = lambda: None

    def at_point(self, point: str) -> None:
        self.points.append(point)
        self.at_copy()

    def moments(self) -> Mapping[str, torch.Tensor]:
        return {"0.0.exp_avg": self.exp_avg, "0.0.step": self.step}

    def counters(self) -> dict[str, Any]:
        return {"lr": 8, "positions": [[0, 1]]}

    def optimizer_steps(self) -> None:
        self.exp_avg += 100
        self.step += 1


class Server(PeerServer):
    """Keeps what was published."""

    def __init__(self) -> None:
        super().__init__(HOST, TOKEN, lambda attempt, dead: {})
        self.shown: list[Snapshot] = []

    def publish(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)
        super().publish(snapshot)


class Shop:
    """A publication and all around it."""

    def __init__(self, server: Server, snapshots: int = 2, memory: SharedMemory | None = None) -> None:
        self.rank = Rank()
        self.server = server
        modules = [nn.Linear(2, 2), nn.Linear(3, 1)]
        self.fragments: list[FlatFragment] = flatten(
            modules,
            device=torch.device("cpu"),
            pin_memory=False,
            allocate=memory.allocate if memory is not None else None,
        )
        trainee: Any = self.rank
        self.publication = Publication(server, self.fragments, trainee, snapshots=snapshots, memory=memory)

    def publish(self, **header: Any) -> Snapshot:
        """Publish, and wait for it."""
        self.publication.publish({**HEADER, **header})
        self.publication.settle()
        return self.server.shown[-1]

    def fetched(self, *sections: str, outer_step: int = 3) -> Snapshot:
        donor = Donor(slot=0, incarnation=0, address=self.server.address)
        return PeerClient(TOKEN).fetch([donor], sections, want=outer_step, timeout_s=TIMEOUT_S).snapshot


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def shop(server: Server) -> Shop:
    return Shop(server)


def test_a_peer_gets_all_that_a_joiner_takes_over(shop: Shop) -> None:
    for number, fragment in enumerate(shop.fragments):
        fragment.committed.momentum.fill_(number + 1)

    shop.publish()
    taken = shop.fetched(INNER, OUTER)

    inner = shop.rank.moments()
    assert taken.header == {
        **HEADER,
        "extra": {"lr": 8, "positions": [[0, 1]]},
        "whole_hash": combine([-7, hash_tensors(inner)]),
    }
    assert taken.sections[INNER].keys() == inner.keys()
    assert all(torch.equal(taken.sections[INNER][name], tensor) for name, tensor in inner.items())
    assert taken.sections[OUTER].keys() == {"0.anchor", "0.momentum", "1.anchor", "1.momentum"}
    for number, fragment in enumerate(shop.fragments):
        assert torch.equal(taken.sections[OUTER][f"{number}.anchor"], fragment.committed.anchor)
        assert torch.equal(taken.sections[OUTER][f"{number}.momentum"], fragment.committed.momentum)
    assert shop.rank.points == ["snapshot"]


def test_the_trainer_waits_for_the_copy_before_it_changes_the_moments(shop: Shop) -> None:
    rank, go, changed = shop.rank, threading.Event(), threading.Event()

    def stop() -> None:
        assert go.wait(TIMEOUT_S)

    def train() -> None:
        shop.publication.finish()
        rank.optimizer_steps()
        changed.set()

    rank.at_copy = stop
    before = rank.exp_avg.clone()
    shop.publication.publish(HEADER)
    trainer = threading.Thread(target=train)
    trainer.start()
    # However long it takes, the trainer does not get past the copy.
    assert not changed.wait(0.1)
    assert shop.server.shown == []
    go.set()
    trainer.join()

    assert torch.equal(rank.exp_avg, before + 100)
    assert torch.equal(shop.fetched(INNER).sections[INNER]["0.0.exp_avg"], before)
    assert shop.fetched(INNER).sections[INNER]["0.0.step"] == 4


def test_there_may_be_nothing_to_wait_for(shop: Shop) -> None:
    shop.publication.finish()
    shop.publish()
    shop.publication.finish()

    assert len(shop.server.shown) == 1


def test_what_fails_beside_the_training_fails_the_trainer_once(shop: Shop) -> None:
    def fail() -> None:
        raise OSError("no memory")

    shop.rank.at_copy = fail
    shop.publication.publish(HEADER)

    with pytest.raises(OSError, match="no memory"):
        shop.publication.finish()

    assert shop.server.shown == []
    shop.rank.at_copy = lambda: None
    shop.publish()
    assert len(shop.server.shown) == 1


@pytest.mark.parametrize("snapshots", [1, 2])
def test_moments_are_given_up_before_newer_ones_are_written_where_they_lie(server: Server, snapshots: int) -> None:
    shop = Shop(server, snapshots)
    older = [shop.publish(outer_step=step) for step in range(3, 3 + snapshots)]
    retired: list[list[bool]] = []
    shop.rank.at_copy = lambda: retired.append([shown.is_retired(INNER) for shown in older])
    shop.rank.optimizer_steps()

    newest = shop.publish(outer_step=9)

    # The oldest alone: with two shelves, a peer that has begun with the other one may go on.
    assert retired == [[number == 0 for number in range(snapshots)]]
    assert not newest.is_retired(INNER)
    for name, tensor in newest.sections[INNER].items():
        assert tensor.data_ptr() == older[0].sections[INNER][name].data_ptr()
        assert tensor.data_ptr() not in [shown.sections[INNER][name].data_ptr() for shown in older[1:]]
        assert tensor.data_ptr() != shop.rank.moments()[name].data_ptr()
    # The outer state did not move meanwhile.
    assert not any(shown.is_retired(OUTER) for shown in older)
    assert shop.fetched(INNER, outer_step=9).header["outer_step"] == 9


def test_moments_of_another_shape_get_memory_of_their_own(shop: Shop) -> None:
    shop.publish()
    shop.rank.exp_avg = torch.ones(5, dtype=torch.bfloat16)

    shop.publish()

    taken = shop.fetched(INNER).sections[INNER]["0.0.exp_avg"]
    assert torch.equal(taken, shop.rank.exp_avg)
    assert taken.dtype == torch.bfloat16


def test_the_outer_state_is_shown_where_it_lies(shop: Shop) -> None:
    outer = shop.publish().sections[OUTER]

    assert outer["1.anchor"] is shop.fragments[1].committed.anchor
    assert outer["1.momentum"] is shop.fragments[1].committed.momentum


def commit(shop: Shop, number: int) -> None:
    """An outer step of one fragment, as far as its memory goes."""
    fragment = shop.fragments[number]
    shop.publication.retire_candidate_of(fragment)
    fragment.candidate.anchor.fill_(5.0)
    fragment.swap()


def test_an_older_state_is_given_up_before_a_candidate_is_written_into_it(shop: Shop) -> None:
    first = shop.publish()
    commit(shop, 0)
    assert not first.is_retired(OUTER)
    second = shop.publish(outer_step=4)
    commit(shop, 1)
    third = shop.publish(outer_step=5)
    assert [shown.is_retired(OUTER) for shown in (first, second, third)] == [False, False, False]

    # The candidate of fragment 0 is what the first one showed.
    shop.publication.retire_candidate_of(shop.fragments[0])

    assert [shown.is_retired(OUTER) for shown in (first, second, third)] == [True, False, False]

    shop.publication.retire_candidate_of(shop.fragments[1])

    assert [shown.is_retired(OUTER) for shown in (first, second, third)] == [True, True, False]
    assert shop.fetched(OUTER, outer_step=5).header["outer_step"] == 5


@pytest.mark.parametrize(("section", "other"), [(INNER, OUTER), (OUTER, INNER)])
def test_a_section_of_all_that_was_shown_is_given_up(shop: Shop, section: str, other: str) -> None:
    first = shop.publish()
    commit(shop, 0)
    second = shop.publish()

    shop.publication.retire(section)
    shop.publication.retire(section)

    assert [shown.is_retired(section) for shown in (first, second)] == [True, True]
    assert not second.is_retired(other)


def test_the_hash_of_the_whole_is_that_of_what_is_in_place(shop: Shop) -> None:
    shown = shop.publish()

    assert whole_hash(-7, shop.rank.moments()) == shown.header["whole_hash"]
    assert whole_hash(-8, shop.rank.moments()) != shown.header["whole_hash"]
    shop.rank.step += 1
    assert whole_hash(-7, shop.rank.moments()) != shown.header["whole_hash"]


# -- what the next incarnation would find ------------------------------------------------------------------------------


class Estate:
    """The shared memory of a rank, as it would be found if the rank died now."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rank", os.MFD_CLOEXEC)
        self.memory = SharedMemory(f"/proc/self/fd/{self._file}", room=64 << 20)

    @property
    def outer_step(self) -> int | None:
        """Of the snapshot that would be found; None: none would."""
        index = read_index(self._file)
        return None if index is None else int(index.header["outer_step"])

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether the file has the snapshot's bytes where its index says so."""
        index = read_index(self._file)
        assert index is not None
        return index.header == snapshot.header and all(
            os.pread(self._file, place.size, start) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            for section, tensors in snapshot.sections.items()
            for (place, start), tensor in zip(index.sections[section].values(), tensors.values(), strict=True)
        )

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def estate() -> Iterator[Estate]:
    made = Estate()
    yield made
    made.close()


def test_all_that_is_shown_would_be_found(server: Server, estate: Estate) -> None:
    shop = Shop(server, memory=estate.memory)
    assert estate.outer_step is None
    shop.rank.at_copy = lambda: copied.append(estate.outer_step)
    copied: list[int | None] = []

    for outer_step in range(3, 7):
        shown = shop.publish(outer_step=outer_step)
        assert estate.holds(shown)
        commit(shop, outer_step % 2)
        assert estate.holds(shown)
        shop.rank.optimizer_steps()

    # While the next one is copied, the one before is still whole.
    assert copied == [None, 3, 4, 5]


def test_with_one_shelf_nothing_would_be_found_while_it_is_written(server: Server, estate: Estate) -> None:
    shop = Shop(server, 1, estate.memory)
    shop.publish(outer_step=3)
    copied: list[int | None] = []
    shop.rank.at_copy = lambda: copied.append(estate.outer_step)

    shown = shop.publish(outer_step=4)

    assert copied == [None]
    assert estate.holds(shown)


def test_a_candidate_over_what_would_be_found_takes_it_away_first(server: Server, estate: Estate) -> None:
    shop = Shop(server, memory=estate.memory)
    shop.publish(outer_step=3)
    fragment = shop.fragments[0]

    shop.publication.retire_candidate_of(fragment)
    assert estate.outer_step == 3
    # A commit whose state is not shown yet, and the next attempt.
    fragment.swap()
    shop.publication.retire_candidate_of(fragment)

    assert estate.outer_step is None


@pytest.mark.parametrize("section", [INNER, OUTER])
def test_a_peers_state_is_put_where_nothing_would_be_found(server: Server, estate: Estate, section: str) -> None:
    shop = Shop(server, memory=estate.memory)
    shop.publish(outer_step=3)

    shop.publication.retire(section)

    assert estate.outer_step is None
