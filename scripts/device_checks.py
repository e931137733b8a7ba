"""Checks of what replicas do with an accelerator's tensors. On the CPU they compare it with itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from elastic_train.device import side_stream
from elastic_train.diloco.compress import BLOCK, make_codec
from elastic_train.diloco.flat import FlatFragment, flatten
from elastic_train.diloco.outer import OuterOptimizer
from elastic_train.diloco.publication import INNER, OUTER, Publication, whole_hash
from elastic_train.diloco.reduce import Feedback, Reducer
from elastic_train.diloco.trainee import Trainee
from elastic_train.diloco.wire import Wire
from elastic_train.peer_ckpt.channel import Channels, library_of
from elastic_train.peer_ckpt.client import Donor, PeerClient
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import load_tensors
from elastic_train.peer_ckpt.snapshot import Snapshot

METHODS = ("none", "bf16", "int8", "int4")

_HOST = "127.0.0.1"
_CPU = torch.device("cpu")
_TOKEN = "check-device"
_TIMEOUT_S = 60.0
_RELATIVE_ERROR = {"none": 1e-4, "bf16": 1e-2, "int8": 3e-2, "int4": 0.3}
_SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 200_003)
_BUCKET = 40_000
_SHAPES = ((300, 301), (70_001,), (5, 7, 11))
_WEIGHTS = (0.25, 0.75)
_OUTER = OuterOptimizer(lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.0)


class CheckFailed(AssertionError):
    """Something did not come out as it must."""


def check_codecs(device: torch.device) -> dict[str, Any]:
    """Every codec decodes to the same bits on ``device`` and on the CPU, and encodes as well there as here.

    Raises:
        CheckFailed: one does not.
    """
    generator = torch.Generator().manual_seed(1)
    alike = dict.fromkeys(METHODS[1:], True)
    for method in alike:
        codec = make_codec(method)
        assert codec is not None
        for numel in _SIZES:
            for name, values in _hard_numbers(numel, generator).items():
                what = f"{method}, {numel} {name} numbers"
                encoded = torch.zeros(codec.encoded_size(numel), dtype=torch.uint8)
                there = torch.zeros_like(encoded, device=device)
                codec.encode(values, encoded)
                codec.encode(values.to(device), there)
                alike[method] &= torch.equal(there.cpu(), encoded)
                decoded, again = torch.full((numel,), -1.0), torch.full((numel,), -1.0)
                codec.decode(encoded, decoded)
                decoded_there = torch.full((numel,), -2.0, device=device)
                codec.decode(encoded.to(device), decoded_there)
                _same(decoded_there, decoded, f"{what}, decoded")
                codec.decode(there.cpu(), again)
                _close(again, decoded, _coarseness(method, values), f"{what}, encoded")
    return {"encoded_alike": alike}


def check_reduce_gloo(device: torch.device) -> dict[str, Any]:
    """The data part of two syncs of two ranks, with parameters on ``device`` and buckets on the host.

    Raises:
        CheckFailed: the ranks get different anchors, or not the weighted mean, or others than with parameters on the
            CPU.
    """
    errors = {}
    for method in METHODS:
        with _gloo_wires(2) as wires:
            anchors = _synced(wires, method, device)
        with _gloo_wires(2) as wires:
            on_cpu = _synced(wires, method, _CPU)
        _same(anchors[0], anchors[1], f"{method}: the anchors of both ranks")
        _same(anchors[0], on_cpu[0], f"{method}: the anchor with parameters on the CPU")
        start, exact = _flat(_model(_CPU)), _expected_anchor()
        error = float((anchors[0].double() - exact).norm() / (exact - start).norm())
        if not error < _RELATIVE_ERROR[method]:
            raise CheckFailed(f"{method}: the anchor is off by {error:.2g} of what it moved")
        errors[method] = float(f"{error:.2g}")
    return {"relative_errors": errors}


def check_reduce_nccl(device: torch.device) -> dict[str, Any]:
    """Every operation of a wire, in a group of one rank whose tensors live on ``device`` (gloo's, if that is the CPU).

    Raises:
        CheckFailed: what comes back is not what was sent.
    """
    nccl = device.type != "cpu"
    group = ProcessGroupNCCL(timeout=_bound()) if nccl else ProcessGroupGloo(timeout=_bound())
    with _stored(1, lambda rank: group, device) as [wire]:
        numbers = torch.arange(1000.0, device=device)
        total = numbers.clone()
        wire.all_reduce(total)
        _same(total, numbers, "all-reduce")
        _same(wire.all_gather(numbers)[0], numbers, "all-gather")
        _same(wire.all_to_all(numbers), numbers, "all-to-all")
        if wire.gather_rows([3, -(2**62), 5]) != [[3, -(2**62), 5]]:
            raise CheckFailed("gather_rows gave other numbers")
        bucket = numbers.clone()
        Reducer(wire, make_codec("int8")).reduce(bucket, [1.0], feedback=Feedback())
        _same(bucket, numbers, "reduce of a rank that is alone")
        # Beside the default stream, as a flight under overlap does it.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_reduce_beside, wire, total).result(_TIMEOUT_S)
        _same(total, numbers, "all-reduce in a side stream")
    return {"group": type(group).__name__}


def check_publication(device: torch.device) -> dict[str, Any]:
    """What is shown while the main stream is busy, with anchors on the host and on ``device``.

    Raises:
        CheckFailed: it shows what was not there yet, or what came after, or its memory is not page-locked.
    """
    for outer_device in dict.fromkeys((_CPU, device)):
        rank = _Rank(device)
        fragments = flatten([rank.model], device=outer_device, pin_memory=device.type == "cuda")
        with _served() as server:
            publication = Publication(server, fragments, cast(Trainee, rank))
            for turn in range(1, 4):
                rank.keep_busy()
                rank.compute(turn)
                fragments[0].committed.momentum.fill_(float(turn))
                publication.publish({"outer_step": turn, "rank_hash": turn, "state_hash": turn, "history": {}})
                # The backward pass of the next inner step; only the optimizer must wait.
                rank.keep_busy()
                publication.finish()
                rank.compute(-turn)
                publication.settle()
                # The one before is still there, in memory of its own.
                for shown in server.shown[-2:]:
                    _check_moments(shown)
                _check_outer(server.shown[-1])
                if device.type == "cuda":
                    _check_pinned(server.shown[-1])
    return {"anchors_on": ["cpu"] if device.type == "cpu" else ["cpu", device.type]}


def check_transfer(device: torch.device, size: int) -> dict[str, Any]:
    """A snapshot of ``size`` bytes of tensors on ``device``: shown, fetched over loopback, taken over on ``device``.

    Raises:
        CheckFailed: the joiner has another state than the donor.
    """
    numel = max(size // 16, 1)
    donor, joiner = _Rank(device, numel), _Rank(device, numel)
    pin = device.type == "cuda"
    [given] = flatten([donor.model], device=_CPU, pin_memory=pin)
    [taken] = flatten([joiner.model], device=_CPU, pin_memory=pin)
    donor.randomize()
    given.committed.momentum.uniform_()
    given.read_parameters(given.committed.anchor)
    rank_hash = given.committed.hash()
    with _served() as server:
        publication = Publication(server, [given], cast(Trainee, donor))
        header = {"outer_step": 1, "rank_hash": rank_hash, "state_hash": rank_hash, "history": {}}
        began = time.perf_counter()
        publication.publish(header)
        publication.settle()
        shown_s = time.perf_counter() - began
        began = time.perf_counter()
        fetched = PeerClient(_TOKEN).fetch(
            [Donor(slot=0, incarnation=1, address=server.address)],
            (INNER, OUTER),
            want=1,
            timeout_s=_TIMEOUT_S,
            shared=(OUTER,),
            joiner="1.1",
        )
        fetched_s = time.perf_counter() - began
    began = time.perf_counter()
    sections = fetched.snapshot.sections
    load_tensors(joiner.moments().items(), sections[INNER])
    taken.load(sections[OUTER]["0.anchor"], sections[OUTER]["0.momentum"], carry=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    loaded_s = time.perf_counter() - began
    joined_hash = whole_hash(taken.committed.hash(), joiner.moments())
    if not fetched.snapshot.header["whole_hash"] == joined_hash == whole_hash(rank_hash, donor.moments()):
        raise CheckFailed("the joiner's state has another hash than the donor's")
    _same(joiner.model.weight, donor.model.weight, "parameters")
    moved = sum(tensor.nbytes for section in sections.values() for tensor in section.values())
    return {
        "bytes": moved,
        "shown_s": round(shown_s, 3),
        "fetched_gb_s": round(moved / 1e9 / fetched_s, 3),
        "loaded_s": round(loaded_s, 3),
    }


def check_channel(device: torch.device, size: int) -> dict[str, Any]:
    """A state of ``size`` bytes of ``device``, fetched over channels and put on the accelerator of the joiner.

    The channels are NCCL's (or RCCL's) if there is an accelerator for each side. Two members of its groups cannot share
    one: then they are gloo's, with the host between the two sides.

    Raises:
        CheckFailed: something did not come over a channel, or the joiner has other numbers than the donor.
    """
    others = torch.cuda.device_count() if device.type == "cuda" else 1
    joins_at = device if others == 1 else torch.device(device.type, others - 1)
    given = torch.rand(max(size // 4, 1), device=device)
    at_donor, at_joiner = (device, joins_at) if device != joins_at else (_CPU, _CPU)
    server = PeerServer(_HOST, _TOKEN, lambda attempt, dead: {}, channels=Channels(_HOST, at_donor))
    with contextlib.closing(server):
        server.publish(Snapshot({"outer_step": 1}, {OUTER: {"given": given.cpu()}}))
        began = time.perf_counter()
        fetched = PeerClient(_TOKEN, channel_device=at_joiner).fetch(
            [Donor(slot=0, incarnation=1, address=server.address)], (OUTER,), want=1, timeout_s=_TIMEOUT_S
        )
        fetched_s = time.perf_counter() - began
    if fetched.by_channel != given.nbytes:
        raise CheckFailed(f"{fetched.by_channel} of {given.nbytes} bytes came over channels")
    _same(fetched.snapshot.sections[OUTER]["given"].to(joins_at), given, "what came over channels")
    return {
        "library": library_of(at_joiner),
        "accelerators": others,
        "fetched_gb_s": round(given.nbytes / 1e9 / fetched_s, 3),
    }


class _Rank:
    """A trainer's tensors on a device, and work that keeps its stream busy."""

    def __init__(self, device: torch.device, numel: int = 1 << 20) -> None:
        self.model = nn.Linear(numel, 1, bias=False, device=device)
        self._moments = {name: torch.zeros(numel, device=device) for name in ("0.0.exp_avg", "0.0.exp_avg_sq")}
        self._moments["0.0.step"] = torch.zeros((), device=device)
        self._side = 2048 if device.type == "cuda" else 64
        self._factor = torch.full((self._side, self._side), 1 / self._side, device=device)

    def at_point(self, point: str) -> None:
        pass

    def moments(self) -> Mapping[str, torch.Tensor]:
        return self._moments

    def counters(self) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def keep_busy(self) -> None:
        """Give the stream work that takes some time; nothing waits for it here."""
        for _ in range(20):
            self._factor.copy_(self._factor @ self._factor)

    @torch.no_grad()
    def compute(self, turn: float) -> None:
        """Set every moment to ``turn``, after all that the stream has to do."""
        for tensor in self._moments.values():
            # The busy work leaves its numbers as they are, 1 over their side: a factor of 1 that has to be waited for.
            tensor.fill_(turn).mul_((self._factor.mean() * self._side).round())

    @torch.no_grad()
    def randomize(self) -> None:
        self.model.weight.uniform_()
        for tensor in self._moments.values():
            tensor.uniform_()


