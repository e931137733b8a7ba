"""At which addresses this machine is reached, where the config leaves that open."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Sequence

from elastic_train.config import EnvironmentProblem, RunConfig

_ANY_PORT = 9


def with_addresses(config: RunConfig) -> RunConfig:
    """The config with the addresses of this machine in it.

    Raises:
        EnvironmentProblem: it reaches no other host, or none by that name.
    """
    host = config.orchestrator.advertise_host
    if not host:
        host = "127.0.0.1" if config.scheduler.kind == "local" else _towards_all(config.scheduler.hosts)
    return dataclasses.replace(
        config,
        orchestrator=dataclasses.replace(config.orchestrator, advertise_host=host),
        lighthouse=dataclasses.replace(config.lighthouse, host=config.lighthouse.host or host),
    )


def address_of(host: str) -> str:
    """The address of a host that is named as for the remote shell, [user@]name: of several, one of IPv4.

    Raises:
        OSError: there is none of that name.
    """
    found = socket.getaddrinfo(host.rpartition("@")[2], None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def towards(host: str) -> str:
    """The address of this machine from which it reaches a host, [user@]name. Sends nothing.

    Raises:
        EnvironmentProblem: it reaches none of that name.
    """
    try:
        address = address_of(host)
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentProblem(
            f"this machine does not know the way to {host} ({error.strerror}): name hosts by addresses in "
            "scheduler.hosts, or set orchestrator.advertise_host"
        ) from error


def _towards_all(hosts: Sequence[str]) -> str:
    """The address from which this machine reaches the first host that is another, or else itself.

    Raises:
        EnvironmentProblem: one of them is not reached, or is there twice.
    """
    ways = [towards(host) for host in hosts]
    named: dict[str, str] = {}
    for host in hosts:
        if (other := named.setdefault(address_of(host), host)) != host:
            raise EnvironmentProblem(
                f"{other} and {host} are the same host: name it once in scheduler.hosts, and set "
                "scheduler.replicas_per_host"
            )
    return next((way for way in ways if not ipaddress.ip_address(way.partition("%")[0]).is_loopback), ways[0])


def family_of(address: str) -> socket.AddressFamily:
    """IPv4's or IPv6's, as an address is written."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def bracketed(address: str) -> str:
    """An address as a URL has it."""
    return f"[{address}]" if ":" in address else address
