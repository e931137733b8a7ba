"""Replicas in processes of their own that do nothing but the data part of outer syncs: what benchmarks of it measure.

No Lighthouse, no vote and no training: the quorum is always the same, and the parameters move by numbers that are
known beforehand, so that the mean of all pseudo-gradients is known exactly.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torchft.process_group import ProcessGroupGloo

from elastic_train.diloco.compress import make_codec
from elastic_train.diloco.flat import FlatFragment
from elastic_train.diloco.flight import Contribution, Flown, Pilot
from elastic_train.diloco.metadata import Row
from elastic_train.diloco.outer import OuterOptimizer
from elastic_train.diloco.quorum import Formed, QuorumCount, QuorumSeat
from elastic_train.diloco.reduce import Feedback, Reducer
from elastic_train.diloco.weights import shares
from elastic_train.diloco.wire import Wire
from scripts import children

METHODS = ("none", "bf16", "int8", "int4")
"""Every compression, the one that the others are compared with first."""

_HOST = "127.0.0.1"
_CPU = torch.device("cpu")
_CONNECT_S = 60.0
_OPERATION_S = 120.0
_ANSWER_S = 900.0
# Not a power of two, so that buckets begin and end within parameters.
_PARAMETER_NUMEL = 1_000_000
_MOVE = 1e-3
_OUTER = OuterOptimizer(lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.0)


class ReplicaFailed(RuntimeError):
    """A replica failed, or is gone: nothing more is to be had from any of them."""


@dataclass(frozen=True, kw_only=True)
class TimedSync:
    """One sync as one replica saw it."""

    seconds: float
    """From the parameters to the parameters: the exchange, the outer step, its hash and the new parameters."""
    bytes: int
    """Sent by this replica."""
    candidate: int
    """Hash of what it computed."""
    rss: int
    """Bytes that the process holds in memory afterwards."""
    peak_rss: int
    """The most that it ever held, in bytes."""


class Replicas:
    """All replicas of one measurement, in lockstep. Leaving the context ends their processes."""

    def __init__(self, world: int, numel: int, bucket_bytes: int) -> None:
        """
        Args:
            world: number of replicas.
            numel: parameters of each.
            bucket_bytes: pseudo-gradient that is exchanged at once, as ``diloco.bucket_mb`` decides.
        """
        self._store = dist.TCPStore(
            _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
        )
        address = f"{_HOST}:{self._store.port}/bench"
        # Fork alone would copy the threads' locks of this process; the server has none, and torch is loaded once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._ends: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                self._ends.append(ours)
                process = context.Process(
                    target=_serve, args=(theirs, address, rank, world, numel, bucket_bytes), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
            self._answers()
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def check(self, method: str) -> float:
        """Average the pseudo-gradients of the first interval, without committing that.

        Returns:
            The relative error of the mean: the norm of what it is off by, divided by the norm of the mean in float64.

        Raises:
            ReplicaFailed: see there.
        """
        errors: list[float] = self._ask("check", method)
        return max(errors)

    def sync(self, method: str) -> list[TimedSync]:
        """Train, then sync; what every replica measured, in rank order.

        Raises:
            ReplicaFailed: see there; or they did not all compute the same.
        """
        self._ask("train")
        syncs: list[TimedSync] = self._ask("sync", method)
        if len({sync.candidate for sync in syncs}) != 1:
            raise ReplicaFailed(f"{method}: the replicas computed different candidates")
        return syncs

    def end(self) -> None:
        """End all processes, whatever they do."""
        children.end(self.processes, self._ends)

    def _ask(self, *order: str) -> list[Any]:
        for rank, end in enumerate(self._ends):
            try:
                end.send(order)
            except OSError as error:
                raise ReplicaFailed(f"replica {rank} is gone") from error
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(_ANSWER_S):
                raise ReplicaFailed(f"replica {rank} did not answer in {_ANSWER_S:.0f} s")
            try:
                answer = end.recv()
            except (EOFError, OSError) as error:
                raise ReplicaFailed(f"replica {rank} is gone") from error
            if isinstance(answer, ReplicaFailed):
                raise answer
            answers.append(answer)
        return answers


def needed_bytes(numel: int, world: int, bucket_bytes: int) -> int:
    """Memory that all replicas of one measurement need together, roughly.

    Each has its parameters, anchor and momentum twice, two sets of errors that compression left, of its own numbers
    and (from three replicas) of its part of the sums; and the buckets on their way.
    """
    copies = 1 + 4 + 2 + (2 / world if world > 2 else 0)
    return world * (math.ceil(4 * numel * copies) + 20 * min(bucket_bytes, 4 * numel) + 300_000_000)


def moves_of(rank: int, numel: int) -> torch.Tensor:
    """What each of a replica's parameters loses in one interval, float32 ``[numel]``: noise that the rank decides."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul_(_MOVE)


