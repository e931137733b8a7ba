"""The live view shows the run, gives the terminal back and never harms what it shows."""

import io
import logging
from typing import Any

import pytest
from rich.console import Console

from elastic_train.clock import ManualClock
from elastic_train.events import Record
from elastic_train.observe import table, words
from elastic_train.observe.live import LiveView, step_line
from tests.unit import walkthrough
from tests.unit.walkthrough import START, event, events, metrics, metrics_records, states

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=110, height=40, _environ={"TERM": "xterm"})


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frame(view: LiveView) -> str:
    """What the view shows now, as text without colours."""
    console = Console(file=io.StringIO(), width=110, height=view.console.size.height)
    console.print(view.render())
    return output(console)


def walk_through(view: LiveView, upto: float = 99.0) -> None:
    log: list[tuple[float, bool, Record]] = [(each["t"], False, each) for each in events()]
    log += [(each["t"], True, each) for each in metrics_records()]
    for t, is_metrics, record in sorted(log, key=lambda entry: entry[:2]):
        if t <= START + upto:
            (view.on_metrics if is_metrics else view.on_event)(record)


def test_without_a_terminal_there_are_plain_lines() -> None:
    console = plain_console()
    with LiveView(notes=["sync_steps is read as diloco.sync_every"], console=console) as view:
        walk_through(view)
    text = output(console)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[:2] == [
        "note: sync_steps is read as diloco.sync_every",
        "    0.0 s  run started with 3 replicas",
    ]
    for line in [
        "replica 1  step:  1  loss:  8.10000  grad_norm:  1.2500  tps: 1,234",
        "replica 2  outer step:  1  with replicas 0 1 2  waited: 0.20 s  reduced: 0.10 s",
        "    6.7 s  replica 0 has a standby, made in 1.50 s",
        "    8.0 s  fault injected: kill in replica 0 rank 0 at point step",
        "    8.2 s  replica 0 rank 0 failed at step 25: killed by SIGKILL, noticed after 0.20 s",
        "    8.2 s  replica 0 restarts in place now",
        "    8.5 s  replica 0 goes on in its standby, 0.50 s after its failure",
        "   11.1 s  replica 0 gets the state of outer step 2 from replica 1",
        "   11.6 s  replica 0 has its state from replica 1: 12.3 MB in 0.50 s",
        "   11.8 s  replica 0 trains again at step 41, 3.80 s after its failure",
        "   12.9 s  replica 0 is a member of a quorum again, 4.90 s after its failure",
        "   12.9 s  quorum 3: replicas 0 1 2",
        "   14.0 s  run succeeded",
    ]:
        assert lines.count(line) == 1, line


def test_a_terminal_shows_every_replica_and_what_happened() -> None:
    clock = ManualClock(START)
    view = LiveView(console=terminal(), clock=clock)
    clock.advance(12.0)
    walk_through(view, upto=12.0)
    shown = [line.split() for line in frame(view).splitlines()]
    assert shown[0][:2] == ["tiny", "running"]
    assert "step 41/60  outer step 2" in frame(view)
    assert ["0", "JOINING", "1", "41", "-", "-", "-", "2", "0.20", "s", "5.00", "s", "ago"] in shown
    assert ["1", "RUNNING", "0", "40", "6.0000", "1,234", "2", "2", "1.50", "s", "2.00", "s", "ago"] in shown
    assert "trains again at step 41" in frame(view)


def test_the_terminal_is_given_back_with_the_last_view_on_it() -> None:
    console = terminal()
    with LiveView(notes=["something to know"], console=console) as view:
        assert HIDE_CURSOR in output(console)
        walk_through(view)
    text = output(console)
    assert text.startswith("note: something to know")
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)
    assert text.count("SUCCEEDED") >= 3
    view.stop()
    assert output(console) == text


def test_the_terminal_is_given_back_after_an_error() -> None:
    console = terminal()
    with pytest.raises(KeyboardInterrupt), LiveView(console=console):
        raise KeyboardInterrupt
    assert output(console).rindex(SHOW_CURSOR) > output(console).rindex(HIDE_CURSOR)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    with LiveView(console=console) as view:
        view.on_metrics(metrics(1.0, 0, 3, 2.5))
    assert output(console).startswith("replica 0  step:  3  loss:  2.50000")


