"""What the benchmark of outer syncs makes of its measurements."""

import pytest
import torch

from scripts.bench_sync import MIB, compare, grown, growth, in_turn, method_figures
from scripts.sync_replica import METHODS, TimedSync, moves_of, needed_bytes, relative_error


def sync(seconds: float, sent: int = 100) -> TimedSync:
    return TimedSync(seconds=seconds, bytes=sent, candidate=1, rss=0, peak_rss=0)


def test_a_sync_takes_as_long_as_its_slowest_replica() -> None:
    rounds = [[sync(1.0), sync(3.0)], [sync(2.0), sync(1.0)], [sync(9.0), sync(1.0)]]
    assert method_figures(rounds, 0.00123456) == {"seconds": 3.0, "bytes": 100, "relative_error": 0.00123}


def test_ratios_are_to_the_first_method() -> None:
    methods = {"none": method_figures([[sync(2.0, 400)]], 0.0), "int8": method_figures([[sync(3.0, 100)]], 0.1)}
    compared = compare(methods)
    assert [compared[name]["seconds_ratio"] for name in methods] == [1.0, 1.5]
    assert [compared[name]["bytes_ratio"] for name in methods] == [1.0, 0.25]
    assert compared["int8"]["relative_error"] == 0.1


def test_growth_is_that_of_the_process_that_grew_most_after_the_warm_up() -> None:
    memory = [[0, 0], [10 * MIB, 50 * MIB], [14 * MIB, 51 * MIB], [12 * MIB, 50 * MIB]]
    assert growth(memory, since=1) == 4.0
    assert growth(memory[:2], since=1) == 0.0


def test_memory_may_grow_by_what_one_bucket_takes() -> None:
    assert grown("case", 36.0, 32 * MIB) == []
    [reason] = grown("case", 37.0, 32 * MIB)
    assert "case" in reason
    assert "37 MiB" in reason


def test_every_method_is_in_every_round_and_first_in_some() -> None:
    rounds = [in_turn(METHODS, turn) for turn in range(len(METHODS))]
    assert all(sorted(one) == sorted(METHODS) for one in rounds)
    assert {one[0] for one in rounds} == set(METHODS)


def test_the_error_is_that_against_the_weighted_mean() -> None:
    moves, weights = [moves_of(rank, 50) for rank in range(2)], [0.25, 0.75]
    mean = (0.25 * moves[0].double() + 0.75 * moves[1].double()).repeat(3)[:120]
    assert relative_error(mean.float(), moves, weights) < 1e-7
    assert relative_error(1.5 * mean.float(), moves, weights) == pytest.approx(0.5)
    off = mean.float()
    off[110] += 1.0
    assert relative_error(off, moves, weights) == pytest.approx(1 / float(mean.norm()))


def test_moves_differ_between_ranks_and_not_between_processes() -> None:
    assert torch.equal(moves_of(1, 20), moves_of(1, 20))
    assert not torch.equal(moves_of(0, 20), moves_of(1, 20))


def test_memory_grows_with_the_model_and_the_replicas() -> None:
    parameters, outer_state, errors = 4, 16, 8
    extra = needed_bytes(200_000_000, 2, 1 << 25) - needed_bytes(100_000_000, 2, 1 << 25)
    assert extra == 2 * 100_000_000 * (parameters + outer_state + errors)
    assert needed_bytes(10_000_000, 3, 1 << 25) > 1.5 * needed_bytes(10_000_000, 2, 1 << 25)