class _Keeping(PeerServer):
    """Keeps what was published."""

    def __init__(self) -> None:
        super().__init__(_HOST, _TOKEN, lambda attempt, dead: {})
        self.shown: list[Snapshot] = []

    def publish(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)
        super().publish(snapshot)


@contextlib.contextmanager
def _served() -> Iterator[_Keeping]:
    server = _Keeping()
    try:
        yield server
    finally:
        server.close()


def _check_moments(snapshot: Snapshot) -> None:
    turn = snapshot.header["outer_step"]
    for name, tensor in snapshot.sections[INNER].items():
        if not bool((tensor == turn).all()):
            raise CheckFailed(f"{name} shows {float(tensor.reshape(-1)[0])}, and was {turn} when it was shown")


def _check_outer(snapshot: Snapshot) -> None:
    turn, momentum = snapshot.header["outer_step"], snapshot.sections[OUTER]["0.momentum"]
    if not bool((momentum == turn).all()):
        raise CheckFailed(f"the momentum shows {float(momentum[0])}, and was {turn} when it was shown")


def _check_pinned(snapshot: Snapshot) -> None:
    for section, tensors in snapshot.sections.items():
        for name, tensor in tensors.items():
            if not tensor.is_pinned():
                raise CheckFailed(f"{section}/{name} is not in page-locked memory")


