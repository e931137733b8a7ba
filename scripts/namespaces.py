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
_MIDDLE = "10.77.255.1"
# Classic BPF, as tc reads it: load a random number; from the bound on pass (0), else drop (2).
_RANDOM = 0x1_0000_0000 - 0x1000 + 56
_DROP_SOME = "4,32 0 0 {random},53 0 1 {bound},6 0 0 0,6 0 0 2"
_DROP_ALL = "1,6 0 0 2"


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
            _connect(middle, f"10.77.{index}.1", end, _device(index), mbit)
        yield Star(middle=middle, ends=ends)


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """Hosts around the one in the middle, through which they reach each other."""

    middle: Node
    hosts: tuple[Node, ...]

    def cut(self, index: int) -> None:
        """Let nothing through to a host or from it, without a word to anybody."""
        self._filter(index, _DROP_ALL)

    def mend(self, index: int) -> None:
        """Let everything through again."""
        for name in self._ends(index):
            _command("tc", "-n", name, "filter", "del", "dev", _device(index), "ingress")

    def lose(self, index: int, part: float) -> None:
        """Lose that part of the packets to a host, and of those from it."""
        bound = round(2**32 * part)
        self._filter(index, _DROP_SOME.format(random=_RANDOM, bound=bound))

    def slow_down(self, index: int, mbit: float) -> None:
        """Let a host send and get no more than so many 10^6 bits a second."""
        for name in self._ends(index):
            _shape(name, _device(index), mbit)

    def pids(self, index: int) -> list[int]:
        """Every process of a host."""
        command = ("ip", "netns", "pids", self.hosts[index].name)
        listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_S)
        return [int(pid) for pid in listed.stdout.split()]

    def _ends(self, index: int) -> tuple[str, str]:
        return self.middle.name, self.hosts[index].name

    def _filter(self, index: int, program: str) -> None:
        # Where packets arrive: a sender would notice what is dropped where they leave.
        for name in self._ends(index):
            place = ("dev", _device(index), "ingress", "prio", "1", "handle", "1", "protocol", "all")
            _command("tc", "-n", name, "filter", "replace", *place, "bpf", "da", "bytecode", program)


@contextmanager
def host_network(hosts: int) -> Iterator[HostNetwork]:
    """Hosts that reach each other, until the end of the context. Processes on them must have ended by then.

    Args:
        hosts: their number without the one in the middle, at most 200.

    Raises:
        NoNamespaces: they cannot be made; nothing of them is left.
    """
    if os.geteuid() != 0:
        raise NoNamespaces("only root can make network namespaces")
    run = _new_name()
    middle = Node(name=f"{run}-middle", host=_MIDDLE)
    ends = tuple(Node(name=f"{run}-{index}", host=f"10.77.{index}.2") for index in range(hosts))
    with _namespaces(middle.name, *(end.name for end in ends)):
        _command("ip", "-n", middle.name, "address", "add", f"{_MIDDLE}/32", "dev", "lo")
        _command(*command_in(middle.name), "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for index, end in enumerate(ends):
            _join(middle.name, f"10.77.{index}.1", end, _device(index))
            _command("ip", "-n", end.name, "route", "add", "default", "via", f"10.77.{index}.1")
            for name in (middle.name, end.name):
                _command("tc", "-n", name, "qdisc", "add", "dev", _device(index), "clsact")
        yield HostNetwork(middle=middle, hosts=ends)


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


def command_in(name: str) -> tuple[str, ...]:
    """Words before a command that is to run in the namespace of that name."""
    return ("nsenter", f"--net={_NAMES / name}")


def _device(index: int) -> str:
    return f"link{index}"


def _connect(middle: str, host: str, end: Node, device: str, mbit: int) -> None:
    _join(middle, host, end, device)
    _shape(end.name, device, mbit)


def _join(middle: str, host: str, end: Node, device: str) -> None:
    assert len(device) <= _DEVICE_LIMIT
    # Made where they belong, so that nothing of them was ever among the machine's own devices.
    _command("ip", "link", "add", device, "netns", middle, "type", "veth", "peer", "name", device, "netns", end.name)
    for name, address in ((middle, host), (end.name, end.host)):
        _command("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
        _command("ip", "-n", name, "link", "set", device, "up")


def _shape(name: str, device: str, mbit: float) -> None:
    """Bound what a device of a namespace sends."""
    burst = max(round(mbit * 1e6 / 8 * _BURST_S), 128 << 10)
    shape = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", _QUEUE)
    _command("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape)


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_COMMAND_S)
    except FileNotFoundError as error:
        raise NoNamespaces(f"there is no command {words[0]} (package iproute2)") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNamespaces(f"{' '.join(words)}: {error}") from error
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