def relative_error(mean: torch.Tensor, moves: Sequence[torch.Tensor], weights: Sequence[float]) -> float:
    """How far a mean is off the one of ``moves`` in float64.

    Args:
        mean: flat float32; the moves repeat along it.
        moves: float32 ``[n]`` of each member.
        weights: of each member, in the same order.
    """
    exact = torch.zeros(moves[0].numel(), dtype=torch.float64)
    for move, weight in zip(moves, weights, strict=True):
        exact.add_(move.double(), alpha=weight)
    off = norm = 0.0
    for start in range(0, mean.numel(), exact.numel()):
        piece = mean[start : start + exact.numel()]
        expected = exact[: piece.numel()]
        off += float((piece.double() - expected).square().sum())
        norm += float(expected.square().sum())
    return math.sqrt(off / norm)


class _Standing(QuorumSeat):
    """A quorum that needs nobody to find it."""

    def __init__(self, formed: Formed) -> None:
        self._formed = formed

    def take(self) -> Formed:
        return self._formed


class _Replica:
    """The other end: parameters, outer state and a pilot for each compression."""

    def __init__(self, address: str, rank: int, world: int, numel: int, bucket_bytes: int) -> None:
        group = ProcessGroupGloo(timeout=timedelta(seconds=_CONNECT_S))
        group.configure(address, str(rank), rank, world)
        sizes = [min(_PARAMETER_NUMEL, numel - start) for start in range(0, numel, _PARAMETER_NUMEL)]
        # From zero, the first pseudo-gradient is what they lose, to the last bit.
        self._parameters = nn.ParameterList(torch.zeros(size) for size in sizes)
        self._fragment = FlatFragment(self._parameters, device=_CPU, pin_memory=False)
        # All compressions share it, because it is large. Each adds what another left, which costs the same.
        self._feedback = Feedback()
        self._wire = Wire(group, _CPU, _OPERATION_S)
        tokens = [1000 * (place + 2) for place in range(world)]
        self._moves = moves_of(rank, sizes[0])
        self._all_moves = [moves_of(place, sizes[0]) for place in range(world)]
        self._weights = shares(tokens, [True] * world)
        formed = Formed(key=1, number=1, replica_ids=tuple(map(str, range(world))), rank=rank)
        self._mine = Contribution(
            fragment=0, row=_row(rank, tokens[rank]), trained=0, progress=torch.zeros(1, 4, dtype=torch.int64)
        )
        self._pilots = {
            method: Pilot(
                quorum=_Standing(formed),
                count=QuorumCount(),
                wire=self._wire,
                reducer=Reducer(self._wire, make_codec(method)),
                outer=_OUTER,
                fragments=[self._fragment],
                weighting="tokens",
                bucket_bytes=bucket_bytes,
                at_point=lambda point: None,
                guard=lambda rows: None,
                on_quorum=lambda number, rows: None,
            )
            for method in METHODS
        }

    def obey(self, order: str, *arguments: str) -> Any:
        match order, *arguments:
            case "train", *_:
                return self._train()
            case "check", method:
                return self._check(method)
            case "sync", method:
                return self._sync(method)
        raise ValueError(f"no such order: {order}")

    @torch.no_grad()
    def _train(self) -> None:
        for parameter in self._parameters:
            parameter.sub_(self._moves[: parameter.numel()])

    def _check(self, method: str) -> float:
        self._train()
        self._fly(method)
        self._feedback.abort()
        self._fragment.write_parameters()
        # The momentum of the first outer step is the mean itself.
        return relative_error(self._fragment.candidate.momentum, self._all_moves, self._weights)

    def _sync(self, method: str) -> TimedSync:
        self._wire.take_bytes()
        began = time.perf_counter()
        flown = self._fly(method)
        self._fragment.swap()
        self._fragment.write_parameters()
        self._feedback.commit()
        return TimedSync(
            seconds=time.perf_counter() - began,
            bytes=self._wire.take_bytes(),
            candidate=flown.candidate,
            rss=psutil.Process().memory_info().rss,
            peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def _fly(self, method: str) -> Flown:
        flown = self._pilots[method].fly(self._mine, None if method == "none" else self._feedback)
        if flown.error is not None:
            raise flown.error
        return flown


def _row(rank: int, tokens: int) -> Row:
    return Row(
        outer_step=0,
        tokens=tokens,
        weight_tokens=tokens,
        finite=True,
        state_hash=0,
        slot=rank,
        incarnation=1,
        step_us=0,
        config_digest=0,
        layout_digest=0,
        id_base=0,
        loss=math.nan,
        grad_norm=math.nan,
        inner_steps=1,
        retired=0,
    )


def _serve(connection: Connection, address: str, rank: int, world: int, numel: int, bucket_bytes: int) -> None:
    # Ctrl-C reaches every process of a terminal; who started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # The other end is gone, or this replica has said why it can go on no longer: in either case nobody listens.
    with contextlib.suppress(EOFError, OSError):
        try:
            replica = _Replica(address, rank, world, numel, bucket_bytes)
            connection.send(None)
            while True:
                connection.send(replica.obey(*connection.recv()))
        except Exception as error:
            connection.send(ReplicaFailed(f"replica {rank}: {error}"))
