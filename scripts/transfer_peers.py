"""Donors and a joiner in processes of their own that do nothing but transfer a state: what benchmarks of it measure.

The state is that of a rank, half of it outer (anchors and momenta) and half inner (moments), of random numbers. A
joiner is a new process for every transfer, as it is in a run: the memory that it receives into is new to it too, and
what it takes to get that is part of what every wire costs. A warm one has been given its memory beforehand.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch

from elastic_train.peer_ckpt.channel import Channels
from elastic_train.peer_ckpt.client import Donor, PeerClient
from elastic_train.peer_ckpt.http import MeteredHTTPTransport
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import combine, hash_tensors, raw_bytes
from elastic_train.peer_ckpt.snapshot import Snapshot
from scripts import children
from scripts.namespaces import enter

RAW, OURS, GROUP, HTTP = "raw", "ours", "process_group", "http"

PARAMETERS = 32
"""Parameters that the state belongs to: as many tensors of each kind."""

OUTER, INNER = "outer", "inner"

_KINDS = {OUTER: ("anchor", "momentum"), INNER: ("exp_avg", "exp_avg_sq")}
_TENSORS = 4 * PARAMETERS
_LOOPBACK = "127.0.0.1"
_CPU = torch.device("cpu")
_JOINER = 100
_SILENCE_S = 60.0
_ANSWER_S = 900.0
_LEAVE_S = 10.0

Sections = dict[str, dict[str, torch.Tensor]]


class PeerFailed(RuntimeError):
    """A donor or a joiner failed, or is gone."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a donor is."""

    host: str = _LOOPBACK
    """Address at which it listens."""
    namespace: str = ""
    """Network namespace; empty: that of this process."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a state is transferred."""

    wire: str
    """RAW: plain sockets that check nothing; OURS: PeerServer and PeerClient; GROUP: the same, the bytes by process
    groups of gloo; HTTP: torchft's transport."""
    warm: bool = False
    """The joiner has used the memory that it receives into before. Not with HTTP, which takes its own."""


@dataclass(frozen=True, kw_only=True)
class TimedTransfer:
    """One transfer as the joiner saw it."""

    seconds: float
    """From the first word to a donor until all bytes were there."""
    bytes: int
    """Of tensors."""
    hash: int
    """Of what arrived."""
    shares: tuple[int, ...] = ()
    """Bytes that each donor gave, if they were counted."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a donor has ready."""

    address: str
    hash: int
    """Of its state."""


