"""How a replica waits for a quorum and finds out that a peer will not come to it."""

import logging
import threading
import time
from typing import Any

import pytest

from elastic_train.diloco.control import Word
from elastic_train.diloco.engine import SyncFailed
from elastic_train.diloco.lookout import Lookout, Watch
from elastic_train.diloco.peers import PeerState
from elastic_train.diloco.quorum import QuorumSeat
from tests.controls import Alone
from tests.waiting import wait_until

TIMEOUT_S = 30.0


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


AHEAD = PeerState(slot=1, incarnation=0, outer_step=5, state_hash=1)


def test_a_watch_keeps_what_it_found(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[Any] = [None, OSError("no network"), AHEAD, None]
    over = threading.Event()

    def look() -> PeerState | None:
        if not looks:
            over.set()
            return None
        seen = looks.pop(0)
        if isinstance(seen, Exception):
            raise seen
        assert seen is None or isinstance(seen, PeerState)
        return seen

    with caplog.at_level(logging.ERROR):
        watch = Watch(look, 0.001)
        assert over.wait(TIMEOUT_S)
        watch.stop()

    assert watch.found == AHEAD
    assert "looking for a peer that is ahead failed" in caplog.text


def test_a_watch_that_was_stopped_ends() -> None:
    watch = Watch(lambda: None, 0.001)

    watch.stop()

    wait_until(lambda: not watch._thread.is_alive())


def test_the_first_look_is_not_at_once() -> None:
    watch = Watch(lambda: AHEAD, 3600.0)

    watch.stop()
    wait_until(lambda: not watch._thread.is_alive())

    assert watch.found is None


class Led(Alone):
    """A rank that is not the first, and hears what it is given."""

    def __init__(self, *words: list[int]) -> None:
        super().__init__()
        self.rank, self._words = 1, list(words)

    def word(self, row: Any) -> Word:
        import torch

        return Word(torch.tensor(self._words.pop(0)), None)


class Seat(QuorumSeat):
    """A request that is answered when the test says so."""

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)

    @property
    def fired(self) -> bool:
        return self._answers[0]

    def wait(self, timeout_s: float) -> bool:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def test_a_quorum_ends_the_wait() -> None:
    lookout = Lookout(Alone(), lambda: None)

    assert lookout.wait(Seat(False, False, True), 4, soon()) is None
    assert lookout.glance(Seat(False), 4) == (False, None)
    assert lookout.glance(Seat(True), 4) == (True, None)


@pytest.mark.parametrize(
    ("control", "seat"),
    [(Alone(), Seat(False, False, True)), (Led([0, 0, 0, -1, 0], [0, 0, 0, -1, 0], [1, 0, 0, -1, 0]), Seat(False))],
    ids=["rank 0", "another rank"],
)
def test_a_rank_that_waits_shows_that_it_does(control: Alone, seat: Seat) -> None:
    turns: list[bool] = []

    assert Lookout(control, lambda: None, lambda: turns.append(True)).wait(seat, 4, soon()) is None

    assert len(turns) == 2


def test_a_peer_that_is_ahead_ends_the_wait() -> None:
    lookout = Lookout(Alone(), lambda: AHEAD)
    lookout.start(0.001)

    assert lookout.wait(Seat(False), 4, soon()) == AHEAD
    assert lookout.glance(Seat(False), 4) == (False, AHEAD)
    # By now this replica is there itself.
    assert lookout.glance(Seat(False), 5) == (False, None)
    lookout.stop()
    assert lookout.glance(Seat(False), 4) == (False, None)


def test_the_wait_has_a_bound() -> None:
    with pytest.raises(SyncFailed, match=r"no quorum within diloco\.quorum_timeout_s"):
        Lookout(Alone(), lambda: None).wait(Seat(False), 4, time.monotonic() - 1)


def test_the_other_ranks_go_by_rank_0() -> None:
    seat = Seat(True)

    assert Lookout(Led([0, 0, 0, -1, 0], [1, 0, 0, -1, 0]), lambda: AHEAD).wait(seat, 4, soon()) is None
    assert Lookout(Led([2, *AHEAD.to_ints()]), lambda: None).wait(seat, 4, soon()) == AHEAD
    assert Lookout(Led([0, *AHEAD.to_ints()]), lambda: None).glance(seat, 4) == (False, AHEAD)
