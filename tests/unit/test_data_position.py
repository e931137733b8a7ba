import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.replica.data.position import PositionTable, ShardPosition

SHARDS = 6
BIG = 2**61
POSITIONS = st.builds(ShardPosition, *[st.integers(0, BIG)] * 4)
TABLES = st.lists(POSITIONS, min_size=SHARDS, max_size=SHARDS).map(
    lambda rows: PositionTable.start(SHARDS).replace(dict(enumerate(rows)))
)


@given(committed=TABLES, reached=TABLES, readers=st.integers(1, SHARDS))
def test_sum_of_all_readers_deltas_leads_to_where_each_is(
    committed: PositionTable, reached: PositionTable, readers: int
) -> None:
    total = torch.zeros(SHARDS, 4, dtype=torch.int64)
    for reader in range(readers):
        owned = range(reader, SHARDS, readers)
        own = committed.replace({shard: reached[shard] for shard in owned})
        delta = own.delta(committed)
        others = [shard for shard in range(SHARDS) if shard not in owned]
        assert not delta[others].any()
        total += delta

    assert committed.plus(total) == reached


@given(table=TABLES)
def test_goes_through_plain_numbers(table: PositionTable) -> None:
    rows = table.to_list()

    assert all(type(value) is int for row in rows for value in row)
    assert PositionTable.from_list(rows) == table
    assert PositionTable(table.rows) == table
    assert hash(PositionTable.from_list(rows)) == hash(table)


@given(table=TABLES, shard=st.integers(0, SHARDS - 1), position=POSITIONS)
def test_replace_moves_one_shard(table: PositionTable, shard: int, position: ShardPosition) -> None:
    moved = table.replace({shard: position})

    assert moved[shard] == position
    assert all(moved[other] == table[other] for other in range(SHARDS) if other != shard)
    assert (moved == table) == (position == table[shard])


def test_nothing_outside_changes_a_table() -> None:
    rows = torch.zeros(2, 4, dtype=torch.int64)
    table = PositionTable(rows)
    rows += 1
    table.rows.add_(1)

    assert table == PositionTable.start(2)


def test_progress_counted_twice_backwards_is_refused() -> None:
    table = PositionTable.start(2).replace({0: ShardPosition(0, 5, 3, 2)})
    back = PositionTable.start(2).delta(table)

    assert table.plus(back) == PositionTable.start(2)
    with pytest.raises(ValueError, match="counted more than once"):
        table.plus(2 * back)


def test_tables_of_other_sizes_do_not_mix() -> None:
    with pytest.raises(ValueError, match="virtual_shards must stay"):
        PositionTable.start(2).delta(PositionTable.start(3))
    with pytest.raises(ValueError, match="virtual_shards must stay"):
        PositionTable.start(2).plus(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)]
)
def test_other_tensors_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="int64"):
        PositionTable(rows)
