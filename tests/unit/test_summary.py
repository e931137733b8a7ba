"""The end of a run in sentences that a person understands."""

import pytest

from elastic_train.metrics import RunFold
from elastic_train.observe import words
from elastic_train.observe.summary import summary_lines
from tests.unit.walkthrough import event, events, metrics_records, states


def test_the_walk_through_in_words() -> None:
    fold = RunFold.of(events())
    for record in metrics_records():
        fold.apply_metrics(record)
    assert summary_lines(fold) == [
        "run tiny succeeded: 60 of 60 steps, 3 outer steps, 14.0 s",
        "loss 8.1000 -> 5.2500",
        "41.2% of the replicas' time went into training steps (wait 19.7%, sync 1.9%, heal 1.4%, down 35.7%)",
        "1 failure:",
        "  replica 0 rank 0 failed at step 25: killed by SIGKILL (injected: 0.0@25:kill)",
        "    state from replica 1, 12.3 MB in 0.50 s",
        "    after its failure, in its standby: detected 0.20 s, processes up 0.50 s, trainers built 3.00 s, "
        "state received 3.60 s, first step 3.80 s, member of a quorum 4.90 s",
        "    cost: replica 0 away for 3.80 s, 9.0% of the replicas' time; "
        "others waited at most 1.50 s at a sync without it; "
        "others waited 0.05 s at the sync in which it joined",
        "log: outputs/tiny/events.jsonl",
        "last state: outputs/tiny/last (outer step 3)",
    ]


def test_a_run_without_failures_says_so() -> None:
    log = [event(0.0, "run_started", replicas=1), event(2.0, "run_finished", status="succeeded")]
    assert "nothing failed" in summary_lines(RunFold.of(log))


def test_a_run_that_ended_at_once_has_a_summary() -> None:
    lines = summary_lines(RunFold.of([event(0.0, "run_finished", status="failed", cause="config_error")]))
    assert lines == [
        "run failed (the configuration is wrong): 0 steps, 0 outer steps, 0.00 s",
        "nothing failed",
    ]


@pytest.mark.parametrize(
    ("ends", "said"), [(False, "it is not back yet"), (True, "it was not back when the run ended")]
)
def test_a_replica_on_its_way_back_is_not_given_up(ends: bool, said: str) -> None:
    log = [
        event(0.0, "run_started", replicas=2),
        *states(1.0, 1, 0, "PENDING", "STARTING", "JOINING", "RUNNING"),
        event(6.0, "failure_detected", 1, cause="hang", error="no step for 5 s"),
        event(10.0, "sync_committed", 0, outer_step=1, inner_step=10, participants=[0], tokens=1),
    ]
    if ends:
        log.append(event(10.0, "run_finished", status="succeeded"))
    assert any(line.endswith(said) for line in summary_lines(RunFold.of(log)))


def test_it_says_where_the_stacks_of_a_failure_are() -> None:
    log = [
        event(0.0, "run_started", replicas=2, run_dir="/runs/a"),
        event(6.0, "failure_detected", 1, cause="hang", error="no step for 5 s", stacks="stacks/replica_1.0"),
        event(7.0, "failure_detected", 0, cause="signal", signal="SIGKILL"),
    ]

    told = [line.strip() for line in summary_lines(RunFold.of(log)) if "stood" in line]

    assert told == ["where its threads stood: /runs/a/stacks/replica_1.0"]
    fold, sentences = RunFold(), []
    for each in log:
        fold.apply(each)
        sentences.append(words.happening(each, fold))
    assert sentences[1:] == [
        "replica 1 failed: no progress: no step for 5 s; where its threads stood: stacks/replica_1.0",
        "replica 0 failed: killed by SIGKILL",
    ]


