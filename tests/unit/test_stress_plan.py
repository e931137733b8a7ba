"""What strikes a run is the same for the same seed, and what became of it is told without mercy."""

import dataclasses
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import FaultSpec
from elastic_train.config.faults import KINDS
from elastic_train.events import Record
from scripts.fault_plan import EARLIEST_STEP, FaultPlan, draw_plan
from scripts.figures import Spread, by_kind, phases, recovery_figures, spread
from scripts.stress import stress
from scripts.stress_results import OtherSettings, Result, Results, summarize
from scripts.struck_run import Outcome
from scripts.verdict import BORNE_AS, CAUSE_OF_KIND, HARMLESS, Strike, judge
from tests.unit.walkthrough import event, events, states

kind_lists = st.lists(st.sampled_from(KINDS), min_size=1, max_size=20)


def plan_of(seed: int, kinds: list[str], replicas: int = 3, ranks: int = 2, gap_steps: int = 150) -> FaultPlan:
    return draw_plan(random.Random(seed), kinds, replicas=replicas, ranks=ranks, gap_steps=gap_steps)


@given(st.integers(0, 1000), kind_lists, st.integers(2, 5), st.integers(1, 4), st.integers(1, 300))
def test_a_plan_leaves_room_for_every_recovery(
    seed: int, kinds: list[str], replicas: int, ranks: int, gap_steps: int
) -> None:
    plan = plan_of(seed, kinds, replicas, ranks, gap_steps)
    assert sorted(fault.kind for fault in plan.faults) == sorted(kinds)
    assert all(fault.replica < replicas and fault.rank < ranks for fault in plan.faults)
    assert EARLIEST_STEP <= plan.faults[0].step <= EARLIEST_STEP + gap_steps
    assert plan.steps - plan.faults[-1].step >= gap_steps
    for one, next_one in pairwise(plan.faults):
        assert one.replica != next_one.replica
        assert gap_steps <= next_one.step - one.step <= gap_steps * 4 / 3
    struck = [sum(fault.replica == replica for fault in plan.faults) for replica in range(replicas)]
    assert max(struck) - min(struck) <= 2


@given(st.integers(0, 1000), kind_lists)
def test_a_seed_decides_everything(seed: int, kinds: list[str]) -> None:
    assert plan_of(seed, kinds) == plan_of(seed, kinds)


def test_seeds_differ_in_order_places_and_steps() -> None:
    plans = [plan_of(seed, list(KINDS)) for seed in range(10)]
    for differing in (
        {tuple(fault.kind for fault in plan.faults) for plan in plans},
        {tuple(fault.replica for fault in plan.faults) for plan in plans},
        {tuple(fault.rank for fault in plan.faults) for plan in plans},
        {tuple(fault.step for fault in plan.faults) for plan in plans},
    ):
        assert len(differing) > len(plans) // 2


def test_a_lone_replica_is_not_struck() -> None:
    with pytest.raises(ValueError, match="2 replicas or more"):
        plan_of(0, ["kill"], replicas=1)


WALK = FaultPlan(faults=(FaultSpec.parse("0.0@25:kill"),), steps=60)


def without(name: str, incarnation: int) -> list[Record]:
    return [e for e in events() if e["event"] != name or (e.get("replica"), e.get("incarnation")) != (0, incarnation)]


def changed(name: str, **fields: object) -> list[Record]:
    return [each | fields if each["event"] == name else each for each in events()]


def test_a_recovery_is_measured_from_its_fault() -> None:
    verdict = judge(WALK, events())
    assert (verdict.reasons, verdict.unfinished, verdict.saved) == ((), (), "outputs/tiny/last")
    (strike,) = verdict.strikes
    assert (strike.fault, strike.kind, strike.replica) == ("0.0@25:kill", "kill", 0)
    assert (strike.cause, strike.detail) == ("signal", "SIGKILL")
    assert strike.recovered_s == pytest.approx(3.8)
    assert strike.phases == pytest.approx(
        {
            "detected": 0.2,
            "processes up": 0.5,
            "trainers built": 3.0,
            "state received": 3.6,
            "first step": 3.8,
            "member of a quorum": 4.9,
        }
    )
    assert (strike.survivor_wait_s, strike.outage_wait_s) == (0.05, 1.5)


