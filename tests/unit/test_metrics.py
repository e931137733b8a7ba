"""The fold tells a run as it was, however its processes' lines were interleaved."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.events import Record
from elastic_train.lifecycle import ReplicaState
from elastic_train.metrics import BUCKETS, Quorum, RunFold
from tests.unit.walkthrough import START, event, events, metrics, metrics_records, states, sync


def folded(*log: Record | list[Record]) -> RunFold:
    fold = RunFold()
    for part in log:
        for each in part if isinstance(part, list) else [part]:
            fold.apply(each)
    return fold


def started(replicas: int = 2) -> Record:
    return event(0.0, "run_started", replicas=replicas, steps=100)


def running(replica: int, after: float = 1.0, incarnation: int = 0) -> list[Record]:
    return states(after, replica, incarnation, "PENDING", "STARTING", "JOINING", "RUNNING")


def failed(after: float, replica: int, incarnation: int = 0, **fields: Any) -> Record:
    return event(after, "failure_detected", replica, incarnation, **{"cause": "signal", "signal": "SIGKILL"} | fields)


def told() -> RunFold:
    fold = folded(events())
    for record in metrics_records():
        fold.apply_metrics(record)
    return fold


def test_an_empty_fold_can_be_shown() -> None:
    fold = RunFold()
    assert (fold.status, fold.wall_s(), fold.efficiency(), fold.replicas) == ("starting", 0.0, None, {})
    assert (fold.first_loss, fold.last_loss) == (None, None)


def test_the_run_as_a_whole() -> None:
    fold = told()
    assert (fold.status, fold.name, fold.steps) == ("succeeded", "tiny", 60)
    assert (fold.inner_step, fold.outer_step) == (60, 3)
    assert fold.wall_s() == pytest.approx(14.0)
    assert fold.wall_s(now=START + 99) == pytest.approx(14.0)
    assert fold.tokens_committed == 800
    assert fold.first_loss == pytest.approx(8.1)
    assert fold.last_loss == 5.25
    assert fold.checkpoint is not None
    assert fold.checkpoint.path == "outputs/tiny/last"
    assert fold.quorum == Quorum(quorum_id=3, participants=(0, 1, 2), t=START + 12.9)
    assert [fault.spec for fault in fold.faults] == ["0.0@25:kill"]


def test_a_replica_is_seen_in_its_present_life() -> None:
    view = told().replicas[0]
    assert (view.state, view.incarnation, view.pids) == (ReplicaState.SUCCEEDED, 1, (200,))
    assert (view.step, view.outer_step, view.loss, view.tps) == (60, 3, 5.4, 1234.5)
    assert view.last_sync is not None
    assert view.last_sync.outer_step == 3


def test_a_recovery_is_told_whole() -> None:
    (recovery,) = told().recoveries
    assert (recovery.replica, recovery.incarnation, recovery.rank, recovery.step) == (0, 1, 0, 25)
    assert (recovery.cause, recovery.detail, recovery.fault) == ("signal", "SIGKILL", "0.0@25:kill")
    assert (recovery.level, recovery.standby, recovery.donors) == ("restart_in_place", True, (1,))
    assert (recovery.bytes, recovery.heal_s, recovery.join_outer_step) == (12_300_000, 0.5, 3)
    assert recovery.survivor_wait_s == 0.05
    assert recovery.outage_wait_s == 1.5
    assert recovery.recovered_s == pytest.approx(3.8)
    assert recovery.phases() == pytest.approx(
        {
            "detected": 0.2,
            "processes up": 0.5,
            "trainers built": 3.0,
            "state received": 3.6,
            "first step": 3.8,
            "member of a quorum": 4.9,
        }
    )
    assert list(recovery.phases()) == sorted(recovery.phases(), key=recovery.phases().__getitem__)


def test_the_time_of_a_replica_goes_where_it_went() -> None:
    fold = told()
    assert fold.buckets(0) == pytest.approx(
        # Down while it starts, and from its death until its trainers are built again.
        # Waiting at the barrier, at its first sync, for its first step with the state, for the run to end.
        # From its first step on it trains, though it is a member only later.
        {
            "train": (3.0 - 0.3) + (1.7 - 0.1),
            "wait": 1.0 + 0.2 + 0.2 + 0.5,
            "sync": 0.2,
            "heal": 0.6,
            "down": 4.0 + 3.0,
        }
    )
    assert fold.buckets(1) == pytest.approx(
        {"train": 8.5 - 1.75 - 0.3, "wait": 1.0 + 1.75 + 0.5, "sync": 0.3, "heal": 0.0, "down": 4.0}
    )
    trained = sum(fold.buckets(slot)["train"] for slot in range(3))
    assert fold.efficiency() == pytest.approx(trained / (3 * 14.0))


@st.composite
def interleavings(draw: st.DrawFn) -> list[Record]:
    """The walk-through as a merger may see it: sources up to 0.8 s late, each one's lines in order."""
    arrivals: list[tuple[float, int, Record]] = []
    latest: dict[str, float] = {}
    for number, each in enumerate(events()):
        by_controller = each["event"] in {
            "run_started",
            "replica_state",
            "failure_detected",
            "restart_scheduled",
            "run_finished",
        }
        source = "controller" if by_controller else str(each.get("replica"))
        # The controller reads all the segments before it writes the last line.
        late = 0.0 if source == "controller" else draw(st.floats(0.0, 0.8))
        at = each["t"] + (10.0 if each["event"] == "run_finished" else late)
        latest[source] = max(at, latest.get(source, 0.0))
        arrivals.append((latest[source], number, each))
    return [each for _, _, each in sorted(arrivals, key=lambda arrival: arrival[:2])]


