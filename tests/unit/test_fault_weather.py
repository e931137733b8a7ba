from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

from scripts.fault_weather import DEATHS, HANGS, OUTSIDE, SUPERVISION, Gust, deal, gusts


def some(seed: int, count: int = 4000) -> list[Gust]:
    return list(islice(gusts(seed, mtbf_s=15.0, replicas=3, ranks=2), count))


def test_the_same_seed_brings_the_same_faults() -> None:
    assert some(7, 50) == some(7, 50)
    assert some(7, 50) != some(8, 50)


@pytest.mark.parametrize(("kinds", "share"), [(DEATHS, 0.8), (HANGS, 0.1), (SUPERVISION, 0.1)])
def test_shares_of_the_kinds(kinds: tuple[str, ...], share: float) -> None:
    found = Counter(gust.kind for gust in some(0))
    assert sum(found[kind] for kind in kinds) / found.total() == pytest.approx(share, abs=0.03)
    assert all(found[kind] for kind in kinds)


def test_the_time_between_faults_and_their_places() -> None:
    found = some(1)
    assert fmean(gust.after_s for gust in found) == pytest.approx(15.0, rel=0.1)
    assert {(gust.replica, gust.rank) for gust in found} == {(replica, rank) for replica in range(3) for rank in (0, 1)}


def test_nothing_strikes_where_nothing_runs(tmp_path: Path) -> None:
    outside = Gust(after_s=0.0, kind=OUTSIDE, replica=1, rank=0)
    other = {"event": "procs_started", "replica": 0, "pids": [1]}
    assert deal(outside, tmp_path, [other]) == "replica 1 has no processes yet"
    told = Gust(after_s=0.0, kind="kill", replica=1, rank=0)
    assert "no living run" in str(deal(told, tmp_path, []))
