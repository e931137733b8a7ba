import pytest

from scripts.bench_overhead import ARMS, Round, order, summarize


def test_overhead_is_the_median_over_rounds_not_over_times() -> None:
    rounds = [
        Round(plain=10.0, elastic=10.1, stock=10.5, elastic_sync=0.3, stock_sync=0.1),
        Round(plain=20.0, elastic=20.1, stock=20.2, elastic_sync=0.1, stock_sync=0.4),
        Round(plain=11.0, elastic=11.0, stock=11.33, elastic_sync=0.2, stock_sync=0.5),
    ]

    figures = summarize(rounds, sync_every=20)

    assert figures["overhead_pct"] == pytest.approx(0.5)
    assert figures["stock_overhead_pct"] == pytest.approx(3.0)
    assert figures["step_s_plain"] == pytest.approx(11.0 / 20)
    assert figures["step_s_elastic"] == pytest.approx(11.0 / 20)
    assert (figures["sync_s_elastic"], figures["sync_s_stock"]) == (0.2, 0.4)
    assert figures["sync_pct"] == pytest.approx(1.818)
    assert figures["stock_sync_pct"] == pytest.approx(2.0)
    assert len(figures["rounds"]) == 3


def test_every_arm_comes_first_equally_often_and_in_either_direction() -> None:
    orders = [order(number) for number in range(6)]

    assert all(sorted(arms) == sorted(ARMS) for arms in orders)
    assert len(set(orders)) == 6
    assert sorted(arms[0] for arms in orders) == sorted([*ARMS, *ARMS])