@given(interleavings())
def test_small_reorderings_change_nothing_that_is_told(log: list[Record]) -> None:
    fold, expected = folded(log), folded(events())
    assert fold.recoveries == expected.recoveries
    assert fold.replicas == expected.replicas
    assert fold.quorum is not None
    assert fold.quorum.quorum_id == 3
    assert fold.tokens_committed == expected.tokens_committed
    assert fold.efficiency() == pytest.approx(expected.efficiency(), abs=0.05)


any_event = st.one_of(
    st.builds(
        lambda t, r, i, to: event(t, "replica_state", r, i, **{"from": "PENDING", "to": to}),
        st.floats(-5.0, 100.0),
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from([str(state) for state in ReplicaState]),
    ),
    st.builds(
        lambda t, r, i, k, wait: sync(t, r, k, [0, 1], wait, i),
        st.floats(-5.0, 100.0),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 4),
        st.floats(0.0, 30.0),
    ),
    st.builds(
        lambda t, r, i, late: failed(t, r, i, detect_s=late),
        st.floats(-5.0, 100.0),
        st.integers(0, 2),
        st.integers(0, 2),
        st.floats(0.0, 30.0),
    ),
    st.builds(
        lambda t, r, i, lost: event(
            t, "sync_retried", r, i, outer_step=1, attempt=1, cause="comm_error", duration_s=lost
        ),
        st.floats(-5.0, 100.0),
        st.integers(0, 2),
        st.integers(0, 2),
        st.floats(0.0, 30.0),
    ),
    st.builds(
        lambda t, r: event(t, "fault_injected", r, kind="kill", point="step"),
        st.floats(-5.0, 100.0),
        st.integers(0, 2),
    ),
    st.builds(lambda t: event(t, "run_finished", status="failed"), st.floats(-5.0, 100.0)),
)


@given(st.lists(any_event, max_size=40), st.floats(0.0, 200.0))
def test_the_buckets_of_any_log_add_up_to_its_wall_time(log: list[Record], later: float) -> None:
    fold = folded(started(), log)
    now = START + later
    for slot in fold.replicas:
        buckets = fold.buckets(slot, now)
        assert set(buckets) == set(BUCKETS)
        assert sum(buckets.values()) == pytest.approx(fold.wall_s(now))
        assert all(seconds >= -1e-6 for seconds in buckets.values())


def test_a_dead_incarnation_changes_no_state() -> None:
    fold = folded(started(), running(0), failed(5.0, 0), states(5.1, 0, 1, "BACKOFF", "STARTING"))
    fold.apply(states(5.2, 0, 0, "RUNNING", "HEALING")[0])
    fold.apply_metrics(metrics(5.2, 0, 7, 1.0))
    view = fold.replicas[0]
    assert (view.state, view.incarnation, view.step, view.loss) == (ReplicaState.STARTING, 1, 0, None)


def test_what_a_dead_incarnation_committed_still_counts() -> None:
    fold = folded(started(), running(0), failed(5.0, 0), states(5.1, 0, 1, "BACKOFF", "STARTING"))
    fold.apply(sync(5.2, 0, 1, [0, 1], 0.0))
    assert (fold.outer_step, fold.tokens_committed) == (1, 100)
    assert fold.replicas[0].last_sync is None
    assert fold.recoveries[0].join_outer_step is None


def test_a_failure_that_two_watchers_report_is_one() -> None:
    fold = folded(started(), running(0), failed(5.0, 0), failed(5.1, 0, cause="heartbeat_lost"))
    assert [recovery.cause for recovery in fold.recoveries] == ["signal"]