def test_what_it_cannot_read_is_logged_once_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    console = plain_console()
    with LiveView(console=console) as view:
        view.on_event({"event": "joined"})
        view.on_metrics({"replica": 0})
        view.on_event(event(1.0, "note", text="still here"))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert caplog.records[0].exc_info is not None
    assert "still here" in output(console)


def test_a_view_that_cannot_be_drawn_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(table, "heading", broken)
    view = LiveView(console=terminal())
    assert frame(view) == frame(view) == "the view failed; the run goes on\n"
    assert len(caplog.records) == 1
    assert "no ink" in caplog.text


@pytest.mark.parametrize("problem", [OSError("disk full"), SystemExit(1)], ids=["disk full", "reader gone"])
def test_a_console_that_fails_hurts_nobody(problem: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(io.StringIO):
        def write(self, _: str) -> int:
            raise problem

    with LiveView(console=Console(file=Failing()), notes=["x"]) as view:
        walk_through(view)
    assert len(caplog.records) == 1
    assert view.fold.status == "succeeded"


def test_a_small_screen_shows_those_in_trouble() -> None:
    view = LiveView(console=Console(file=io.StringIO(), width=110, height=20))
    view.on_event(event(0.0, "run_started", replicas=30))
    for slot in range(30):
        path = ["JOINING", "RUNNING", "BACKOFF"] if slot == 29 else ["JOINING", "RUNNING"]
        for each in states(1.0, slot, 0, *path):
            view.on_event(each)
    text = frame(view)
    assert text.count("RUNNING") == 4
    assert "BACKOFF" in text
    assert "and 25 more" in text


def test_only_the_last_happenings_are_kept_on_the_screen() -> None:
    view = LiveView(console=terminal())
    for number in range(20):
        view.on_event(event(number, "note", text=f"note number {number}"))
    shown = frame(view)
    assert "note number 19" in shown
    assert "note number 11" not in shown


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    assert step_line(metrics(1.0, 0, 3, None)) == (
        "replica 0  step:  3  loss:      nan  grad_norm:  1.2500  tps: 1,234"
    )


def test_every_event_can_be_told() -> None:
    """The sentences only use fields that the contract promises."""
    fold = LiveView(console=plain_console()).fold
    fields: dict[str, dict[str, Any]] = {
        "run_started": {"replicas": 2, "config_digest": "d"},
        "run_degraded": {"live": 1},
        "run_restored": {"outer_step": 1, "path": "p"},
        "run_finished": {"status": "failed", "inner_step": 1, "outer_step": 0},
        "lighthouse_started": {"address": "http://a:1", "pid": 1, "restarts": 1},
        "lighthouse_lost": {"cause": "proc_exit"},
        "allocation_lost": {"cause": "host_lost"},
        "procs_started": {"pids": [1], "standby": False},
        "standby_ready": {"duration_s": 1.5},
        "quorum_changed": {"quorum_id": 1, "participants": [0]},
        "sync_retried": {"outer_step": 1, "attempt": 2, "cause": "comm_error"},
        "doubt_settled": {"outer_step": 1, "outcome": "commit"},
        "fenced": {"cause": "diverged", "outer_step": 1},
        "caught_up": {"outer_step": 1, "tokens": 3},
        "failure_detected": {"cause": "signal", "signal": "SIGKILL"},
        "restart_scheduled": {"level": "reallocate", "delay_s": 1.5},
        "replica_retired": {"cause": "hang"},
        "donor_selected": {"donors": [1], "outer_step": 1},
        "transfer_progress": {"bytes": 1, "total_bytes": 3},
        "heal_finished": {"donors": [1], "outer_step": 1},
        "heal_failed": {"cause": "heal_failed"},
        "joined": {"outer_step": 1, "inner_step": 20},
        "first_step": {"inner_step": 1},
        "drain_started": {"within_s": 60.0},
        "replica_left": {"inner_step": 20, "outer_step": 1},
        "checkpoint_saved": {"outer_step": 1, "path": "p", "duration_s": 0.1},
        "fault_injected": {"kind": "kill", "point": "step"},
        "control": {"request": "inject", "rank": 0, "kind": "kill"},
        "note": {"text": "t"},
    }
    untold = {"procs_started", "first_step"}
    for name in words.TOLD:
        each = walkthrough.event(1.0, name, 0, **fields.get(name, {}))
        fold.apply(each)
        assert (words.happening(each, fold) is None) == (name in untold), name