def test_every_kind_has_the_cause_that_it_must_be_reported_with() -> None:
    assert sorted([*CAUSE_OF_KIND, *BORNE_AS, *HARMLESS]) == sorted(KINDS)


def test_a_stress_test_strikes_with_what_takes_a_restart() -> None:
    (kinds,) = [parameter for parameter in stress.params if parameter.name == "kinds"]
    assert kinds.default == "kill,exit,segfault,exception,comms,hang,stop,replica_actor"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (without("fault_injected", 0), "0.0@25:kill did not happen"),
        (without("fault_injected", 0), "replica 0 failed without a fault: signal (SIGKILL)"),
        (without("failure_detected", 0), "0.0@25:kill was never detected"),
        (
            [*events()[:-1], event(13.9, "fault_injected", 0, 1, kind="kill", spec="0.0@25:kill"), events()[-1]],
            "0.0@25:kill happened 2 times",
        ),
        (
            changed("failure_detected", cause="exception", error="KeyError: 1", traceback="KeyError: 1"),
            "0.0@25:kill was reported as exception (SIGKILL), not as signal",
        ),
        (
            [
                *events()[:-1],
                event(13.9, "failure_detected", 2, cause="comm_error", error="closed"),
                events()[-1],
            ],
            "replica 2 failed without a fault: comm_error (closed)",
        ),
        (
            sorted(
                [*events(), event(10.9, "failure_detected", 0, 1, cause="heal_failed", error="nobody there")],
                key=lambda each: each["t"],
            ),
            "replica 0 failed again on its way back from 0.0@25:kill",
        ),
        (
            [*without("first_step", 1)[:-1], event(13.9, "replica_retired", 0, 1, cause="signal"), events()[-1]],
            "replica 0 did not come back from 0.0@25:kill",
        ),
        (
            [*events()[:-1], event(13.9, "replica_retired", 0, 1, cause="signal"), events()[-1]],
            "replica 0 was given up: signal",
        ),
        (events()[:-1], "the run is not succeeded but running, at step 60 of 60"),
        (
            changed("run_finished", status="failed", cause="hang"),
            "the run is not succeeded but failed (hang), at step 60 of 60",
        ),
        (changed("run_finished", inner_step=40), "the run says that it succeeded at step 40 of 60"),
        (changed("checkpoint_saved", outer_step=2), "there is no checkpoint of the last outer step 3"),
        (without("heal_finished", 1), "I4: replica 0 incarnation 1 joined after 0 heals"),
        ([], "the run is not succeeded but starting, at step 0 of 60"),
    ],
)
def test_what_is_not_as_it_must_be_fails_the_run(log: list[Record], reason: str) -> None:
    assert reason in judge(WALK, log).reasons


def test_who_was_still_on_the_way_at_the_end_is_counted_apart() -> None:
    log = [e for e in events() if e.get("incarnation") != 1 or e["t"] < events()[0]["t"] + 9]
    verdict = judge(WALK, [*log, *states(13.9, 0, 1, "STARTING", "SUCCEEDED")])
    assert (verdict.reasons, verdict.unfinished) == ((), ("0.0@25:kill",))
    assert verdict.strikes[0].recovered_s is None


def test_only_the_last_fault_can_have_come_too_late() -> None:
    later = FaultSpec.parse("1.0@30:kill")
    plan = dataclasses.replace(WALK, faults=(*WALK.faults, later))
    log = [e for e in events() if e.get("incarnation") != 1 or e["t"] < events()[0]["t"] + 9]
    verdict = judge(plan, log)
    assert verdict.unfinished == ()
    assert set(verdict.reasons) == {"replica 0 did not come back from 0.0@25:kill", "1.0@30:kill did not happen"}


