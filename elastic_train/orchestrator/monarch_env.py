"""How Monarch is set up: the only place that writes its environment.

Monarch finds a dead process by polling, and its defaults take ten seconds and more. Every variable must be set before
monarch is imported, here and so, by inheritance, in every process that it starts.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from elastic_train.name_service import be_impatient

SETTINGS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    # Silence that Monarch takes for death. A process that ends is seen at once and one that is stopped by its beacon,
    # so these only have to find what is left, and must not take a process on a loaded machine for a dead one.
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "30s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "31s",
    # At least the sum of the three above.
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "90s",
    # An actor whose controller is silent for so long stops itself. Trainers of a dead ReplicaActor do not wait for
    # it: its successor ends them by pid.
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "90s",
    "HYPERACTOR_MESH_TERMINATE_TIMEOUT": "2s",
    "HYPERACTOR_CLEANUP_TIMEOUT": "500ms",
    "HYPERACTOR_STOP_ACTOR_TIMEOUT": "1s",
    "HYPERACTOR_REMOTE_STOP_GRACE_PERIOD": "500ms",
    "HYPERACTOR_PROCESS_EXIT_TIMEOUT": "1s",
}


def configure(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set Monarch's timeouts, and that of its processes for names; what somebody has set already stays."""
    be_impatient(environ)
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)


def trainer_environment(*, replicas: int, procs: int, cores: int, interface: str) -> dict[str, str]:
    """Variables for the trainer processes on one host, each of which gets its share of the cores.

    Args:
        replicas: those that share the host.
        interface: the network's, over which they reach their peers; "": that is left to the libraries.
    """
    environment = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment["OMP_NUM_THREADS"] = str(max(1, cores // (replicas * procs)))
    if interface:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment
