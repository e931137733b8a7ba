import re
from datetime import timedelta
from pathlib import Path
from typing import Any

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


def environment(slot: int = 0, *, replicas: int = 3, procs: int = 2, **settings: Any) -> dict[str, str]:
    settings = {"cores": 12, "one_machine": True, "environ": {}, **settings}
    return trainer_environment(slot, replicas=replicas, procs=procs, **settings)


@pytest.mark.parametrize(
    ("one_machine", "replicas", "procs", "cores", "threads"),
    [(True, 3, 1, 2, "1"), (True, 2, 1, 8, "4"), (True, 2, 4, 16, "2"), (False, 2, 4, 16, "4"), (False, 9, 8, 4, "1")],
)
def test_ranks_on_a_machine_share_its_cores(
    one_machine: bool, replicas: int, procs: int, cores: int, threads: str
) -> None:
    made = environment(replicas=replicas, procs=procs, cores=cores, one_machine=one_machine)

    assert made["OMP_NUM_THREADS"] == threads


def test_gloo_stays_on_loopback_only_where_everything_is_there() -> None:
    assert environment()["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment(one_machine=False)


VISIBLE = "HIP_VISIBLE_DEVICES" if Path("/dev/kfd").exists() else "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environ", "shares"),
    [
        ({}, ["0,1", "2,3", "4,5"]),
        ({VISIBLE: "7,6,5,4,3,2,1"}, ["7,6", "5,4", "3,2"]),
        ({VISIBLE: "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f"}, ["GPU-a,GPU-b", "GPU-c,GPU-d", "GPU-e,GPU-f"]),
        ({VISIBLE: ""}, ["", "", ""]),
    ],
)
def test_replicas_on_a_machine_have_accelerators_of_their_own(environ: dict[str, str], shares: list[str]) -> None:
    assert [environment(slot, environ=environ)[VISIBLE] for slot in range(3)] == shares


def test_a_replica_on_its_own_machine_has_all_accelerators() -> None:
    assert VISIBLE not in environment(one_machine=False)