def test_a_recovery_that_fails_is_closed_by_the_next() -> None:
    fold = folded(started(), running(0), failed(5.0, 0), failed(8.0, 0, 1, cause="hang", signal=None, error="no step"))
    first, second = fold.recoveries
    assert (first.incarnation, first.t_failed_again, first.recovered_s) == (1, START + 8.0, None)
    assert (second.incarnation, second.detail, second.t_failed_again) == (2, "no step", None)


def test_without_an_injected_fault_the_detection_reckons_the_death() -> None:
    fold = folded(started(), running(0), failed(5.0, 0, detect_s=0.4), failed(7.0, 1))
    assert fold.recoveries[0].t_origin == pytest.approx(START + 4.6)
    assert fold.recoveries[1].t_fault is None
    assert fold.recoveries[1].t_origin == START + 7.0


def test_the_error_is_named_by_its_last_line() -> None:
    trace = "Traceback (most recent call last):\n  File ...\nValueError: bad row\n"
    fold = folded(started(), running(0), failed(5.0, 0, cause="exception", signal=None, error=trace))
    assert fold.recoveries[0].detail == "ValueError: bad row"


def test_a_fault_that_was_survived_is_not_blamed_later() -> None:
    fault = event(2.0, "fault_injected", 0, kind="comms", point="step", spec="0.0@5:comms")
    syncs = [sync(after, 0, k, [0, 1], 0.0) for k, after in ((1, 3.0), (2, 4.0))]
    fold = folded(started(), running(0), fault, syncs, failed(9.0, 0))
    assert fold.recoveries[0].fault == ""
    assert fold.recoveries[0].t_fault is None


def test_a_fault_without_its_text_is_described() -> None:
    fault = event(2.0, "fault_injected", 0, rank=1, kind="stop", point="reduce")
    fold = folded(started(), running(0), fault, failed(2.5, 0))
    assert fold.recoveries[0].fault == "0.1/reduce:stop"


def test_failed_attempts_are_waiting_not_training() -> None:
    retried = event(4.0, "sync_retried", 1, outer_step=1, attempt=1, cause="comm_error", duration_s=1.5)
    fold = folded(started(), running(0), running(1), failed(2.0, 0), retried, sync(5.0, 1, 1, [1], 0.5))
    assert fold.sync_retries == 1
    assert fold.buckets(1)["wait"] == pytest.approx(2.0)
    assert fold.recoveries[0].outage_wait_s == pytest.approx(2.0)


def test_a_joiner_that_trains_is_not_waiting_whatever_the_order_of_the_news() -> None:
    joining = states(5.5, 0, 1, "HEALING", "JOINING")
    first_step = event(5.0, "first_step", 0, 1, inner_step=21)
    late = states(6.0, 0, 1, "JOINING", "RUNNING")
    for order in ([first_step, *joining], [*joining, first_step]):
        fold = folded(started(), states(4.0, 0, 1, "JOINING", "HEALING"), order, late, event(9.0, "note"))
        assert fold.buckets(0)["train"] >= 3.5
        assert fold.buckets(0)["wait"] <= 0.5


def test_the_news_of_a_restart_does_not_end_the_present_life() -> None:
    scheduled = event(5.0, "restart_scheduled", 0, 1, level="reallocate", delay_s=1.0)
    fold = folded(started(), running(0), failed(5.0, 0), scheduled, states(6.0, 0, 0, "BACKOFF", "PENDING"))
    assert fold.recoveries[0].level == "reallocate"
    assert fold.replicas[0].state is ReplicaState.PENDING


def test_a_donor_of_several_ranks_is_one_donor() -> None:
    healed = event(6.0, "heal_finished", 0, 1, donors=[2, 2, 1], outer_step=1)
    assert folded(started(), running(0), failed(5.0, 0), healed).recoveries[0].donors == (2, 1)


def test_joiners_of_one_sync_are_nobodys_survivors() -> None:
    log = [running(r) for r in range(3)]
    back = [event(6.0, "joined", r, 1, outer_step=1, inner_step=20) for r in (0, 1)]
    syncs = [sync(7.0, 0, 2, [0, 1, 2], 9.0, 1), sync(7.0, 1, 2, [0, 1, 2], 9.0, 1)]
    fold = folded(started(3), *log, failed(5.0, 0), failed(5.0, 1), back, syncs)
    assert [recovery.survivor_wait_s for recovery in fold.recoveries] == [None, None]
    fold.apply(sync(7.1, 2, 2, [0, 1, 2], 0.3))
    assert [recovery.survivor_wait_s for recovery in fold.recoveries] == [0.3, 0.3]


