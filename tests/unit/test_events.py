"""The event log survives what it describes: torn lines, several writers, a reader that lags behind."""

import json
import logging
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.clock import ManualClock
from elastic_train.events import CAUSES, EVENTS, EventLog, EventWriter, LineFile, read_all, read_records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segments" / "replica_0.events.jsonl"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now=1000.0)


def test_the_vocabulary_of_the_contract_is_there() -> None:
    contract = """
        run_started run_degraded run_restored run_finished lighthouse_started lighthouse_lost
        allocation_requested allocation_granted allocation_lost procs_started standby_started standby_ready
        replica_ready replica_state quorum_changed sync_committed sync_retried caught_up failure_detected
        restart_scheduled
        replica_retired donor_selected heal_started transfer_progress heal_finished heal_failed joined
        checkpoint_saved fault_injected drain_started replica_finished first_step note control
        fenced doubt_settled
    """
    assert set(contract.split()) <= EVENTS.keys()
    causes = """
        proc_exit signal exception device_error comm_error hang heartbeat_lost host_lost preempted
        start_timeout heal_failed diverged non_finite data_error config_error
    """
    assert set(causes.split()) == CAUSES


def test_a_writer_adds_time_and_context(path: Path, clock: ManualClock) -> None:
    writer = EventWriter(path, clock, replica=0, incarnation=2)
    clock.advance(1.5)
    returned = writer.bind(rank=1).emit("first_step", inner_step=7)
    assert returned == {
        "t": 1001.5,
        "event": "first_step",
        "replica": 0,
        "incarnation": 2,
        "rank": 1,
        "inner_step": 7,
    }
    assert read_all(path) == [returned]


def test_binding_leaves_the_first_writer_as_it_was(path: Path, clock: ManualClock) -> None:
    writer = EventWriter(path, clock, replica=0)
    writer.bind(replica=1)
    assert writer.emit("note", text="x")["replica"] == 0


def test_fields_that_are_none_are_left_out(path: Path, clock: ManualClock) -> None:
    record = EventWriter(path, clock, rank=None).emit("failure_detected", cause="signal", signal=None)
    assert record == {"t": 1000.0, "event": "failure_detected", "cause": "signal"}


def test_an_unknown_event_is_refused(path: Path, clock: ManualClock) -> None:
    writer = EventWriter(path, clock)
    with pytest.raises(ValueError, match="replica_exploded"):
        writer.emit("replica_exploded")
    assert read_all(path) == []


@pytest.mark.parametrize("name", ["t", "seq", "event"])
def test_what_the_log_sets_itself_cannot_be_given(path: Path, clock: ManualClock, name: str) -> None:
    writer = EventWriter(path, clock)
    with pytest.raises(ValueError, match=name):
        writer.emit("note", **{name: 1})


def test_lines_are_strict_json(path: Path, clock: ManualClock) -> None:
    EventWriter(path, clock).emit(
        "note", loss=math.nan, bound=-math.inf, where=Path("/x"), slots={2, 1}, pair=(1, {"a": math.nan})
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {
        "t": 1000.0,
        "event": "note",
        "loss": None,
        "bound": None,
        "where": "/x",
        "slots": [1, 2],
        "pair": [1, {"a": None}],
    }


def test_a_writer_does_not_continue_the_torn_line_of_a_dead_one(path: Path, clock: ManualClock) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"event":"note","text":"whole"}\n{"event":"no')
    EventWriter(path, clock).emit("note", text="after")
    assert [record["text"] for record in read_all(path)] == ["whole", "after"]


def test_writers_side_by_side_never_mix_their_lines(path: Path, clock: ManualClock) -> None:
    long = "x" * 20_000

    def write(rank: int) -> None:
        writer = EventWriter(path, clock, rank=rank)
        for number in range(50):
            writer.emit("note", number=number, text=long)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = read_all(path)
    assert len(records) == 200
    for rank in range(4):
        assert [record["number"] for record in records if record["rank"] == rank] == list(range(50))


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        EventWriter(tmp_path / "file" / "events.jsonl", clock)


def test_a_full_disk_stops_nobody_and_is_said_once(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    lines = LineFile(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        lines.append({"a": 1})
        lines.append({"a": 2})
    assert [record.message for record in caplog.records] == [
        "/dev/full: cannot write, records are lost from here on: [Errno 28] No space left on device"
    ]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none", 17) == ([], 17)


def test_damaged_lines_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"a":1}\n{"a":\n\n[1]\n\xff\xfe\n{"a":2}\n')
    records, offset = read_records(path, 0)
    assert records == [{"a": 1}, {"a": 2}]
    assert offset == path.stat().st_size
    assert len(caplog.records) == 3


@given(
    texts=st.lists(st.text(max_size=40), max_size=8),
    cuts=st.lists(st.integers(0, 600), max_size=6),
    limit=st.integers(1, 80),
)
def test_a_torn_tail_is_never_returned_and_never_lost(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cuts: list[int], limit: int
) -> None:
    written = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    path = tmp_path_factory.mktemp("log") / "log"
    seen: list[str] = []
    offset = 0
    for size in [*sorted(cut for cut in cuts if cut < len(written)), len(written)]:
        path.write_bytes(written[:size])
        while True:
            records, after = read_records(path, offset, limit)
            seen += [record["text"] for record in records]
            if after == offset:
                break
            offset = after
        assert seen == texts[: written[:size].count(b"\n")]
    assert offset == len(written)


def test_the_log_numbers_and_tells(path: Path, clock: ManualClock) -> None:
    log = EventLog(path, clock)
    told: list[int] = []
    log.subscribe(lambda event: told.append(event["seq"]))
    first = log.append({"t": 5.0, "event": "joined", "replica": 1})
    second = log.emit("note", text="x")
    assert first == {"t": 5.0, "event": "joined", "replica": 1, "seq": 1}
    assert second == {"t": 1000.0, "event": "note", "text": "x", "seq": 2}
    assert read_all(path) == [first, second]
    assert told == [1, 2]


def test_the_log_knows_the_vocabulary_too(path: Path, clock: ManualClock) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        EventLog(path, clock).emit("nonsense")


def test_a_failing_subscriber_harms_nobody(path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(path, clock)
    told: list[str] = []
    log.subscribe(lambda event: event["no such field"])
    log.subscribe(lambda event: told.append(event["event"]))
    log.emit("note", text="x")
    assert told == ["note"]
    assert len(read_all(path)) == 1
    assert "subscriber" in caplog.text


def test_a_continued_log_goes_on_counting(path: Path, clock: ManualClock) -> None:
    EventLog(path, clock).emit("note", text="a")
    assert EventLog(path, clock).emit("note", text="b")["seq"] == 2


def test_numbers_are_unique_and_in_order_over_threads(path: Path, clock: ManualClock) -> None:
    log = EventLog(path, clock)
    threads = [threading.Thread(target=lambda: [log.emit("note", text="x") for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record["seq"] for record in read_all(path)] == list(range(1, 401))


def test_writing_after_closing_is_harmless(path: Path, clock: ManualClock) -> None:
    writer = EventWriter(path, clock)
    writer.close()
    writer.close()
    writer.emit("note", text="late")
    assert read_all(path) == []
