"""The pure parts: which processes are killed when, which tokens count, and the figures over the arms."""

import random

import pytest

from elastic_train.events import Record
from scripts.bench_goodput import RUN_IN_S, Measured, Spans, summarize
from scripts.checkpoint_progress import RESUMED, SAVED, TRAINED, tokens_contained
from scripts.kill_schedule import schedule

TOKENS = 10
"""Of one step."""


def record(t: float, kind: str, step: int) -> Record:
    return {"t": t, "kind": kind, "step": step, "tokens": TOKENS * step}


FIRST_LIFE = [
    record(0.0, RESUMED, 0),
    *(record(float(step), TRAINED, step) for step in range(1, 6)),
    record(5.5, SAVED, 5),
    record(6.0, TRAINED, 6),
    record(7.0, TRAINED, 7),
]
SECOND_LIFE = [record(20.0, RESUMED, 5), *(record(20.0 + step, TRAINED, 5 + step) for step in range(1, 4))]


def test_every_training_gets_the_same_kills_from_a_seed() -> None:
    drawn = [schedule(seed, span_s=600, every_s=20, replicas=3, ranks=2) for seed in (1, 1, 2)]

    assert drawn[0] == drawn[1] != drawn[2]
    assert {(kill.replica, kill.rank) for kill in drawn[0]} == {(r, n) for r in range(3) for n in range(2)}


def test_as_much_time_follows_the_last_kill_as_any_other() -> None:
    kills = schedule(0, span_s=70, every_s=20, replicas=2, ranks=1)

    assert [kill.after_s for kill in kills] == [0, 20, 40]
    assert [kill.after_s for kill in schedule(0, span_s=60, every_s=20, replicas=2, ranks=1)] == [0, 20, 40]


def test_a_span_without_a_whole_period_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole period"):
        schedule(0, span_s=19, every_s=20, replicas=2, ranks=1)


def test_a_model_contains_the_steps_that_were_trained() -> None:
    assert [tokens_contained(FIRST_LIFE, [], until) for until in (-1.0, 0.5, 3.5, 5.7, 99.0)] == [0, 0, 30, 50, 70]


def test_a_kill_throws_away_what_came_after_the_checkpoint() -> None:
    progress = [*FIRST_LIFE, *SECOND_LIFE]

    contained = [tokens_contained(progress, [6.5], until) for until in (6.4, 6.6, 19.0, 20.5, 22.5)]

    assert contained == [60, 50, 50, 50, 70]


def test_a_step_that_ends_after_the_kill_is_lost_too() -> None:
    assert tokens_contained(FIRST_LIFE, [6.5], 7.5) == 50


def test_without_a_checkpoint_a_kill_throws_away_everything() -> None:
    progress = [*FIRST_LIFE[:4], record(9.0, RESUMED, 0), record(10.0, TRAINED, 1)]

    assert [tokens_contained(progress, [3.5], until) for until in (3.4, 3.6, 9.5, 10.5)] == [30, 0, 0, 10]


def test_a_kill_in_a_restart_changes_nothing_that_counts() -> None:
    progress = [*FIRST_LIFE, *SECOND_LIFE]
    random.Random(0).shuffle(progress)

    assert tokens_contained(progress, [15.0, 6.5], 22.5) == 70


def test_the_spans_follow_each_other() -> None:
    assert Spans.of(calm_s=60.0, struck_s=120.0) == Spans(calm=RUN_IN_S, struck=RUN_IN_S + 60, end=RUN_IN_S + 180)


def test_figures_are_rates_ratios_and_efficiencies() -> None:
    figures = summarize(
        {
            "elastic": Measured(tokens_a_minute=900.0, calm_tokens_a_minute=1000.0),
            "stock_torchft": Measured(tokens_a_minute=600.0, calm_tokens_a_minute=1000.0),
            "torchrun_checkpoint": Measured(tokens_a_minute=300.0, calm_tokens_a_minute=1200.0),
        }
    )

    assert (figures["elastic"], figures["stock_torchft"], figures["torchrun_checkpoint"]) == (900.0, 600.0, 300.0)
    assert figures["ratios"] == {"elastic_to_stock_torchft": 1.5, "elastic_to_torchrun_checkpoint": 3.0}
    assert figures["efficiency"] == {"elastic": 0.9, "stock_torchft": 0.6, "torchrun_checkpoint": 0.25}
    assert figures["calm"]["torchrun_checkpoint"] == 1200.0


def test_nothing_is_compared_with_an_arm_that_lost_more_than_it_did() -> None:
    figures = summarize(
        {"elastic": Measured(tokens_a_minute=900.0), "torchrun_checkpoint": Measured(tokens_a_minute=-10.0)}
    )

    assert figures["ratios"]["elastic_to_torchrun_checkpoint"] is None


def test_an_arm_that_was_left_out_or_did_nothing_has_no_ratio() -> None:
    figures = summarize(
        {"elastic": Measured(tokens_a_minute=900.0), "stock_torchft": Measured(failed=("it did not start",))}
    )

    assert figures["torchrun_checkpoint"] is None
    assert figures["ratios"] == {"elastic_to_stock_torchft": None, "elastic_to_torchrun_checkpoint": None}
    assert figures["efficiency"] == {"elastic": None, "stock_torchft": None}