def test_a_replica_that_was_given_up_is_named() -> None:
    log = [
        event(0.0, "run_started", replicas=2),
        *states(1.0, 1, 0, "PENDING", "STARTING", "JOINING", "RUNNING"),
        event(6.0, "failure_detected", 1, cause="hang", error="no step for 5 s"),
        event(6.0, "replica_retired", 1, cause="hang"),
        event(10.0, "run_finished", status="succeeded"),
    ]
    lines = summary_lines(RunFold.of(log))
    assert "  replica 1 failed: no progress: no step for 5 s" in lines
    assert "    cost: replica 1 away for 4.00 s, 20.0% of the replicas' time; it did not come back" in lines
    assert "replica 1 was given up: no progress" in lines


def test_a_failure_on_the_way_back_is_told() -> None:
    log = [
        event(0.0, "run_started", replicas=1),
        event(2.0, "failure_detected", 0, 0, cause="signal", signal="SIGKILL"),
        event(3.0, "failure_detected", 0, 1, cause="signal", signal="SIGSEGV"),
        event(7.0, "first_step", 0, 2, inner_step=21),
        event(8.0, "run_finished", status="succeeded"),
    ]
    lines = summary_lines(RunFold.of(log))
    assert "    cost: replica 0 away for 1.00 s, 12.5% of the replicas' time; it failed again on the way back" in lines
    assert "    cost: replica 0 away for 4.00 s, 50.0% of the replicas' time" in lines


def test_of_many_failures_the_last_are_told_and_all_are_counted() -> None:
    log = [event(0.0, "run_started", replicas=1)]
    for n in range(25):
        log.append(event(10.0 * n, "failure_detected", 0, n, cause="signal", signal="SIGKILL", step=n))
        log.append(event(10.0 * n + 1 + n % 2, "first_step", 0, n + 1, inner_step=n))
    lines = summary_lines(RunFold.of(log))
    assert "25 failures:" in lines
    assert sum("killed by SIGKILL" in line for line in lines) == 10
    assert any("at step 24:" in line for line in lines)
    assert "  from failure to first step: median 1.00 s, worst 2.00 s" in lines


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (320.0, "5 min 20 s"),
        (11220.0, "3 h 07 min"),
    ],
)
def test_seconds_are_readable(value: float, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (16_060_000_000, "16.1 GB"), (2 * 10**15, "2000.0 TB")],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert words.size(count) == text


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "fenced",
            {"cause": "non_finite", "outer_step": 4},
            "replica 2 is kept out of the average: values are not finite",
        ),
        (
            "doubt_settled",
            {"outer_step": 5, "outcome": "commit", "duration_s": 0.25},
            "replica 2 saw no vote on outer step 5 pass; its peers say after 0.25 s: it was committed",
        ),
        (
            "doubt_settled",
            {"outer_step": 5, "outcome": "abort"},
            "replica 2 saw no vote on outer step 5 pass; its peers say: nobody committed it",
        ),
        (
            "caught_up",
            {"outer_step": 5, "tokens": 0, "donor": 1},
            "replica 2 caught up to outer step 5 with the state of replica 1",
        ),
        ("caught_up", {"outer_step": 5, "tokens": 0}, "replica 2 caught up to outer step 5"),
    ],
)
def test_what_a_sync_met_with_is_a_sentence(name: str, fields: dict[str, object], sentence: str) -> None:
    assert words.happening(event(1.0, name, 2, **fields), RunFold()) == sentence


@pytest.mark.parametrize(
    ("standby", "said", "how"),
    [
        (False, "replica 0 has processes again, 0.50 s after its failure", "after its failure:"),
        (True, "replica 0 goes on in its standby, 0.50 s after its failure", "after its failure, in its standby:"),
    ],
)
def test_it_is_said_whether_a_replica_goes_on_in_its_standby(standby: bool, said: str, how: str) -> None:
    started = event(2.5, "procs_started", 0, 1, pids=[2], standby=standby)
    log = [event(0.0, "run_started", replicas=1), event(2.0, "failure_detected", 0, 0, cause="hang"), started]
    fold = RunFold.of(log)
    assert words.happening(started, fold) == said
    assert any(how in line for line in summary_lines(fold))
