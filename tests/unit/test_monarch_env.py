import re
from datetime import timedelta

import pytest

from elastic_train.orchestrator.monarch_env import SETTINGS, configure, trainer_environment


def duration(text: str) -> timedelta:
    number, unit = re.fullmatch(r"(\d+)(ms|s)", text).groups()  # type: ignore[union-attr]
    return timedelta(milliseconds=int(number)) if unit == "ms" else timedelta(seconds=int(number))


def test_what_somebody_has_set_stays() -> None:
    environ = {"HYPERACTOR_CLEANUP_TIMEOUT": "9s", "OTHER": "x"}

    configure(environ)

    assert environ == {**SETTINGS, "HYPERACTOR_CLEANUP_TIMEOUT": "9s", "OTHER": "x"}


def test_the_watchdog_waits_longer_than_what_it_watches() -> None:
    at = {name.removeprefix("HYPERACTOR_MESH_"): duration(text) for name, text in SETTINGS.items()}

    watched = ("SUPERVISION_POLL_FREQUENCY", "GET_ACTOR_STATE_MAX_IDLE", "GET_PROC_STATE_MAX_IDLE")
    assert at["SUPERVISION_WATCHDOG_TIMEOUT"] >= sum((at[name] for name in watched), timedelta())


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(3, 2, "1"), (2, 8, "4"), (8, 8, "1"), (3, 16, "5")])
def test_ranks_share_the_cores(ranks: int, cores: int, threads: str) -> None:
    assert trainer_environment(ranks, cores, loopback=True)["OMP_NUM_THREADS"] == threads


def test_gloo_stays_on_loopback_only_where_everything_is_there() -> None:
    assert trainer_environment(1, 1, loopback=True)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in trainer_environment(1, 1, loopback=False)