def test_old_syncs_are_forgotten() -> None:
    fold = folded(started(), running(0))
    for outer_step in range(1, 500):
        fold.apply(sync(outer_step, 0, outer_step, [0, 1], 0.0))
    assert len(fold._waits) < 32


def test_a_retired_replica_is_named_with_its_cause() -> None:
    fold = folded(started(), running(0), failed(5.0, 0), event(5.0, "replica_retired", 0, cause="hang"))
    assert fold.retired == {0: "hang"}


def test_a_standby_is_not_the_replica_until_it_goes_on_in_it() -> None:
    fold = folded(
        started(),
        event(1.0, "procs_started", 0, 0, pids=[8], standby=False),
        event(2.0, "standby_started", 0, 0, pids=[9]),
        event(3.0, "standby_ready", 0, 0, duration_s=1.0),
    )
    assert (fold.replicas[0].incarnation, fold.replicas[0].pids) == (0, (8,))
    for late in (failed(5.0, 0), event(5.1, "procs_started", 0, 1, pids=[9], standby=True)):
        fold.apply(late)
    assert (fold.replicas[0].incarnation, fold.replicas[0].pids) == (1, (9,))
    (recovery,) = fold.recoveries
    assert recovery.standby
    assert recovery.phases() == pytest.approx({"detected": 0.0, "processes up": 0.1})


def test_new_processes_are_no_standby() -> None:
    fold = folded(started(), failed(5.0, 0), event(6.0, "procs_started", 0, 1, pids=[9], standby=False))
    assert [recovery.standby for recovery in fold.recoveries] == [False]


def test_an_older_quorum_that_arrives_late_is_not_the_present_one() -> None:
    fold = folded(
        started(),
        event(2.0, "quorum_changed", 0, quorum_id=5, participants=[0]),
        event(1.0, "quorum_changed", 1, quorum_id=4, participants=[0, 1]),
    )
    assert fold.quorum is not None
    assert fold.quorum.participants == (0,)


def test_catching_up_commits_what_is_already_inside() -> None:
    fold = folded(started(), running(0), event(5.0, "caught_up", 0, outer_step=3, tokens=70))
    assert (fold.tokens_committed, fold.replicas[0].outer_step) == (70, 3)


def test_a_restored_snapshot_takes_commits_back() -> None:
    syncs = [sync(k, 0, k, [0, 1], 0.0) for k in (1, 2, 3)]
    fold = folded(started(), running(0), syncs, event(5.0, "run_restored", outer_step=1, path="x"))
    assert (fold.outer_step, fold.tokens_committed) == (1, 100)


def test_what_was_trained_above_a_restored_snapshot_is_not_the_last_loss() -> None:
    fold = folded(started(), running(0))
    for step, loss in ((10, 5.0), (20, 4.0)):
        fold.apply_metrics({"t": 4.0, "replica": 0, "incarnation": 0, "step": step, "loss": loss})
    fold.apply(event(5.0, "run_restored", outer_step=1, inner_step=10, path="x"))
    assert (fold.inner_step, fold.last_loss) == (10, None)


def test_who_begins_again_with_all_others_takes_over_a_recovery_that_was_going_on() -> None:
    fold = folded(
        started(),
        running(0),
        event(5.0, "failure_detected", 0, 0, cause="signal", signal="SIGKILL"),
        event(5.0, "restart_scheduled", 0, 1, level="restart_in_place", delay_s=0.0),
        event(6.0, "procs_started", 0, 1, pids=[7], standby=False),
        event(7.0, "restart_scheduled", 0, 2, level="restore", delay_s=0.0),
        event(8.0, "procs_started", 0, 2, pids=[8], standby=False),
        event(9.0, "first_step", 0, 2, inner_step=5),
    )
    (recovery,) = fold.recoveries
    assert (recovery.incarnation, recovery.level, recovery.recovered_s) == (2, "restore", 4.0)
    assert fold.recovery(0, 1) is None


def test_the_last_loss_before_the_end_is_the_mean_of_the_last_step() -> None:
    fold = folded(started())
    for record in (metrics(1.0, 0, 2, 5.0), metrics(1.0, 1, 2, 7.0), metrics(1.1, 0, 1, 99.0)):
        fold.apply_metrics(record)
    assert (fold.first_loss, fold.last_loss) == (99.0, 6.0)


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    fold = folded(started())
    fold.apply_metrics(metrics(1.0, 0, 1, None))
    assert math.isnan(fold.replicas[0].loss or 0.0)
    assert math.isnan(fold.last_loss or 0.0)


def test_an_event_that_the_fold_does_not_know_moves_time() -> None:
    assert folded(started(), event(3.0, "note", text="x")).wall_s() == pytest.approx(3.0)