class Peers:
    """Donors, all with the same state. Leaving the context ends their processes, and a joiner's if one is left."""

    def __init__(self, size: int, donors: Sequence[Place], *, streams: int, joiner: str = "") -> None:
        """
        Args:
            size: bytes of the state, about: it is divided into equal tensors.
            streams: connections of the joiner to each donor; raw sockets and ours alike.
            joiner: the namespace of the joiner; empty: that of this process.

        Raises:
            PeerFailed: a donor did not get ready.
        """
        self._context = peer_context(__name__)
        self._numel = max(size // (4 * _TENSORS), 1)
        self._streams = streams
        self._namespace = joiner
        self._token = secrets.token_hex(16)
        self._turn = 0
        self._ends: list[Connection] = []
        self.processes: list[BaseProcess] = []
        try:
            for place in donors:
                self._ends.append(self._start(_give, place, self._token, self._numel, streams))
            for slot, end in enumerate(self._ends):
                answer_of(end, f"donor {slot}")
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def transfer(self, way: Way, donors: int = 1) -> TimedTransfer:
        """Let a new joiner have the state from the first ``donors`` donors; only OURS takes it from more than one.

        Raises:
            PeerFailed: somebody failed, or what arrived is not what was sent.
        """
        if donors > 1 and way.wire != OURS:
            raise ValueError(f"{way.wire} takes a state from one donor")
        self._turn += 1
        offers: list[Offer] = [self._ask(slot, "offer", way.wire, self._turn) for slot in range(donors)]
        end = self._start(_take, self._namespace, self._token, self._numel, self._streams, way, self._turn, offers)
        joiner = self.processes.pop()
        try:
            timed: TimedTransfer = answer_of(end, "the joiner")
        finally:
            joiner.kill()
            joiner.join(_LEAVE_S)
            end.close()
        for slot in range(donors):
            self._ask(slot, "withdraw", way.wire)
        if any(timed.hash != offer.hash for offer in offers):
            raise PeerFailed(f"{way.wire}: what arrived is not what was sent")
        return timed

    def end(self) -> None:
        """End all processes, whatever they do."""
        children.end(self.processes, self._ends)

    def _start(self, target: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        return ours

    def _ask(self, slot: int, *order: Any) -> Any:
        try:
            self._ends[slot].send(order)
        except OSError as error:
            raise PeerFailed(f"donor {slot} is gone") from error
        return answer_of(self._ends[slot], f"donor {slot}")


def needed_bytes(size: int, donors: int) -> int:
    """Memory that a measurement needs, roughly: each donor's state, and the joiner's with what HTTP has of it twice."""
    return (donors + 2) * size + (donors + 2) * 300_000_000


def peer_context(module: str) -> ForkServerContext:
    """Starts processes that have a module loaded already, and torch with it."""
    # Fork alone would copy the threads' locks of this process; the server has none.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def answer_of(end: Connection, who: str, within_s: float = _ANSWER_S) -> Any:
    """What a process in :func:`telling` says next. Raises PeerFailed, also if that is what it says."""
    if not end.poll(within_s):
        raise PeerFailed(f"{who} did not answer in {within_s:.0f} s")
    try:
        answer = end.recv()
    except (EOFError, OSError) as error:
        raise PeerFailed(f"{who} is gone") from error
    if isinstance(answer, PeerFailed):
        raise answer
    return answer


class RawServer:
    """Sends tensors over plain sockets: over the i-th of n connections the i-th, the (i+n)-th and so on."""

    def __init__(self, host: str, tensors: Sequence[torch.Tensor], streams: int) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(_SILENCE_S)
        port = self._listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._tensors = tensors
        self._streams = streams
        self._thread = threading.Thread(target=self._serve, name="raw donor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until everything is sent."""
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with ThreadPoolExecutor(self._streams) as pool:
            for _ in range(self._streams):
                connection, _ = self._listener.accept()
                pool.submit(self._send, connection)

    def _send(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_SILENCE_S)
            stream = connection.recv(1)[0]
            for tensor in self._tensors[stream :: self._streams]:
                connection.sendall(raw_bytes(tensor))


def receive_raw(address: str, tensors: Sequence[torch.Tensor], streams: int) -> None:
    """Fill ``tensors`` from a :class:`RawServer` with the same number of streams and tensors of the same sizes.

    Raises:
        OSError: it ended before, or says nothing.
    """
    host, _, port = address.rpartition(":")

    def receive(stream: int) -> None:
        with socket.create_connection((host, int(port)), _SILENCE_S) as connection:
            connection.sendall(bytes([stream]))
            for tensor in tensors[stream::streams]:
                content = raw_bytes(tensor)
                while content:
                    count = connection.recv_into(content)
                    if not count:
                        raise ConnectionError("the donor ended too early")
                    content = content[count:]

    with ThreadPoolExecutor(streams) as pool:
        for done in [pool.submit(receive, stream) for stream in range(streams)]:
            done.result()


def make_state(numel: int, make: Callable[[int], torch.Tensor]) -> Sections:
    """A rank's state by section and name: tensors of ``numel`` numbers each, as ``make`` gives them."""
    return {
        section: {f"{index}.{kind}": make(numel) for index in range(PARAMETERS) for kind in kinds}
        for section, kinds in _KINDS.items()
    }


def state_hash(state: Mapping[str, Mapping[str, torch.Tensor]]) -> int:
    """Of all tensors of a state."""
    return combine(hash_tensors(state[section]) for section in _KINDS)


def _listed(state: Mapping[str, Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for section in _KINDS for tensor in state[section].values()]


class _Giver:
    """A donor: the state, and the wires that it can be had by."""

    def __init__(self, host: str, token: str, numel: int, streams: int) -> None:
        self._host = host
        self._streams = streams
        generator = torch.Generator().manual_seed(0)
        self._state = make_state(numel, lambda numel: torch.rand(numel, generator=generator))
        self._hash = state_hash(self._state)
        self._server = PeerServer(host, token, lambda attempt, dead: {}, channels=Channels(host, _CPU))
        self._http = _http_end(host)
        self._raw: RawServer | None = None

    def obey(self, order: str, *arguments: Any) -> Any:
        match order, *arguments:
            case "offer", wire, turn:
                return Offer(address=self._offer(wire, turn), hash=self._hash)
            case "withdraw", wire:
                return self._withdraw(wire)
        raise ValueError(f"no such order: {order}")

    def _offer(self, wire: str, turn: int) -> str:
        if wire == RAW:
            self._raw = RawServer(self._host, _listed(self._state), self._streams)
            return self._raw.address
        if wire == HTTP:
            self._http.send_checkpoint([1], turn, self._state, timedelta(seconds=_ANSWER_S))
            return self._http.address()
        # A snapshot of its own for every transfer, so that the checksums are made in each, as after an outer step.
        header = {"outer_step": turn, "rank_hash": 0, "state_hash": self._hash, "whole_hash": self._hash, "history": {}}
        self._server.publish(Snapshot(header, self._state))
        return self._server.address

    def _withdraw(self, wire: str) -> None:
        if wire == HTTP:
            self._http.disallow_checkpoint()
        if self._raw is not None:
            self._raw.close()
            self._raw = None


def _fetch(way: Way, token: str, numel: int, streams: int, turn: int, offers: Sequence[Offer]) -> TimedTransfer:
    addresses = [offer.address for offer in offers]
    # Not zeros(), which leaves it to the kernel to make the memory when it is first written.
    spare = _listed(make_state(numel, lambda numel: torch.full((numel,), 1.0))) if way.warm else []

    def memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return spare.pop() if spare else torch.empty(shape, dtype=dtype)

    shares: tuple[int, ...] = ()
    if way.wire == RAW:
        began = time.perf_counter()
        state = make_state(numel, lambda numel: memory((numel,), torch.float32))
        receive_raw(addresses[0], _listed(state), streams)
    elif way.wire == HTTP:
        transport = _http_end(_LOOPBACK)
        # torch does not like the read-only bytes that torchft hands it, and nobody writes them here.
        warnings.simplefilter("ignore", UserWarning)
        began = time.perf_counter()
        state = transport.recv_checkpoint(0, addresses[0], turn, timedelta(seconds=_ANSWER_S))
    else:
        donors = [Donor(slot=slot, incarnation=1, address=address) for slot, address in enumerate(addresses)]
        client = PeerClient(token, channel_device=_CPU if way.wire == GROUP else None)
        began = time.perf_counter()
        fetched = client.fetch(
            donors,
            (INNER, OUTER),
            want=turn,
            timeout_s=_ANSWER_S,
            shared=(OUTER,),
            joiner=f"{_JOINER}.1",
            streams=streams,
            idle_s=_SILENCE_S,
            into=memory,
        )
        state = {section: dict(tensors) for section, tensors in fetched.snapshot.sections.items()}
        if way.wire == GROUP and fetched.by_channel != sum(fetched.donors.values()):
            raise PeerFailed("not everything came by process groups")
        shares = tuple(fetched.donors.get(donor, 0) for donor in donors)
    seconds = time.perf_counter() - began
    size = sum(tensor.nbytes for tensor in _listed(state))
    return TimedTransfer(seconds=seconds, bytes=size, hash=state_hash(state), shares=shares)


def _http_end(host: str) -> MeteredHTTPTransport:
    return MeteredHTTPTransport(timeout_s=_ANSWER_S, chunks=0, advertise_host=host, on_receive=lambda: None)


def _take(
    connection: Connection,
    namespace: str,
    token: str,
    numel: int,
    streams: int,
    way: Way,
    turn: int,
    offers: Sequence[Offer],
) -> None:
    with telling(connection, namespace, "the joiner"):
        connection.send(_fetch(way, token, numel, streams, turn, offers))


def _give(connection: Connection, place: Place, token: str, numel: int, streams: int) -> None:
    with telling(connection, place.namespace, "a donor"):
        giver = _Giver(place.host, token, numel, streams)
        connection.send(None)
        while True:
            connection.send(giver.obey(*connection.recv()))


@contextlib.contextmanager
def telling(connection: Connection, namespace: str, who: str) -> Iterator[None]:
    """What such processes do around their work: they go where they belong, and tell what goes wrong.

    Args:
        connection: to the process that has started this one.
        namespace: network namespace; empty: that of this process.
    """
    # Ctrl-C reaches every process of a terminal; who started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The other end is gone, or this one has said why it can go on no longer: in either case nobody listens.
    with contextlib.suppress(EOFError, OSError):
        try:
            # Before any thread is started, for only this one goes there, and what it starts.
            if namespace:
                enter(namespace)
            torch.set_num_threads(1)
            # The server that this was forked from has left objects to look through for garbage, which writes to all of
            # them and so copies their memory: not in the middle of whatever is being measured.
            gc.collect()
            gc.freeze()
            # Gloo talks over loopback; only what needs no namespace uses it.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            yield
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            connection.send(PeerFailed(f"{who}: {str(error) or type(error).__name__}"))
