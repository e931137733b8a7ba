"""Our own outer sync between processes that die, hang and lie, against its mathematics in float64."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.config import FaultSpec
from elastic_train.events import Record
from scripts.sync_world.checks import faults_of
from scripts.sync_world.spec import WorldSpec, brisk
from scripts.sync_world.world import Account, World

FSDP = WorldSpec(ranks=2, steps=120, diloco=brisk(sync_every=4))


def faults(*texts: str) -> tuple[FaultSpec, ...]:
    return tuple(map(FaultSpec.parse, texts))


def run(spec: WorldSpec, folder: Path) -> Account:
    """A world that came to its end with nothing wrong: all agree with each other and with the oracle."""
    account = World(spec, folder).run()
    assert faults_of(spec, account) == []
    return account


def told(account: Account, event: str, slot: int | None = None) -> list[Record]:
    return [e for s, records in account.events.items() for e in records if e["event"] == event and slot in (None, s)]


def participants(account: Account, outer_step: int) -> list[int]:
    return next(e["participants"] for e in told(account, "sync_committed") if e["outer_step"] == outer_step)


def last_outer_step(account: Account) -> int:
    return max(int(e["outer_step"]) for e in told(account, "sync_committed"))


def test_replicas_with_unequal_tokens_average_as_the_oracle_does(run_dir: Path) -> None:
    account = run(WorldSpec(heartbeat_timeout_ms=10_000, stall_s=40.0, diloco=brisk(timeout_s=30.0)), run_dir)
    assert len(told(account, "sync_committed")) == 3 * 20
    assert not told(account, "sync_retried")


def test_a_pseudo_gradient_of_several_buckets(run_dir: Path) -> None:
    run(WorldSpec(steps=30, width=256), run_dir)


def test_uniform_weights_and_weight_decay(run_dir: Path) -> None:
    run(WorldSpec(diloco=brisk(weighting="uniform", outer_weight_decay=0.01, outer_nesterov=False)), run_dir)


@pytest.mark.parametrize("point", ["step", "quorum", "reduce", "vote", "commit", "snapshot"])
def test_a_replica_that_dies_comes_back_and_costs_the_others_nothing(point: str, run_dir: Path) -> None:
    account = run(WorldSpec(steps=300, faults=faults(f"1.0@5/{point}:kill")), run_dir)
    assert len(told(account, "heal_finished", slot=1)) == 1
    assert len(account.ends) == 1


def test_a_replica_that_dies_gets_its_state_by_process_groups(run_dir: Path) -> None:
    account = run(WorldSpec(steps=300, channels=True, faults=faults("1.0@5/reduce:kill")), run_dir)
    assert len(told(account, "heal_finished", slot=1)) == 1
    log = (run_dir / "replica_1.0.log").read_text()
    assert re.search(r"[1-9]\d* bytes of outer step \d+ came over channels", log)
    assert "come over connections" not in log


def test_one_rank_that_dies_takes_its_replica_with_it_and_nobody_else(run_dir: Path) -> None:
    account = run(replace(FSDP, faults=faults("1.1@5/vote:kill")), run_dir)
    assert {end.slot for end in account.ends} == {1}
    assert len(told(account, "replica_finished")) == 3


def test_one_rank_that_hangs_is_ended_with_its_replica(run_dir: Path) -> None:
    account = run(replace(FSDP, faults=faults("1.1@5/reduce:stop")), run_dir)
    # Its ranks wait for each other, so that both may count as hanging.
    assert {(end.slot, end.incarnation, end.hung) for end in account.ends} == {(1, 0, True)}


@pytest.mark.parametrize("merge_alpha", [0.0, 0.5])
def test_fragments_beside_the_inner_steps_survive_a_death(merge_alpha: float, run_dir: Path) -> None:
    diloco = brisk(fragments=2, overlap_steps=2, merge_alpha=merge_alpha)
    run(WorldSpec(steps=200, diloco=diloco, faults=faults("1.0@7/reduce:kill")), run_dir)


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_replica_joins_in_the_middle_of_a_cycle_of_fragments(overlap_steps: int, run_dir: Path) -> None:
    diloco = brisk(fragments=2, overlap_steps=overlap_steps)
    account = run(WorldSpec(steps=300, diloco=diloco, late={2: 9}), run_dir)
    assert len(told(account, "heal_finished", slot=2)) == 1
    assert participants(account, last_outer_step(account)) == [0, 1, 2]


def test_three_join_at_once_with_one_donor_left(run_dir: Path) -> None:
    each = dict.fromkeys(range(1, 4), 5)
    spec = WorldSpec(replicas=4, steps=600, late=each, tokens=(100, 200, 300, 400), step_s=(0.004,) * 4)
    account = run(spec, run_dir)
    heals = told(account, "heal_finished")
    assert len(heals) == 3
    assert 0 in {donor for heal in heals for donor in heal["donors"]}
    assert participants(account, last_outer_step(account)) == [0, 1, 2, 3]


@pytest.mark.parametrize("replicas", [2, 3])
def test_int8_stays_near_the_oracle(replicas: int, run_dir: Path) -> None:
    account = run(
        WorldSpec(replicas=replicas, diloco=brisk(compression="int8"), faults=faults("1.0@8/vote:comms")), run_dir
    )
    assert told(account, "sync_retried")


def test_the_lighthouse_is_started_again_while_requests_are_pending(run_dir: Path) -> None:
    # The slow replica keeps the others waiting for the quorum when it happens.
    spec = WorldSpec(steps=160, step_s=(0.004, 0.004, 0.03), lighthouse_ends_at=5)
    account = run(spec, run_dir)
    assert not account.ends


def test_what_is_not_a_number_is_kept_out_and_healed_in_place(run_dir: Path) -> None:
    account = run(WorldSpec(faults=faults("1.0@5:nan")), run_dir)
    assert [e["cause"] for e in told(account, "fenced", slot=1)] == ["non_finite"]
    assert 1 not in participants(account, 6)
    assert 1 in participants(account, last_outer_step(account))


def test_a_flipped_bit_is_never_averaged_in(run_dir: Path) -> None:
    account = run(WorldSpec(faults=faults("1.0@5:bitflip")), run_dir)
    assert [e["cause"] for e in told(account, "fenced")] == ["diverged"]
    assert told(account, "fenced", slot=1)
    assert 1 in participants(account, last_outer_step(account))


def test_a_replica_with_another_config_is_refused_by_name(run_dir: Path) -> None:
    account = run(WorldSpec(foreign=frozenset({1})), run_dir)
    [refused] = told(account, "refused")
    assert "replica 1 has another config" in refused["error"]
    assert participants(account, last_outer_step(account)) == [0, 2]


def test_replicas_of_different_speed_train_for_the_same_time(run_dir: Path) -> None:
    spec = WorldSpec(step_s=(0.03, 0.03, 0.06), diloco=brisk(interval="time"))
    account = run(spec, run_dir)
    trained = {slot: [e["steps"] for e in told(account, "sync_committed", slot)] for slot in range(3)}
    # From the second interval on, each has a length of its own; half as fast, half as many.
    fast, slow = trained[0][-1] - trained[0][0], trained[2][-1] - trained[2][0]
    assert 1.4 * slow < fast < 2.6 * slow