BORNE = FaultPlan(faults=(FaultSpec.parse("1.0@25:nan"),), steps=60)


def survived(kind: str, *more: Record, upto: float = 60.0) -> list[Record]:
    """A run in which replica 1 is struck 8 s after the start, and restarts no replica for it."""
    kept = [e for e in events() if e.get("replica") != 0 and e["t"] < 1000.0 + upto]
    ended = [e for e in events() if e["event"] in ("run_finished", "checkpoint_saved")]
    struck = event(8.0, "fault_injected", 1, rank=0, kind=kind, point="step", spec=f"1.0@25:{kind}")
    log = {id(each): each for each in [*kept, struck, *more, *ended]}
    return sorted(log.values(), key=lambda each: float(each["t"]))


def kept_out(after: float, cause: str) -> Record:
    return event(after, "fenced", 1, outer_step=2, cause=cause)


@pytest.mark.parametrize(("kind", "cause"), BORNE_AS.items())
def test_a_fault_that_takes_no_restart_is_over_at_the_next_commit(kind: str, cause: str) -> None:
    plan = FaultPlan(faults=(FaultSpec.parse(f"1.0@25:{kind}"),), steps=60)
    verdict = judge(plan, survived(kind, kept_out(9.5, cause)))
    assert (verdict.reasons, verdict.unfinished) == ((), ())
    (strike,) = verdict.strikes
    assert (strike.kind, strike.replica, strike.cause) == (kind, 1, cause)
    assert strike.recovered_s == pytest.approx(2.0)
    assert strike.phases == pytest.approx({"kept out": 1.5})


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (survived("nan"), "1.0@25:nan was never detected"),
        (survived("nan", kept_out(7.5, "non_finite")), "1.0@25:nan was never detected"),
        (survived("nan", kept_out(9.5, "diverged")), "1.0@25:nan was reported as diverged, not as non_finite"),
        (
            survived("nan", kept_out(9.5, "non_finite"), event(9.6, "failure_detected", 1, cause="hang", error="late")),
            "replica 1 failed without a fault: hang (late)",
        ),
        (
            survived("nan", event(9.5, "fenced", 2, outer_step=2, cause="diverged")),
            "replica 2 was kept out of the average without a fault: diverged",
        ),
        (
            survived("nan", kept_out(7.5, "non_finite")),
            "replica 1 was kept out of the average without a fault: non_finite",
        ),
    ],
)
def test_a_fault_that_takes_no_restart_must_be_told_and_borne(log: list[Record], reason: str) -> None:
    assert reason in judge(BORNE, log).reasons


def test_who_was_kept_out_at_the_end_is_counted_apart() -> None:
    log = survived("nan", kept_out(12.0, "non_finite"), upto=11.0)
    assert judge(BORNE, log).unfinished == ("1.0@25:nan",)
    later = dataclasses.replace(BORNE, faults=(*BORNE.faults, FaultSpec.parse("2.0@30:slow")))
    assert "replica 1 did not come back from 1.0@25:nan" in judge(later, log).reasons


def test_a_slow_rank_is_to_be_left_alone() -> None:
    slow = FaultPlan(faults=(FaultSpec.parse("1.0@25:slow"),), steps=60)
    verdict = judge(slow, survived("slow"))
    assert (verdict.reasons, verdict.strikes) == ((), ())
    failed = judge(slow, survived("slow", event(9.6, "failure_detected", 1, cause="hang", error="late")))
    assert "replica 1 failed without a fault: hang (late)" in failed.reasons
    assert judge(slow, events()).reasons != ()


