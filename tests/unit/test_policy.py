"""Escalation over whole histories: the lowest level that may help, never for ever."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import RecoveryConfig
from elastic_train.events import CAUSES
from elastic_train.orchestrator.policy import (
    AskToRestore,
    Decision,
    Failure,
    Loss,
    Reallocate,
    RestartInPlace,
    RestoreAll,
    Retire,
    Stop,
    decide,
    decide_for_all,
)

RECOVERY = RecoveryConfig()
ESCALATION = (RestartInPlace, Reallocate, Retire, AskToRestore, Stop)


def failure(cause: str = "signal", *, step: int = 25, error: str = "SIGKILL", healthy_s: float = 0.0) -> Failure:
    return Failure(slot=0, incarnation=0, cause=cause, step=step, error=error, t=0.0, healthy_s=healthy_s)


def verdict(
    last: Failure,
    history: Sequence[Failure] = (),
    *,
    live: int = 2,
    min_replicas: int = 1,
    recovery: RecoveryConfig = RECOVERY,
    jitter: float = 0.0,
) -> Decision:
    return decide(last, history, live=live, min_replicas=min_replicas, recovery=recovery, jitter=jitter)


def different(count: int, *, healthy_s: float = 0.0) -> list[Failure]:
    """Failures that do not repeat an error at its step."""
    return [failure(step=number, healthy_s=healthy_s) for number in range(count)]


def test_a_first_failure_restarts_at_once() -> None:
    assert verdict(failure()) == RestartInPlace(delay_s=0.0)


def test_failures_in_a_row_climb_the_ladder() -> None:
    failures = different(9)
    decisions = [verdict(failures[n], failures[:n]) for n in range(9)]
    assert decisions == [
        RestartInPlace(delay_s=0.0),
        RestartInPlace(delay_s=0.5),
        RestartInPlace(delay_s=1.0),
        RestartInPlace(delay_s=2.0),
        RestartInPlace(delay_s=4.0),
        Reallocate(delay_s=8.0, exclude_host=True),
        Reallocate(delay_s=16.0, exclude_host=True),
        Retire("signal"),
        Retire("signal"),
    ]


def test_the_levels_have_the_names_of_the_log() -> None:
    assert [kind.level for kind in ESCALATION] == ["restart_in_place", "reallocate", "retire", "restore", "stop"]
    assert RestoreAll.level == AskToRestore.level


def test_without_enough_others_only_all_together_can_go_on() -> None:
    failures = different(8)
    assert verdict(failures[7], failures[:7], live=2, min_replicas=3) == AskToRestore(
        "signal",
        "replica 0 used up its restarts and reallocations (SIGKILL), and without it only 2 of at least 3 "
        "replicas would be left",
    )


def test_health_is_forgiven() -> None:
    healthy = different(50, healthy_s=RECOVERY.forgive_after_s)
    assert verdict(healthy[-1], healthy[:-1]) == RestartInPlace(delay_s=0.0)


def test_a_long_stretch_forgives_several_failures_but_no_more_than_there_were() -> None:
    failures = [*different(5), failure(step=90, healthy_s=100 * RECOVERY.forgive_after_s), failure(step=91)]
    assert verdict(failures[5], failures[:5]) == RestartInPlace(delay_s=0.0)
    assert verdict(failures[6], failures[:6]) == RestartInPlace(delay_s=0.5)


@pytest.mark.parametrize("cause", ["host_lost", "device_error"])
def test_what_another_host_cures_goes_there_first(cause: str) -> None:
    assert verdict(failure(cause)) == Reallocate(delay_s=0.0, exclude_host=True)


def test_lost_hosts_use_up_the_budget_too() -> None:
    lost = [failure("host_lost") for _ in range(8)]
    assert isinstance(verdict(lost[6], lost[:6]), Reallocate)
    assert verdict(lost[7], lost[:7]) == Retire("host_lost")


def test_preemption_costs_no_budget_but_waits() -> None:
    taken = [failure("preempted") for _ in range(100)]
    assert verdict(taken[0]) == Reallocate(delay_s=0.0, exclude_host=False)
    assert verdict(taken[-1], taken[:-1]) == Reallocate(delay_s=RECOVERY.backoff_max_s, exclude_host=False)
    assert isinstance(verdict(failure(), taken), RestartInPlace)


def test_the_same_error_at_the_same_step_is_not_tried_for_ever() -> None:
    same = [failure("exception", error="ValueError: bad row", step=7)] * 3
    assert isinstance(verdict(same[1], same[:1]), RestartInPlace)
    assert verdict(same[2], same[:2]) == Retire("exception")
    assert verdict(same[2], same[:2], live=0) == AskToRestore(
        "exception",
        "replica 0 failed 3 times in a row at step 7 (ValueError: bad row), "
        "and without it only 0 of at least 1 replicas would be left",
    )


@pytest.mark.parametrize(
    "between",
    [
        failure("exception", error="KeyError: 'x'", step=7),
        failure("exception", error="ValueError: bad", step=8),
    ],
)
def test_another_error_or_another_step_breaks_the_row(between: Failure) -> None:
    same = failure("exception", error="ValueError: bad", step=7)
    assert isinstance(verdict(same, [same, between, same]), RestartInPlace)


def test_a_preemption_between_them_does_not_break_the_row() -> None:
    same = failure("exception", error="ValueError: bad", step=7)
    assert verdict(same, [same, failure("preempted", step=9), same]) == Retire("exception")


def test_the_bound_on_repeats_counts_health_for_nothing() -> None:
    same = [failure("exception", error="ValueError: bad", step=7, healthy_s=1e6)] * 3
    assert verdict(same[2], same[:2]) == Retire("exception")


causes = st.sampled_from(sorted(CAUSES))
failures = st.builds(
    failure, causes, step=st.integers(0, 3), error=st.sampled_from("ab"), healthy_s=st.floats(0.0, 500.0)
)
recoveries = st.builds(
    RecoveryConfig,
    restarts_in_place=st.integers(0, 5),
    reallocations=st.integers(0, 3),
    forgive_after_s=st.floats(1.0, 100.0),
    same_error_limit=st.integers(1, 5),
    backoff_initial_s=st.floats(0.0, 5.0),
    backoff_max_s=st.floats(5.0, 50.0),
    backoff_jitter=st.floats(0.0, 1.0),
)
jitters = st.floats(0.0, 1.0, exclude_max=True)
replicas = st.integers(0, 4)


@given(failures, st.lists(failures, max_size=30), recoveries, jitters, replicas, replicas)
def test_delays_are_bounded(
    last: Failure, history: list[Failure], recovery: RecoveryConfig, jitter: float, live: int, least: int
) -> None:
    decision = verdict(last, history, live=live, min_replicas=least, recovery=recovery, jitter=jitter)
    if isinstance(decision, RestartInPlace | Reallocate):
        assert 0.0 <= decision.delay_s <= recovery.backoff_max_s * (1.0 + recovery.backoff_jitter)


@given(st.lists(failures, max_size=30), recoveries, jitters, replicas, replicas)
def test_a_wrong_config_always_stops(
    history: list[Failure], recovery: RecoveryConfig, jitter: float, live: int, least: int
) -> None:
    last = failure("config_error", error="no such file")
    decision = verdict(last, history, live=live, min_replicas=least, recovery=recovery, jitter=jitter)
    assert isinstance(decision, Stop)
    assert "no such file" in decision.reason


@given(st.integers(1, 20), recoveries, jitters, replicas, replicas, causes)
def test_without_health_escalation_only_rises(
    count: int, recovery: RecoveryConfig, jitter: float, live: int, least: int, cause: str
) -> None:
    row = [dataclasses.replace(each, cause=cause) for each in different(count)]
    decisions = [
        verdict(row[n], row[:n], live=live, min_replicas=least, recovery=recovery, jitter=jitter) for n in range(count)
    ]
    levels = [ESCALATION.index(type(decision)) for decision in decisions]
    assert levels == sorted(levels)
    delays = [each.delay_s for each in decisions if isinstance(each, RestartInPlace | Reallocate)]
    assert delays == sorted(delays)


@given(failures, st.lists(failures, max_size=30), recoveries, jitters, replicas, replicas)
def test_all_go_back_only_where_too_few_would_be_left(
    last: Failure, history: list[Failure], recovery: RecoveryConfig, jitter: float, live: int, least: int
) -> None:
    decision = verdict(last, history, live=live, min_replicas=least, recovery=recovery, jitter=jitter)
    if isinstance(decision, AskToRestore):
        assert live < least
    if isinstance(decision, Stop):
        assert last.cause == "config_error"
    if isinstance(decision, Retire):
        assert live >= least


@given(failures, st.lists(failures, max_size=30), recoveries)
def test_the_only_endless_restart_is_a_preempted_one(
    last: Failure, history: list[Failure], recovery: RecoveryConfig
) -> None:
    unhealthy = [dataclasses.replace(each, healthy_s=0.0) for each in [*history, last]]
    counted = [each for each in unhealthy if each.cause != "preempted"]
    decision = verdict(unhealthy[-1], unhealthy[:-1], recovery=recovery)
    if isinstance(decision, RestartInPlace | Reallocate) and last.cause != "preempted":
        assert len(counted) <= recovery.restarts_in_place + recovery.reallocations


def loss(outer_step: int | None = 3, *, healthy_s: float = 0.0) -> Loss:
    return Loss(
        cause="signal",
        reason="all are dead",
        outer_step=outer_step,
        without="no snapshot is there",
        healthy_s=healthy_s,
    )


def verdict_for_all(
    last: Loss, history: Sequence[Loss] = (), *, recovery: RecoveryConfig = RECOVERY
) -> RestoreAll | Stop:
    return decide_for_all(last, history, recovery=recovery, jitter=0.0)


def test_all_go_back_to_the_snapshot_and_wait_longer_each_time() -> None:
    losses = [loss()] * 4
    assert [verdict_for_all(losses[n], losses[:n]) for n in range(3)] == [
        RestoreAll(delay_s=0.0),
        RestoreAll(delay_s=0.5),
        RestoreAll(delay_s=1.0),
    ]
    assert verdict_for_all(losses[3], losses[:3]) == Stop(
        "signal", "all are dead; the run went back to a durable snapshot 3 times before (recovery.restores = 3)"
    )


def test_without_a_snapshot_the_run_stops_and_says_what_to_do() -> None:
    assert verdict_for_all(loss(None)) == Stop("signal", "all are dead; no snapshot is there")


def test_going_back_can_be_forbidden() -> None:
    never = RecoveryConfig(restores=0)
    assert isinstance(verdict_for_all(loss(), recovery=never), Stop)


def test_health_forgives_going_back_if_there_is_a_newer_snapshot() -> None:
    losses = [loss(step, healthy_s=RECOVERY.forgive_after_s) for step in range(50)]
    assert verdict_for_all(losses[-1], losses[:-1]) == RestoreAll(delay_s=0.0)


@given(st.lists(st.floats(0.0, 1e6), min_size=4, max_size=4))
def test_nobody_goes_round_in_a_circle(healths: list[float]) -> None:
    losses = [loss(7, healthy_s=healthy_s) for healthy_s in healths]
    assert isinstance(verdict_for_all(losses[-1], losses[:-1]), Stop)
