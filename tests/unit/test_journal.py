import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.clock import ManualClock
from elastic_train.diloco.engine import Sync, SyncKind
from elastic_train.diloco.trainee import Source
from elastic_train.events import EVENTS, EventWriter
from elastic_train.peer_ckpt.shards import combine_hashes
from elastic_train.replica.journal import Journal

NOW = 1000.5
SYNC = Sync(
    kind=SyncKind.COMMITTED,
    outer_step=4,
    participants=(0, 2),
    progress=torch.zeros(1, 4, dtype=torch.int64),
    tokens=640,
    wait_s=0.123456,
    reduce_s=1.98766,
    bytes=88,
    loss=2.5,
    grad_norm=0.75,
)
STEADY = {"t": NOW, "replica": 2, "incarnation": 1}


class Control:
    """A control group in which the other ranks say what the test lets them."""

    def __init__(self, rank: int, others: Sequence[Sequence[int]] = ()) -> None:
        self.rank = rank
        self.others = others

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        rows = [list(other) for other in self.others]
        rows.insert(self.rank, list(row))
        return rows


class Book:
    """A journal and what stands in it."""

    def __init__(self, folder: Path, rank: int = 0, others: Sequence[Sequence[int]] = ()) -> None:
        self._path = folder / "events.jsonl"
        self.events_writer = EventWriter(self._path, ManualClock(NOW), replica=2, incarnation=1)
        self.journal = Journal(self.events_writer, Control(rank, others))  # type: ignore[arg-type]

    def events(self) -> list[dict[str, Any]]:
        """What was written, without what stands in every event."""
        records = [json.loads(line) for line in self._path.read_text().splitlines()]
        assert all(record.items() >= STEADY.items() for record in records)
        return [{key: value for key, value in record.items() if key not in STEADY} for record in records]


Act = Callable[[Journal], None]

WRITTEN: dict[str, tuple[Act, list[dict[str, Any]]]] = {
    "quorum": (
        lambda journal: journal.quorum(7, [2, 0]),
        [{"event": "quorum_changed", "quorum_id": 7, "participants": [0, 2]}],
    ),
    "committed": (
        lambda journal: journal.committed(SYNC, step=32, anchor_hash="ab"),
        [
            {
                "event": "sync_committed",
                "outer_step": 4,
                "inner_step": 32,
                "participants": [0, 2],
                "tokens": 640,
                "wait_s": 0.1235,
                "reduce_s": 1.9877,
                "bytes": 88,
                "loss": 2.5,
                "grad_norm": 0.75,
                "anchor_hash": "ab",
            }
        ],
    ),
    "retried": (
        lambda journal: journal.retried(5, 2, "a peer is gone", 0.77777),
        [
            {
                "event": "sync_retried",
                "outer_step": 5,
                "attempt": 2,
                "cause": "comm_error",
                "error": "a peer is gone",
                "duration_s": 0.7778,
            }
        ],
    ),
    "doubt": (
        lambda journal: journal.doubt(5, "commit", 0.25),
        [{"event": "doubt_settled", "outer_step": 5, "outcome": "commit", "duration_s": 0.25}],
    ),
    "fenced": (
        lambda journal: journal.fenced("non_finite", 5),
        [{"event": "fenced", "cause": "non_finite", "outer_step": 5}],
    ),
    "caught up": (
        lambda journal: journal.caught_up(5, 320, 1),
        [{"event": "caught_up", "outer_step": 5, "tokens": 320, "donor": 1}],
    ),
    "heal started": (
        lambda journal: journal.heal_started([1, 3], 5),
        [{"event": "donor_selected", "donors": [1, 3], "outer_step": 5}, {"event": "heal_started"}],
    ),
    "heal failed": (
        lambda journal: journal.heal_failed("heal_failed", "nobody is there"),
        [{"event": "heal_failed", "cause": "heal_failed", "error": "nobody is there"}],
    ),
    "joined": (
        lambda journal: journal.joined(5, 41),
        [{"event": "joined", "outer_step": 5, "inner_step": 41}],
    ),
    "saved": (
        lambda journal: journal.saved(5, "/runs/one/step-40", 2.34567),
        [{"event": "checkpoint_saved", "outer_step": 5, "path": "/runs/one/step-40", "duration_s": 2.346}],
    ),
    "first step": (lambda journal: journal.first_step(41), [{"event": "first_step", "inner_step": 41}]),
    "note": (lambda journal: journal.note("a hint"), [{"event": "note", "text": "a hint"}]),
    "finished": (
        lambda journal: journal.finished(80, 10, 5120),
        [{"event": "replica_finished", "inner_step": 80, "outer_step": 10, "tokens": 5120}],
    ),
    "finished inexactly": (
        lambda journal: journal.finished(80, 10, None),
        [{"event": "replica_finished", "inner_step": 80, "outer_step": 10}],
    ),
}