def strike(kind: str, back: float | None, wait: float | None = None, outage: float | None = None) -> Strike:
    reached = {"detected": 1.0} if back is None else {"detected": back / 4, "first step": back}
    return Strike(
        fault=f"0.0@30:{kind}", kind=kind, replica=0, cause="signal", detail="SIGKILL",
        recovered_s=back, phases=reached, survivor_wait_s=wait, outage_wait_s=outage,
    )  # fmt: skip


STRIKES = (strike("kill", 4.0, 0.1, 5.0), strike("kill", 12.0, 0.3, None), strike("kill", 8.0, 0.2, 2.0))


def test_spreads() -> None:
    assert spread([]) == spread([None]) == Spread(median_s=None, worst_s=None)
    assert spread([3.0, None, 1.0, 2.0]) == Spread(median_s=2.0, worst_s=3.0)
    assert spread([1.0, 2.0]) == Spread(median_s=1.5, worst_s=2.0)


def test_phases_come_in_the_order_in_which_they_are_reached() -> None:
    measured = phases([strike("kill", 4.0), strike("kill", None), strike("kill", 12.0)])
    assert list(measured) == ["detected", "first step"]
    assert measured["detected"] == Spread(median_s=1.0, worst_s=3.0)
    assert measured["first step"] == Spread(median_s=8.0, worst_s=12.0)


def test_figures_of_recoveries() -> None:
    assert recovery_figures(STRIKES) == {
        "median_s": 8.0,
        "worst_s": 12.0,
        "survivor_wait_median_s": 0.2,
        "survivor_wait_worst_s": 0.3,
        "survivor_outage_wait_worst_s": 5.0,
        "phases": {
            "detected": {"median_s": 2.0, "worst_s": 3.0},
            "first step": {"median_s": 8.0, "worst_s": 12.0},
        },
    }


def test_figures_by_kind() -> None:
    figures = by_kind([*STRIKES, strike("hang", None)])
    assert figures == {
        "hang": {"count": 1, "recovered": 0, "median_s": None, "worst_s": None, "phases": {"detected": 1.0}},
        "kill": {
            "count": 3,
            "recovered": 3,
            "median_s": 8.0,
            "worst_s": 12.0,
            "phases": {"detected": 2.0, "first step": 8.0},
        },
    }


def result(seed: int, *reasons: str) -> Result:
    outcome = Outcome(exit_code=0, wall_s=9.5, strikes=STRIKES[:2], unfinished=(), reasons=reasons)
    return Result(seed=seed, faults=("0.0@30:kill", "1.0@200:kill"), outcome=outcome)


def test_a_stress_test_is_summed_up() -> None:
    late = dataclasses.replace(result(2), outcome=dataclasses.replace(result(2).outcome, unfinished=("0.0@30:kill",)))
    summary = summarize([result(0), result(1, "exit code 1"), late])
    assert (summary["runs"], summary["passed"]) == (3, 2)
    assert summary["failed"] == {"1": ["exit code 1"]}
    assert summary["unfinished"] == {"2": ["0.0@30:kill"]}
    assert summary["kinds"]["kill"]["count"] == 6
    assert summary["kinds"]["kill"]["worst_s"] == 12.0


def test_results_are_gone_on_with_where_they_ended(tmp_path: Path) -> None:
    path, settings = tmp_path / "out" / "results.jsonl", {"kinds": ["kill"], "replicas": 3}
    first = Results(path, settings)
    first.add(result(0))
    first.add(result(1, "exit code 1"))
    first.close()
    with path.open("a") as file:
        file.write('{"seed": 2, "faults"')  # killed in the middle of a line

    second = Results(path, settings)
    assert [seed in second for seed in range(4)] == [True, True, False, False]
    assert second.of(range(4)) == [result(0), result(1, "exit code 1")]
    second.add(result(3))
    second.close()
    third = Results(path, settings)
    third.close()
    assert third.of(range(4)) == [result(0), result(1, "exit code 1"), result(3)]
    with pytest.raises(OtherSettings, match="other replicas"):
        Results(path, settings | {"replicas": 4})
