"""What a join costs is told from the log: made-up logs of two survivors and a joiner, replica 0."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from elastic_train.events import Record
from scripts.bench_recovery import bench_recovery
from scripts.join_figures import STEPS_BEFORE, Join, join_figures, joins
from tests.unit.walkthrough import START, event, events, metrics_records, sync

TOKENS = 128
"""Of one inner step."""
SURVIVORS = (1, 2)


def healed(after: float, outer_step: int, *, lasted: float = 2.0, incarnation: int = 1, **given: int) -> list[Record]:
    donor_bytes = {slot[1:]: size for slot, size in given.items()} or {"1": 100, "2": 50}
    heal: Record = {
        "donors": [int(slot) for slot in donor_bytes],
        "donor_bytes": donor_bytes,
        "outer_step": outer_step,
        "bytes": sum(donor_bytes.values()),
        "duration_s": lasted,
    }
    return [
        event(after - lasted, "heal_started", 0, incarnation),
        event(after, "heal_finished", 0, incarnation, **heal),
    ]


def steps(
    began: float, every: float, numbers: range, replica: int, incarnation: int = 0, outer_step: int = 2
) -> list[Record]:
    """Steps of one interval, each logged at its end. The first is that of the incarnation."""
    return [
        {
            "t": START + began + every * (index + 1),
            "replica": replica,
            "incarnation": incarnation,
            "outer_step": outer_step,
            "step": number,
            "tokens": TOKENS * (index + 1),
        }
        for index, number in enumerate(numbers)
    ]


def join_sync(after: float, outer_step: int, own_steps: int, *waits: float, incarnation: int = 1) -> list[Record]:
    """The sync in which replica 0 comes in with so many steps, and how long each survivor waited for it."""
    own = sync(after, 0, outer_step, [0, *SURVIVORS], 0.0, incarnation) | {"tokens": TOKENS * own_steps}
    others = (sync(after, r, outer_step, [0, *SURVIVORS], wait) for r, wait in zip(SURVIVORS, waits, strict=True))
    return [own, *others]


def commits_of_survivors(after: float, outer_step: int) -> Iterator[Record]:
    return (sync(after, r, outer_step, list(SURVIVORS), 0.01) for r in SURVIVORS)


LOG = [*healed(10.0, 2), *join_sync(16.0, 3, 7, 0.15, 0.4)]
TRAINED = steps(10.0, 0.5, range(41, 48), 0, incarnation=1)


def only(log: list[Record], trained: list[Record]) -> Join:
    (join,) = joins(log, trained)
    return join


def test_a_join_is_told_from_the_log() -> None:
    assert only(LOG, TRAINED) == Join(
        replica=0,
        incarnation=1,
        heal_s=2.0,
        donors=2,
        steps_before_sync=7,
        intervals_skipped=0,
        wait_beyond_step_s=-0.1,
        step_ratios=(),
        touched_step_ratios=(),
    )


def test_the_log_of_the_small_run_has_one() -> None:
    join = only(events(), metrics_records())
    assert (join.replica, join.incarnation, join.heal_s, join.donors, join.intervals_skipped) == (0, 1, 0.5, 1, 0)


def test_the_order_of_the_log_does_not_matter() -> None:
    assert joins(LOG[::-1], TRAINED) == joins(LOG, TRAINED)


def test_a_step_count_comes_from_tokens_since_a_commit_moves_the_step_on() -> None:
    log = [*healed(10.0, 2), *join_sync(16.0, 3, 0, 0.1, 0.1)]
    assert only(log, TRAINED).steps_before_sync == 0
    assert only(LOG, steps(0.0, 0.1, range(1, 9), 1)).steps_before_sync == 7
    assert only(LOG, []).steps_before_sync is None


def test_a_donor_that_gave_nothing_is_none() -> None:
    assert only(healed(10.0, 2, _1=100, _2=0), []).donors == 1


def test_an_interval_is_skipped_if_others_agreed_on_it_once_the_joiner_had_its_state() -> None:
    without = [*commits_of_survivors(12.0, 3), *commits_of_survivors(14.0, 4)]
    log = [*healed(10.0, 2), *without, *join_sync(16.0, 5, 7, 0.1, 0.1), *commits_of_survivors(18.0, 6)]
    assert only(log, TRAINED).intervals_skipped == 2


def test_a_sync_that_was_under_way_when_the_state_came_is_not_skipped() -> None:
    """Its quorum came 0.1 s before its commit: `reduce_s`. What the slower member says later changes nothing."""
    under_way = [sync(10.05, 1, 3, [1, 2], 0.01), sync(10.2, 2, 3, [1, 2], 0.01)]
    assert only([*healed(10.0, 2), *under_way, *join_sync(16.0, 4, 7, 0.1, 0.1)], TRAINED).intervals_skipped == 0


def test_who_never_comes_in_skips_what_was_committed_until_it_failed() -> None:
    failed = event(13.0, "failure_detected", 0, 1, cause="signal", signal="SIGKILL")
    log = [*healed(10.0, 2), *commits_of_survivors(12.0, 3), failed, *commits_of_survivors(14.0, 4)]
    join = only(log, TRAINED)
    assert (join.steps_before_sync, join.intervals_skipped, join.wait_beyond_step_s) == (None, 1, None)


def test_only_the_waits_of_those_that_were_there_before_count() -> None:
    """Replica 2 comes in with the same sync."""
    second = event(11.0, "heal_finished", 2, 0, donors=[1], outer_step=2, bytes=1, duration_s=1.0)
    found = joins([*LOG, second], TRAINED)
    assert [join.replica for join in found] == [0, 2]
    assert found[0].wait_beyond_step_s == pytest.approx(0.15 - 0.5)


def test_the_joiners_step_is_one_with_no_sync_in_it() -> None:
    later = steps(30.0, 0.5, range(61, 64), 0, incarnation=1, outer_step=3)
    assert only(LOG, [*TRAINED, *later]).wait_beyond_step_s == pytest.approx(-0.1)
    assert only(LOG, TRAINED[:1]).wait_beyond_step_s is None


def test_not_every_step_need_be_logged() -> None:
    """Nor the first: torchtitan goes by the number of the step."""
    assert only(LOG, TRAINED[1::2]) == only(LOG, TRAINED)


def test_a_survivors_steps_in_the_transfer_are_compared_with_its_own_before() -> None:
    fast = [*steps(0.0, 0.1, range(1, 80), 1), *steps(8.0, 0.15, range(80, 92), 1)]
    slow = [*steps(0.0, 0.4, range(1, 20), 2), *steps(8.0, 0.4, range(20, 24), 2)]
    assert only(LOG, [*fast, *slow]).step_ratios == pytest.approx((1.5, 1.0))


def test_a_step_that_is_partly_in_the_transfer_is_told_apart() -> None:
    partly = [*steps(0.0, 1.0, range(1, 10), 1), *steps(8.0, 1.5, range(9, 12), 1)]
    log = [*healed(10.0, 2, lasted=0.5), *join_sync(16.0, 3, 7, 0.1, 0.1)]
    join = only(log, partly)
    assert join.step_ratios == ()
    # That from 9.5 to 11 is the only one that has a part of it.
    assert join.touched_step_ratios == pytest.approx((1.5,))


def test_a_step_that_only_borders_on_the_transfer_is_not_touched_by_it() -> None:
    join = only(LOG, [*steps(0.0, 1.0, range(1, 9), 1), *steps(9.5, 0.5, range(20, 30), 1, outer_step=3)])
    assert (join.step_ratios, join.touched_step_ratios) == ((), ())


def test_only_the_last_steps_before_the_transfer_are_compared_with() -> None:
    warming_up = steps(-100.0, 0.9, range(1, 101), 1)
    before = steps(8.0 - 0.1 * (STEPS_BEFORE + 1), 0.1, range(101, 102 + STEPS_BEFORE), 1)
    during = steps(8.0, 0.2, range(160, 168), 1)
    assert only(LOG, [*warming_up, *before, *during]).step_ratios == pytest.approx((2.0,))


def test_a_transfer_that_turned_to_another_state_began_with_the_first() -> None:
    log = [event(6.0, "heal_started", 0, 1), *LOG]
    trained = [*steps(4.0, 0.1, range(1, 20), 1), *steps(6.1, 0.2, range(30, 38), 1)]
    assert only(log, trained).step_ratios == pytest.approx((2.0,))


def test_a_state_that_is_taken_in_place_is_no_join() -> None:
    again = [event(20.0, "fenced", 0, 1, cause="non_finite", outer_step=3), *healed(22.0, 3)]
    assert len(joins([*LOG, *again], TRAINED)) == 1
    assert joins([*commits_of_survivors(5.0, 1), event(20.0, "heal_finished", 1, 0, duration_s=1.0)], []) == []


def test_every_incarnation_joins_by_itself() -> None:
    again = [*healed(20.0, 4, incarnation=2, lasted=1.0), *join_sync(25.0, 5, 4, 0.1, 0.1, incarnation=2)]
    trained = [*TRAINED, *steps(20.0, 0.25, range(81, 85), 0, incarnation=2, outer_step=4)]
    found = joins([*LOG, *again], trained)
    assert [(join.incarnation, join.steps_before_sync, join.heal_s) for join in found] == [(1, 7, 2.0), (2, 4, 1.0)]


def test_figures_of_joins() -> None:
    first, second = (
        Join(
            replica=0,
            incarnation=incarnation,
            heal_s=heal_s,
            donors=incarnation,
            steps_before_sync=count,
            intervals_skipped=incarnation,
            wait_beyond_step_s=beyond,
            step_ratios=ratios,
            touched_step_ratios=(*ratios, 2.0),
        )
        for incarnation, heal_s, count, beyond, ratios in (
            (1, 0.5, 7, -0.1, (1.0, 1.5)),
            (2, 1.0, None, None, (1.1,)),
        )
    )
    assert join_figures([first, second]) == {
        "joiner_steps_before_sync": {"median": 7, "least": 7},
        "intervals_skipped": 3,
        "survivor_join_wait_beyond_step_s": {"median_s": -0.1, "worst_s": -0.1},
        "survivor_step_ratio": 1.1,
        "survivor_step_ratios": 3,
        "survivor_touched_step_ratio": 1.5,
        "donors": [1, 2],
        "heal_s": {"median_s": 0.75, "worst_s": 1.0},
    }


def test_no_joins_have_no_figures() -> None:
    assert join_figures(joins([], [])) == {
        "joiner_steps_before_sync": {"median": None, "least": None},
        "intervals_skipped": 0,
        "survivor_join_wait_beyond_step_s": {"median_s": None, "worst_s": None},
        "survivor_step_ratio": None,
        "survivor_step_ratios": 0,
        "survivor_touched_step_ratio": None,
        "donors": [],
        "heal_s": {"median_s": None, "worst_s": None},
    }


def test_a_slower_network_is_for_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(bench_recovery, ["--mbit", "100", "--run_dir", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "--mbit: only root can make network namespaces" in done.stderr
    assert not (tmp_path / "run").exists()