@pytest.mark.parametrize("act", WRITTEN)
def test_rank_0_writes_for_all(tmp_path: Path, act: str) -> None:
    book, silent = Book(tmp_path / "0"), Book(tmp_path / "1", rank=1)
    does, written = WRITTEN[act]

    does(book.journal)
    does(silent.journal)

    assert book.events() == written
    assert silent.events() == []
    assert {event["event"] for event in written} <= EVENTS.keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_tells_itself_what_it_served(tmp_path: Path, rank: int) -> None:
    book = Book(tmp_path, rank)

    book.journal.served(5, -255)

    assert book.events() == [{"event": "state_served", "outer_step": 5, "state_hash": "-ff"}]


def test_a_heal_is_that_of_all_ranks(tmp_path: Path) -> None:
    # The primary donor, bytes, milliseconds, hash, and the bytes of each donor, of the other two.
    nobody = [0] * 28
    others = [[0, 200, 1500, -2, 2, 0, 200, 0, 0, *nobody], [1, 300, 700, 3, 4, 1, 250, 0, 50, *nobody]]
    book = Book(tmp_path, others=others)

    book.journal.heal_finished(1, {1: 60, 2: 40}, 5, 0.9, 16)

    assert book.events() == [
        {
            "event": "heal_finished",
            "source": "peers",
            "donors": [0, 1, 2],
            "donor_bytes": {"0": 250, "1": 310, "2": 40},
            "rank_donors": [1, 0, 1],
            "outer_step": 5,
            "bytes": 600,
            "duration_s": 1.5,
            "state_hash": combine_hashes([16, -2, 3]),
            "rank_hashes": ["10", "-2", "3"],
        }
    ]


def test_a_heal_from_memory_names_who_confirmed_it(tmp_path: Path) -> None:
    book = Book(tmp_path, others=[[1, 0, 20, 3, 2, 1, 0, *[0] * 30]])

    book.journal.heal_finished(1, {1: 0}, 5, 0.01, 2, Source.MEMORY)

    assert book.events() == [
        {
            "event": "heal_finished",
            "source": "memory",
            "donors": [1],
            "donor_bytes": {"1": 0},
            "rank_donors": [1, 1],
            "outer_step": 5,
            "bytes": 0,
            "duration_s": 0.02,
            "state_hash": combine_hashes([2, 3]),
            "rank_hashes": ["2", "3"],
        }
    ]


def test_another_rank_has_its_part_in_a_heal(tmp_path: Path) -> None:
    told: list[list[list[int]]] = []

    class Listening(Control):
        def gather(self, row: Sequence[int]) -> list[list[int]]:
            told.append([list(row)])
            return super().gather(row)

    book = Book(tmp_path)
    journal = Journal(book.events_writer, Listening(1, [[0] * 37]))  # type: ignore[arg-type]

    journal.heal_finished(1, {1: 100}, 5, 0.9, -7)

    assert told == [[[1, 100, 900, -7, 2, 1, 100, *[0] * 30]]]
    assert book.events() == []


def test_a_transfer_is_spoken_of_while_it_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book, silent = Book(tmp_path / "0"), Book(tmp_path / "1", rank=1)
    monkeypatch.setattr("elastic_train.replica.journal.PROGRESS_S", 0.0)
    for journal in (book.journal, silent.journal):
        journal.heal_started([1], 5)
        # Nothing is known of its size yet.
        journal.transferred(0, 0, {})
        journal.transferred(30, 100, {1: 20, 3: 10})
    monkeypatch.setattr("elastic_train.replica.journal.PROGRESS_S", 3600.0)
    book.journal.heal_started([1], 6)
    book.journal.transferred(30, 100, {1: 30})

    assert [event for event in book.events() if event["event"] == "transfer_progress"] == [
        {"event": "transfer_progress", "bytes": 30, "total_bytes": 100, "donor_bytes": {"1": 20, "3": 10}}
    ]
    assert silent.events() == []


def test_a_quorum_is_written_when_it_changes(tmp_path: Path) -> None:
    book = Book(tmp_path)

    for number, participants in [(7, [0, 2]), (7, [2, 0]), (7, (0, 2)), (8, [0, 2]), (8, [2])]:
        book.journal.quorum(number, participants)

    assert [(event["quorum_id"], event["participants"]) for event in book.events()] == [
        (7, [0, 2]),
        (8, [0, 2]),
        (8, [2]),
    ]


def test_failures_are_counted_until_a_commit(tmp_path: Path) -> None:
    book = Book(tmp_path)
    failed = Sync(kind=SyncKind.FAILED, outer_step=4, wait_s=0.5, reduce_s=0.25, cause="a rank voted no")

    book.journal.failed(failed)
    book.journal.failed(failed)
    book.journal.committed(SYNC, step=32, anchor_hash="ab")
    book.journal.failed(failed)

    retried = [event for event in book.events() if event["event"] == "sync_retried"]
    assert [event["attempt"] for event in retried] == [1, 2, 1]
    assert retried[0] == {
        "event": "sync_retried",
        "outer_step": 5,
        "attempt": 1,
        "cause": "comm_error",
        "error": "a rank voted no",
        "duration_s": 0.75,
    }


def test_what_is_not_known_of_a_sync_is_left_out(tmp_path: Path) -> None:
    book = Book(tmp_path)

    book.journal.committed(Sync(kind=SyncKind.COMMITTED, outer_step=1), step=8, anchor_hash="ab")

    assert book.events()[0].keys() & {"loss", "grad_norm"} == set()
