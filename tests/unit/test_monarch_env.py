import re
from datetime import timedelta
from typing import Any

import pytest

from elastic_train.orchestrator.monarch_env import SETTINGS, configure, trainer_environment


def duration(text: str) -> timedelta:
    number, unit = re.fullmatch(r"(\d+)(ms|s)", text).groups()  # type: ignore[union-attr]
    return timedelta(milliseconds=int(number)) if unit == "ms" else timedelta(seconds=int(number))


def test_what_somebody_has_set_stays() -> None:
    environ = {"HYPERACTOR_CLEANUP_TIMEOUT": "9s", "RES_OPTIONS": "timeout:3", "OTHER": "x"}

    configure(environ)

    assert environ == {**SETTINGS, "HYPERACTOR_CLEANUP_TIMEOUT": "9s", "RES_OPTIONS": "timeout:3", "OTHER": "x"}


def test_a_name_server_that_does_not_answer_is_not_waited_for_long() -> None:
    environ: dict[str, str] = {}
    configure(environ)
    assert environ["RES_OPTIONS"] == "timeout:1 attempts:2"


def test_the_watchdog_waits_longer_than_what_it_watches() -> None:
    at = {name.removeprefix("HYPERACTOR_MESH_"): duration(text) for name, text in SETTINGS.items()}

    watched = ("SUPERVISION_POLL_FREQUENCY", "GET_ACTOR_STATE_MAX_IDLE", "GET_PROC_STATE_MAX_IDLE")
    assert at["SUPERVISION_WATCHDOG_TIMEOUT"] >= sum((at[name] for name in watched), timedelta())


def environment(*, replicas: int = 3, procs: int = 2, **settings: Any) -> dict[str, str]:
    settings = {"cores": 12, "interface": "lo", **settings}
    return trainer_environment(replicas=replicas, procs=procs, **settings)


@pytest.mark.parametrize(
    ("replicas", "procs", "cores", "threads"),
    [(3, 1, 2, "1"), (2, 1, 8, "4"), (2, 4, 16, "2"), (1, 4, 16, "4"), (1, 8, 4, "1")],
)
def test_ranks_on_a_host_share_its_cores(replicas: int, procs: int, cores: int, threads: str) -> None:
    made = environment(replicas=replicas, procs=procs, cores=cores)

    assert made["OMP_NUM_THREADS"] == threads


def test_gloo_takes_the_interface_that_is_known() -> None:
    assert environment()["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment(interface="")
