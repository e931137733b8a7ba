"""At which addresses this machine is reached, where the config leaves that open."""

from __future__ import annotations

import dataclasses
import socket

from elastic_train.config import EnvironmentProblem, RunConfig

_ANY_PORT = 9


def with_addresses(config: RunConfig) -> RunConfig:
    """The config with the addresses of this machine in it.

    Raises:
        EnvironmentProblem: it reaches no other host, or none by that name.
    """
    host = config.orchestrator.advertise_host
    if not host:
        host = "127.0.0.1" if config.scheduler.kind == "local" else towards(config.scheduler.hosts[0])
    return dataclasses.replace(
        config,
        orchestrator=dataclasses.replace(config.orchestrator, advertise_host=host),
        lighthouse=dataclasses.replace(config.lighthouse, host=config.lighthouse.host or host),
    )


def towards(host: str) -> str:
    """The address of this machine from which it reaches a host, [user@]name. Sends nothing.

    Raises:
        EnvironmentProblem: it reaches none of that name.
    """
    name = host.rpartition("@")[2]
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentProblem(
            f"this machine does not know the way to {name} ({error.strerror}): name hosts by addresses in "
            "scheduler.hosts, or set orchestrator.advertise_host"
        ) from error


def bracketed(address: str) -> str:
    """An address as a URL has it."""
    return f"[{address}]" if ":" in address else address