def _hard_numbers(numel: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Flat float32 ``[numel]`` of several kinds, by name."""
    normal = torch.randn(numel, generator=generator)
    # Halves between two whole numbers of int8 and int4, which have to be rounded to even.
    halves = torch.arange(numel, dtype=torch.float32).remainder_(253).sub_(126).mul_(0.5)
    halves[:: BLOCK // 2] = 127.0
    return {
        "normal": normal,
        "large": normal * 1e30,
        "tiny": normal * 1e-38,
        "half": halves,
        "zero": torch.zeros(numel),
    }


def _coarseness(method: str, values: torch.Tensor) -> torch.Tensor:
    """By how much two good encodings of each number may differ, float32 ``[numel]``: one whole number of its block."""
    if method == "bf16":
        return torch.zeros_like(values)
    numel, blocks = values.numel(), -(-values.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[:numel] = values
    scales = padded.view(blocks, BLOCK).abs().amax(dim=1) / (127 if method == "int8" else 7)
    return (1.01 * scales).repeat_interleave(BLOCK)[:numel]


def _close(values: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor, what: str) -> None:
    """Raises CheckFailed if a number differs by more than its tolerance, or is not one."""
    off = (values - expected).abs()
    if not bool((off <= tolerance).all()):
        raise CheckFailed(f"{what}: off by up to {float((off - tolerance).max()):.2g} more than the rounding explains")


def _same(tensor: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raises CheckFailed if a bit differs."""
    got, wanted = (one.detach().cpu().reshape(-1).view(torch.uint8) for one in (tensor, expected))
    if not torch.equal(got, wanted):
        raise CheckFailed(f"{what}: {int((got != wanted).sum())} of {got.numel()} bytes differ")


def _model(device: torch.device) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    return nn.ParameterList(value.to(device) for value in values)


def _moves(rank: int) -> list[torch.Tensor]:
    """What each parameter of a rank loses in one interval."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [1e-2 * torch.randn(shape, generator=generator) for shape in _SHAPES]


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All numbers in a row, float64."""
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def _expected_anchor() -> torch.Tensor:
    """Flat float64: the anchor after two syncs of two ranks, computed without them."""
    anchor = _flat(_model(_CPU))
    flat = [_flat(_moves(rank)) for rank in range(len(_WEIGHTS))]
    mean = sum((weight * move for weight, move in zip(_WEIGHTS, flat, strict=True)), torch.zeros_like(anchor))
    momentum = torch.zeros_like(anchor)
    for _ in range(2):
        momentum = _OUTER.momentum * momentum + mean
        anchor = anchor - _OUTER.lr * (mean + _OUTER.momentum * momentum)
    return anchor


def _synced(wires: Sequence[Wire], method: str, device: torch.device) -> list[torch.Tensor]:
    """The anchor of every rank after two syncs, with parameters on ``device``."""

    def sync(rank: int) -> torch.Tensor:
        parameters = _model(device)
        fragment = FlatFragment(parameters, device=_CPU, pin_memory=device.type == "cuda")
        reducer, feedback = Reducer(wires[rank], make_codec(method)), Feedback()
        for _ in range(2):
            with torch.no_grad():
                for parameter, move in zip(parameters, _moves(rank), strict=True):
                    parameter.sub_(move.to(device))
            for start in range(0, fragment.numel, _BUCKET):
                stop = min(start + _BUCKET, fragment.numel)
                bucket = torch.empty(stop - start)
                fragment.pseudo_gradient(bucket, start)
                reducer.reduce(bucket, _WEIGHTS, feedback=None if method == "none" else feedback, at=start)
                _OUTER.step(
                    bucket,
                    fragment.committed.anchor[start:stop],
                    fragment.committed.momentum[start:stop],
                    anchor_out=fragment.candidate.anchor[start:stop],
                    momentum_out=fragment.candidate.momentum[start:stop],
                )
            fragment.swap()
            fragment.write_parameters()
            feedback.commit()
        written = torch.empty(fragment.numel)
        fragment.read_parameters(written)
        _same(written, fragment.committed.anchor, "parameters that were set to the anchor")
        return fragment.committed.anchor

    with ThreadPoolExecutor(len(wires)) as pool:
        return [done.result() for done in [pool.submit(sync, rank) for rank in range(len(wires))]]


def _reduce_beside(wire: Wire, tensor: torch.Tensor) -> None:
    with side_stream(wire.device):
        wire.all_reduce(tensor)


def _gloo_wires(world: int) -> contextlib.AbstractContextManager[list[Wire]]:
    return _stored(world, lambda rank: ProcessGroupGloo(timeout=_bound()), _CPU)


@contextlib.contextmanager
def _stored(world: int, make: Callable[[int], ProcessGroup], device: torch.device) -> Iterator[list[Wire]]:
    """``world`` connected wires in this process, until the end of the context."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_bound())
    groups = [make(rank) for rank in range(world)]
    wires = [Wire(group, device, _TIMEOUT_S) for group in groups]

    def connect(rank: int) -> None:
        groups[rank].configure(f"{_HOST}:{store.port}/check", str(rank), rank, world)
        wires[rank].set_members(rank, world)

    try:
        with ThreadPoolExecutor(world) as pool:
            for done in [pool.submit(connect, rank) for rank in range(world)]:
                done.result()
        yield wires
    finally:
        for wire in wires:
            wire.abort()


def _bound() -> timedelta:
    return timedelta(seconds=_TIMEOUT_S)
