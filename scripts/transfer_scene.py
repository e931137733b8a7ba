"""Donors, joiners and strangers in processes of their own, and the trouble that a plan has for them."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlsplit

import torch

from elastic_train.peer_ckpt.client import Donor, PeerClient, TransferFailed
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import hash_tensors
from elastic_train.peer_ckpt.snapshot import Snapshot
from scripts.meddler import Act, Meddler
from scripts.transfer_peers import PeerFailed, answer_of, peer_context, telling
from scripts.transfer_plan import INNER, MIB, OUTER, OUTER_STEP, Ending, Held, Plan, judge

_HOST = "127.0.0.1"
_SECTIONS = (INNER, OUTER)
_TENSORS = 48
"""Of each section."""
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)
_TIMEOUT_S = 60.0
_IDLE_S = 6.0
"""Above what a sound donor may be silent for on a crowded machine."""
_TAKEN_S = 5.0
_BOUND_S = 90.0
"""For each thing that is waited for; far above what it takes if all goes well."""
_LOOK_S = 0.05
_LEAVE_S = 10.0
_CROWD = 200
"""Connections of strangers before the transfers, and again in their middle."""
_LINGERING = 100
_IMPATIENCE_S = 1.0

Sections = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Account:
    """What came of a plan."""

    endings: Mapping[int, Ending]
    """By joiner."""
    wall_s: float
    reasons: tuple[str, ...]
    """Why it failed; empty if it passed."""


class Scene:
    """One trial in real processes. It is used once, by :meth:`run`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._context = peer_context(__name__)
        self._token = secrets.token_hex(16)
        self._donors: list[tuple[BaseProcess, Connection]] = []
        self._joiners: list[tuple[BaseProcess, Connection]] = []
        self._crowd: tuple[BaseProcess, Connection] | None = None
        self._held: list[Held] = []
        self._endings: dict[int, Ending] = {}

    def run(self) -> Account:
        """From the first process to the last one's end."""
        began = time.monotonic()
        reasons: list[str] = []
        try:
            self._play(reasons)
        except PeerFailed as error:
            reasons.append(str(error))
        finally:
            reasons += self._end_all()
        return Account(
            endings=self._endings,
            wall_s=time.monotonic() - began,
            reasons=(*reasons, *judge(self._plan, self._held, self._endings)),
        )

    def _play(self, reasons: list[str]) -> None:
        plan = self._plan
        self._donors = [self._start(_give, self._token, plan, slot) for slot in range(plan.donors)]
        self._held = [self._answer(slot) for slot in range(plan.donors)]
        if plan.trouble == "strangers":
            self._crowd = self._start(_crowd, [held.address for held in self._held])
            self._gather_crowd()
        with contextlib.closing(self._meddler()) as meddler:
            donors = [
                Donor(slot=slot, incarnation=0, address=address) for slot, address in enumerate(meddler.addresses)
            ]
            self._joiners = [
                self._start(_join, self._token, number, [donors[slot] for slot in order], donors)
                for number, order in enumerate(plan.orders)
            ]
            if self._await_moment(meddler):
                self._strike()
            else:
                reasons.append("the transfers ended before the trouble could strike")
            meddler.release()
            for number, (process, end) in enumerate(self._joiners):
                self._endings[number] = answer_of(end, f"joiner {number}", _BOUND_S)
                process.join(_LEAVE_S)

    def _meddler(self) -> Meddler:
        plan = self._plan
        addresses = [held.address for held in self._held]
        if plan.trouble == "mislead":
            return Meddler(addresses, Act.MISLEAD, plan.manifest_byte)
        act = Act.FLIP if plan.trouble == "flip" else Act.STALL
        return Meddler(addresses, act, int(plan.fraction * plan.mib * MIB * len(plan.orders)))

    def _await_moment(self, meddler: Meddler) -> bool:
        """Whether the meddler has acted, before all joiners had ended."""
        deadline = time.monotonic() + _BOUND_S
        while not meddler.acted.wait(_LOOK_S):
            if all(end.poll() for _, end in self._joiners) or time.monotonic() > deadline:
                return meddler.acted.is_set()
        return True

    def _strike(self) -> None:
        """All that was going to arrive has arrived, and no donor can say any more until this is over."""
        match self._plan.trouble:
            case "kill" | "primary" | "most":
                for slot in self._plan.struck:
                    self._donors[slot][0].kill()
                for slot in self._plan.struck:
                    self._donors[slot][0].join(_LEAVE_S)
            case "stop":
                for slot in self._plan.struck:
                    os.kill(self._donors[slot][0].pid or 0, signal.SIGSTOP)
            case "retire":
                self._order(self._plan.struck, "retire", self._plan.section)
            case "publish":
                self._order(range(self._plan.donors), "publish", 1)
            case "overtake":
                self._order(self._plan.struck, "publish", 2)
            case "strangers":
                self._gather_crowd()

    def _gather_crowd(self) -> None:
        if self._crowd is not None:
            self._crowd[1].send(_CROWD)
            answer_of(self._crowd[1], "the crowd", _BOUND_S)

    def _order(self, slots: Collection[int], *order: Any) -> None:
        for slot in slots:
            try:
                self._donors[slot][1].send(order)
            except OSError as error:
                raise PeerFailed(f"donor {slot} is gone") from error
        for slot in slots:
            self._answer(slot)

    def _answer(self, slot: int) -> Any:
        return answer_of(self._donors[slot][1], f"donor {slot}", _BOUND_S)

    def _start(self, target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _end_all(self) -> list[str]:
        """What should have ended by itself, or could not be ended."""
        left = [
            f"joiner {number} was still there after its transfer"
            for number, (process, _) in enumerate(self._joiners)
            if number in self._endings and process.is_alive()
        ]
        started = [*self._donors, *self._joiners, *([] if self._crowd is None else [self._crowd])]
        for process, _ in started:
            process.kill()
        for process, end in started:
            process.join(_LEAVE_S)
            end.close()
        return left + [f"process {process.pid} could not be ended" for process, _ in started if process.is_alive()]


def make_section(section: str, size: int, seed: int, content: object) -> dict[str, torch.Tensor]:
    """Tensors of about ``size`` bytes, of unequal sizes and types, some of them empty.

    Args:
        seed: decides their shapes.
        content: decides what is in them.
    """
    chance = random.Random(f"{section} {seed}")
    shares = [chance.random() ** 3 for _ in range(_TENSORS)]
    generator = torch.Generator().manual_seed(random.Random(f"{section} {content}").getrandbits(60))
    tensors: dict[str, torch.Tensor] = {}
    for index, share in enumerate(shares):
        dtype = chance.choice(_DTYPES)
        numel = int(size * share / sum(shares)) // dtype.itemsize if index else 0
        raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensors[f"layers.{index}.{section}"] = raw.view(dtype)
    return tensors


class _Giver:
    """A donor: all donors have the same outer section, and each an inner one and a header of its own."""

    def __init__(self, token: str, plan: Plan, slot: int) -> None:
        size = plan.mib * MIB // len(_SECTIONS)
        state = {
            INNER: make_section(INNER, size, plan.seed, slot),
            OUTER: make_section(OUTER, size, plan.seed, "everybody's"),
        }
        self._snapshot = Snapshot(self._header(OUTER_STEP, slot), state)
        # Made before, so that the others are held up no longer than it takes to publish them.
        count = {"publish": 1, "overtake": 2}.get(plan.trouble, 0)
        self._later = [
            Snapshot(self._header(OUTER_STEP + number, slot), _filled(state, number)) for number in range(1, count + 1)
        ]
        self._server = PeerServer(_HOST, token, lambda attempt, dead: {})
        self._server.publish(self._snapshot)

    @property
    def held(self) -> Held:
        hashes = {section: hash_tensors(tensors) for section, tensors in self._snapshot.sections.items()}
        return Held(address=self._server.address, header=dict(self._snapshot.header), hashes=hashes)

    def obey(self, order: str, argument: Any) -> None:
        match order:
            case "retire":
                self._snapshot.retire(argument)
                for tensor in self._snapshot.sections[argument].values():
                    tensor.fill_(1)
            case "publish":
                for snapshot in self._later[:argument]:
                    self._server.publish(snapshot)

    def _header(self, outer_step: int, slot: int) -> dict[str, Any]:
        history = {str(step): f"{step * 0x9E3779B97F4A7C15:016x}" for step in range(outer_step)}
        return {"outer_step": outer_step, "slot": slot, "steps": 20 * outer_step + slot, "history": history}


def _filled(state: Sections, value: int) -> Sections:
    return {
        section: {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}
        for section, tensors in state.items()
    }


def _give(connection: Connection, token: str, plan: Plan, slot: int) -> None:
    with telling(connection, "", f"donor {slot}"):
        giver = _Giver(token, plan, slot)
        connection.send(giver.held)
        while True:
            giver.obey(*connection.recv())
            connection.send(None)


def _join(connection: Connection, token: str, number: int, first: Sequence[Donor], donors: Sequence[Donor]) -> None:
    with telling(connection, "", f"joiner {number}"):
        connection.send(_fetch(token, f"{100 + number}.0", first, donors))


def _fetch(token: str, joiner: str, first: Sequence[Donor], donors: Sequence[Donor]) -> Ending:
    lost: set[int] = set()

    def replace(gone: Collection[Donor]) -> Sequence[Donor]:
        lost.update(donor.slot for donor in gone)
        return donors

    client = PeerClient(token)
    try:
        fetched = client.fetch(
            first,
            _SECTIONS,
            want=OUTER_STEP,
            timeout_s=_TIMEOUT_S,
            shared=(OUTER,),
            joiner=joiner,
            idle_s=_IDLE_S,
            replace=replace,
        )
    except Exception as error:
        text = str(error) or type(error).__name__
        return Ending(
            error=text, failed=isinstance(error, TransferFailed), lost=tuple(sorted(lost)), threads=_threads()
        )
    sections = fetched.snapshot.sections
    return Ending(
        primary=fetched.primary.slot,
        header=dict(fetched.snapshot.header),
        hashes={section: hash_tensors(tensors) for section, tensors in sections.items()},
        told=client.taken(fetched.primary, OUTER_STEP, joiner, _TAKEN_S),
        lost=tuple(sorted(lost)),
        refetched=fetched.refetched,
        threads=_threads(),
    )


def _threads() -> tuple[str, ...]:
    return tuple(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())


def _crowd(connection: Connection, addresses: Sequence[str]) -> None:
    with telling(connection, "", "the crowd"):
        ways = _rude_ways(addresses)
        while True:
            for _ in range(connection.recv()):
                next(ways)
            connection.send(None)
            # Until more are wanted, no fewer come.
            while not connection.poll():
                next(ways)


def _rude_ways(addresses: Sequence[str]) -> Iterator[None]:
    """Each time, one more stranger does something at one of the addresses; the last ones stay."""
    lingering: deque[socket.socket] = deque()
    greetings = (
        b"",
        b"GET /manifest?outer_step=7&sections=inner HTTP/1.1\r\nAuthorization: Bearer another\r\n\r\n",
        b"GET /part?outer_step=7&section=inner",
        b"\x16\x03\x01" + bytes(range(256)) * 8,
        b"POST /taken HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
    )
    chance = random.Random(0)
    while True:
        parts = urlsplit(chance.choice(addresses))
        with contextlib.suppress(OSError):
            connection = socket.create_connection((parts.hostname, parts.port), _IMPATIENCE_S)
            lingering.append(connection)
            connection.sendall(chance.choice(greetings))
        if len(lingering) > _LINGERING:
            lingering.popleft().close()
        yield
