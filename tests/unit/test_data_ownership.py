from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.replica.data.ownership import owners


@dataclass(frozen=True)
class Run:
    shards: int
    replicas: int
    ranks: int
    order: tuple[int, ...]
    """Slots as they retire, one after another; at least one is left."""

    def owners(self, retirements: int) -> list[int]:
        return owners(self.shards, replicas=self.replicas, ranks=self.ranks, retired=self.order[:retirements])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    replicas, ranks = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    order = draw(st.permutations(range(replicas)))[: draw(st.integers(0, replicas - 1))]
    return Run(draw(st.integers(replicas * ranks, 64)), replicas, ranks, tuple(order))


@given(run=runs())
def test_every_shard_has_a_living_owner(run: Run) -> None:
    found = run.owners(len(run.order))

    assert len(found) == run.shards
    assert all(0 <= reader < run.replicas * run.ranks for reader in found)
    assert not {reader // run.ranks for reader in found}.intersection(run.order)


@given(run=runs())
def test_readers_own_strides_while_no_replica_is_retired(run: Run) -> None:
    assert run.owners(0) == [shard % (run.replicas * run.ranks) for shard in range(run.shards)]


@given(run=runs())
def test_a_retirement_moves_only_the_shards_of_that_replica(run: Run) -> None:
    for number, slot in enumerate(run.order):
        before, after = run.owners(number), run.owners(number + 1)

        moved = [reader // run.ranks == slot for reader in before]
        assert moved == [was != now for was, now in zip(before, after, strict=True)]


@given(run=runs(), data=st.data())
def test_the_order_of_retirements_does_not_matter(run: Run, data: st.DataObject) -> None:
    told = data.draw(st.permutations(run.order)) * 2

    assert owners(run.shards, replicas=run.replicas, ranks=run.ranks, retired=told) == run.owners(len(run.order))


@given(run=runs(), data=st.data())
def test_readers_that_heard_of_different_retirements_share_no_shard(run: Run, data: st.DataObject) -> None:
    living = [slot for slot in range(run.replicas) if slot not in run.order]
    readers = [slot * run.ranks + rank for slot in living for rank in range(run.ranks)]
    claims: Counter[int] = Counter()
    for reader in readers:
        heard = data.draw(st.sets(st.sampled_from(run.order)) if run.order else st.just(set()))
        view = owners(run.shards, replicas=run.replicas, ranks=run.ranks, retired=heard)
        claims.update(shard for shard, owner in enumerate(view) if owner == reader)

    assert max(claims.values(), default=0) <= 1


def test_what_a_replica_leaves_is_spread_over_the_others() -> None:
    before = Counter(owners(1024, replicas=8, ranks=2))
    after = Counter(owners(1024, replicas=8, ranks=2, retired=[3]))

    # 128 shards for 14 readers are 9 each.
    taken = [after[reader] - before[reader] for reader in after]
    assert len(taken) == 14
    assert min(taken) >= 3
    assert max(taken) <= 20


def test_owners_are_the_same_on_every_machine() -> None:
    assert owners(12, replicas=3, ranks=2, retired=[1]) == [0, 1, 1, 5, 4, 5, 0, 1, 5, 4, 4, 5]


@pytest.mark.parametrize(
    ("retired", "message"),
    [([2], r"\[2\], where the run has 2, counted from 0"), ([-1], r"\[-1\]"), ([0, 1], "all 2 replicas are retired")],
)
def test_retirements_that_cannot_be(retired: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        owners(8, replicas=2, ranks=2, retired=retired)
