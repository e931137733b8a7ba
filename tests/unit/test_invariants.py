"""Every check passes on a sound log and finds the breach it is there for."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from elastic_train.events import Record
from elastic_train.observe import invariants
from tests.unit.walkthrough import event, events, sync

Check = Callable[[Sequence[Record]], Iterator[str]]


def test_a_sound_run_keeps_them_all() -> None:
    assert invariants.violations(events()) == {"I1": [], "I3": [], "I4": [], "I6": [], "I7": [], "quorum": []}


def without(name: str, replica: int = 0) -> list[Record]:
    return [each for each in events() if each["event"] != name or each.get("replica") != replica]


def changed(name: str, replica: int = 0, **fields: object) -> list[Record]:
    """The sound log with the last such event of a replica changed."""
    log = events()
    index = max(i for i, each in enumerate(log) if each["event"] == name and each.get("replica") == replica)
    log[index] = {key: value for key, value in (log[index] | fields).items() if value is not None}
    return log


@pytest.mark.parametrize(
    ("check", "log", "found"),
    [
        (
            invariants.anchors_agree,
            changed("sync_committed", 2, anchor_hash="other"),
            ["outer step 3: replica 2 has anchor other, replica 0 has anchor-3"],
        ),
        (
            invariants.anchors_agree,
            changed("sync_committed", 2, anchor_hash=None),
            ["outer step 3: replica 2 committed without an anchor_hash"],
        ),
        (
            invariants.no_step_is_lost,
            changed("sync_committed", 1, tokens=90),
            ["replica 1 never failed and trained 300 tokens, but its commits add up to 290"],
        ),
        (
            invariants.no_step_is_lost,
            changed("replica_finished", 2, tokens=400),
            ["replica 2 never failed and trained 400 tokens, but its commits add up to 300"],
        ),
        (
            invariants.no_step_is_lost,
            without("sync_committed", 1),
            ["replica 1 never failed and trained 300 tokens, but its commits add up to 0"],
        ),
        (
            invariants.one_heal_per_join,
            without("heal_finished"),
            ["replica 0 incarnation 1 joined after 0 heals"],
        ),
        (
            invariants.one_heal_per_join,
            [*events()[:-1], event(20.0, "joined", 0, 1, outer_step=3, inner_step=60)],
            ["replica 0 incarnation 1 joined after 0 heals"],
        ),
        (
            invariants.nobody_starts_from_scratch,
            without("heal_finished"),
            ["replica 0 incarnation 1 made its first step without a peer's state"],
        ),
        (
            invariants.nobody_starts_from_scratch,
            changed("first_step", 0, inner_step=0),
            ["replica 0 incarnation 1 trained from step 0"],
        ),
        (
            invariants.failures_are_explained,
            changed("failure_detected", 0, cause="gremlins"),
            ["replica 0 incarnation 0 failed with the unknown cause 'gremlins'"],
        ),
        (
            invariants.failures_are_explained,
            changed("failure_detected", 0, signal=None),
            ["replica 0 incarnation 0 failed by signal without signal"],
        ),
        (
            invariants.failures_are_explained,
            changed("failure_detected", 0, cause="exception", error="ValueError: x"),
            ["replica 0 incarnation 0 failed by exception without traceback"],
        ),
        (
            invariants.failures_are_explained,
            changed("failure_detected", 0, cause="hang", signal=None),
            ["replica 0 incarnation 0 failed by hang without a word of explanation"],
        ),
        (
            invariants.quorum_ids_rise,
            changed("quorum_changed", 1, quorum_id=1),
            ["replica 1 saw quorum 1 after 2"],
        ),
        (
            invariants.quorum_ids_rise,
            changed("quorum_changed", 2, participants=[0, 2]),
            ["quorum 3 has members [0, 1, 2] and also [0, 2]"],
        ),
    ],
)
def test_a_breach_is_found(check: Check, log: list[Record], found: list[str]) -> None:
    assert list(check(log)) == found


def test_a_catch_up_counts_like_a_commit() -> None:
    log = changed("sync_committed", 1, event="caught_up", tokens=100)
    assert list(invariants.no_step_is_lost(log)) == []


@pytest.mark.parametrize(
    "log",
    [
        changed("sync_committed", 0, tokens=90),
        [event(1.0, "fenced", 1, cause="non_finite"), *changed("sync_committed", 1, tokens=90)],
        [
            event(1.0, "failure_detected", 1, cause="signal", signal="SIGKILL"),
            *changed("replica_finished", 1, tokens=7),
        ],
        [each for each in changed("sync_committed", 1, tokens=90) if each["event"] != "replica_finished"],
        [*changed("replica_finished", 1, tokens=None)],
    ],
    ids=["restarted", "kept out", "failed", "did not finish", "does not tell"],
)
def test_only_who_never_failed_and_tells_what_it_trained_must_have_lost_nothing(log: list[Record]) -> None:
    assert list(invariants.no_step_is_lost(log)) == []


def test_a_hang_is_explained_by_a_text() -> None:
    log = [event(1.0, "failure_detected", 0, cause="hang", error="no step for 120 s")]
    assert list(invariants.failures_are_explained(log)) == []


def test_healing_twice_before_joining_is_one_too_many() -> None:
    heal = event(1.0, "heal_finished", 0, 1, donors=[1], outer_step=2)
    joined = event(2.0, "joined", 0, 1, outer_step=2, inner_step=40)
    assert list(invariants.one_heal_per_join([heal, heal, joined])) == ["replica 0 incarnation 1 joined after 2 heals"]


def test_a_restart_before_the_release_needs_no_peer() -> None:
    log = [
        event(1.0, "procs_started", 0, 0, pids=[1]),
        event(2.0, "failure_detected", 0, 0, cause="signal", signal="SIGKILL"),
        event(3.0, "procs_started", 0, 1, pids=[2]),
        event(9.0, "first_step", 1, 0, inner_step=1),
        event(9.0, "first_step", 0, 1, inner_step=1),
    ]
    assert list(invariants.nobody_starts_from_scratch(log)) == []


@pytest.mark.parametrize("standby", [False, True])
def test_whoever_starts_after_the_release_needs_a_peer_also_in_a_standby(standby: bool) -> None:
    log = [
        event(1.0, "procs_started", 0, 0, pids=[1], standby=False),
        event(2.0, "first_step", 0, 0, inner_step=1),
        event(3.0, "standby_started", 0, 0, pids=[2]),
        event(4.0, "procs_started", 0, 1, pids=[2], standby=standby),
        event(9.0, "first_step", 0, 1, inner_step=21),
    ]
    assert list(invariants.nobody_starts_from_scratch(log)) == [
        "replica 0 incarnation 1 made its first step without a peer's state"
    ]


def test_an_incarnation_whose_start_is_not_told_is_judged_by_its_number() -> None:
    log = [event(1.0, "first_step", 0, 0, inner_step=1), event(9.0, "first_step", 0, 1, inner_step=1)]
    assert list(invariants.nobody_starts_from_scratch(log)) == [
        "replica 0 incarnation 1 made its first step without a peer's state"
    ]


def test_all_may_begin_again_from_a_durable_snapshot_together() -> None:
    log = [
        event(1.0, "first_step", 0, 0, inner_step=1),
        event(2.0, "procs_started", 0, 1, standby=False),
        event(2.0, "procs_started", 1, 1, standby=False),
        event(3.0, "run_restored", outer_step=1, path="p", replicas=[0]),
        event(4.0, "first_step", 0, 1, inner_step=5),
    ]
    assert list(invariants.nobody_starts_from_scratch(log)) == []
    # One that was not there at the release has to join.
    log.append(event(5.0, "first_step", 1, 1, inner_step=5))
    assert list(invariants.nobody_starts_from_scratch(log)) == [
        "replica 1 incarnation 1 made its first step without a peer's state"
    ]


def test_a_restored_snapshot_may_be_followed_by_other_anchors() -> None:
    log = [
        sync(1.0, 0, 1, [0], 0.0),
        sync(2.0, 0, 2, [0], 0.0) | {"anchor_hash": "lost"},
        event(3.0, "run_restored", outer_step=1, path="p"),
        sync(4.0, 0, 2, [0], 0.0),
    ]
    assert list(invariants.anchors_agree(log)) == []
    log[2] = event(3.0, "run_restored", outer_step=2, path="p")
    assert len(list(invariants.anchors_agree(log))) == 1
