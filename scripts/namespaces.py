"""Network namespaces with links of a given speed between them: on one machine, machines that stand apart.

Linux only, by the commands ``ip`` and ``tc``, which need root. A namespace goes when its star ends; what a script that
was killed has left shows in ``ip netns list``, with :data:`PREFIX` before its name.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "elastic-train-"

_NAMES = Path("/run/netns")
_DEVICE_LIMIT = 15
_COMMAND_S = 20.0
_CLONE_NEWNET = 0x40000000
# What a link may send at once: above what leaves within a tick of the kernel's slowest clock (100 a second).
_BURST_S = 0.012
_QUEUE = "100ms"


class NoNamespaces(RuntimeError):
    """They cannot be made here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A namespace."""

    name: str
    host: str
    """Address at which the one in the middle reaches it."""


@dataclass(frozen=True, kw_only=True)
class Star:
    """A namespace in the middle, and one at the end of each link. The ends do not reach each other."""

    middle: str
    """Its name."""
    ends: tuple[Node, ...]


@contextmanager
def star(links: int, mbit: int) -> Iterator[Star]:
    """Namespaces around one in the middle, until the end of the context. Processes in them must have ended by then.

    Args:
        links: their number, at most 200.
        mbit: what each end may send, in 10^6 bits a second. What the middle sends is not bounded.

    Raises:
        NoNamespaces: they cannot be made; nothing of them is left.
    """
    if os.geteuid() != 0:
        raise NoNamespaces("only root can make network namespaces")
    run = _new_name()
    middle = f"{run}-middle"
    ends = tuple(Node(name=f"{run}-{index}", host=f"10.77.{index}.2") for index in range(links))
    with _namespaces(middle, *(end.name for end in ends)):
        for index, end in enumerate(ends):
            _connect(middle, f"10.77.{index}.1", end, f"link{index}", mbit)
        yield Star(middle=middle, ends=ends)


@contextmanager
def loopback(mbit: int) -> Iterator[str]:
    """A namespace that has only a loopback, of a given speed, until the end of the context. As in :func:`star`.

    Args:
        mbit: what all processes in it send each other together, in 10^6 bits a second.

    Raises:
        NoNamespaces: it cannot be made; nothing of it is left.
    """
    if os.geteuid() != 0:
        raise NoNamespaces("only root can make network namespaces")
    name = _new_name()
    with _namespaces(name):
        _shape(name, "lo", mbit)
        yield name


def enter(name: str) -> None:
    """Put the calling thread, and all that it starts from now on, into the namespace of that name.

    Raises:
        OSError: there is none, or it may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(_NAMES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(namespace, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(namespace)


def _new_name() -> str:
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"


@contextmanager
def _namespaces(*names: str) -> Iterator[None]:
    made: list[str] = []
    try:
        for name in names:
            _command("ip", "netns", "add", name)
            made.append(name)
            _command("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in made:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True, timeout=_COMMAND_S)


def _connect(middle: str, host: str, end: Node, device: str, mbit: int) -> None:
    assert len(device) <= _DEVICE_LIMIT
    # Made where they belong, so that nothing of them was ever among the machine's own devices.
    _command("ip", "link", "add", device, "netns", middle, "type", "veth", "peer", "name", device, "netns", end.name)
    for name, address in ((middle, host), (end.name, end.host)):
        _command("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
        _command("ip", "-n", name, "link", "set", device, "up")
    _shape(end.name, device, mbit)


def _shape(name: str, device: str, mbit: int) -> None:
    """Bound what a device of a namespace sends."""
    burst = max(round(mbit * 1e6 / 8 * _BURST_S), 128 << 10)
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", _QUEUE)
    _command("tc", "-n", name, "qdisc", "add", "dev", device, "root", *shape)


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_COMMAND_S)
    except FileNotFoundError as error:
        raise NoNamespaces(f"there is no command {words[0]} (package iproute2)") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNamespaces(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
