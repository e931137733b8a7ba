"""One attempt at an outer step on one rank: from the quorum to the candidate for the next anchor.

It exchanges data with peers only, never within the replica, so it can run beside the inner steps. Whatever goes
wrong is kept in the result; parameters, anchor and momentum are never touched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from elastic_train.device import side_stream
from elastic_train.diloco.engine import FaultHook, ForeignReplica
from elastic_train.diloco.flat import FlatFragment
from elastic_train.diloco.metadata import Row, Standing, judge
from elastic_train.diloco.outer import OuterOptimizer
from elastic_train.diloco.quorum import Formed, QuorumCount, QuorumSeat
from elastic_train.diloco.reduce import Feedback, Reducer
from elastic_train.diloco.weights import shares
from elastic_train.diloco.wire import Wire

logger = logging.getLogger(__name__)


class Guarded(RuntimeError):
    """A member of the last quorum lives on at the same outer step, and is not in this one: both would go on alone."""


class NonFiniteMean(RuntimeError):
    """Somebody's numbers stopped being numbers after the metadata. Who it was shows when the attempt is made again."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a replica brings to a sync. Captured once, the same in every attempt."""

    fragment: int
    row: Row
    """The replica's metadata, the same on all its ranks."""
    trained: int
    """Tokens that the replica had trained in this incarnation when it was captured."""
    progress: torch.Tensor
    """int64 ``[virtual_shards, 4]``: what the replica read since the last commit."""
    stored: torch.Tensor | None = None
    """The pseudo-gradient, float32 ``[numel]``, where the inner steps go on beside the sync. Else it is computed from
    the parameters, which stay what they are."""


@dataclass(kw_only=True)
class Flown:
    """How far an attempt came on this rank."""

    formed: Formed | None = None
    rows: list[Row] = field(default_factory=list)
    standings: list[Standing] = field(default_factory=list)
    progress: torch.Tensor | None = None
    """The sum over the members that count."""
    candidate: int = 0
    """Hash of this rank's part of the candidate."""
    complete: bool = False
    """All data is here; with it the candidate, if this replica counts."""
    error: Exception | None = None
    wait_s: float = 0.0
    there_at: float = 0.0
    """When the replica had nothing to wait for any more but this attempt (seconds of a monotonic clock)."""

    @property
    def standing(self) -> Standing:
        """This replica's own."""
        assert self.formed is not None
        return self.standings[self.formed.rank]

    @property
    def counted(self) -> list[Row]:
        """Of the members that count."""
        return [row for row, standing in zip(self.rows, self.standings, strict=True) if standing is Standing.OK]

    @property
    def newest(self) -> int:
        """The outer step that the members who count are at."""
        return max(row.outer_step for row in self.rows)


class Pilot:
    """Flies attempts with the buffers of one rank."""

    def __init__(
        self,
        *,
        quorum: QuorumSeat,
        count: QuorumCount,
        wire: Wire,
        reducer: Reducer,
        outer: OuterOptimizer,
        fragments: Sequence[FlatFragment],
        weighting: str,
        bucket_bytes: int,
        at_point: FaultHook,
        guard: Callable[[list[Row]], None],
        on_quorum: Callable[[int, Sequence[Row]], None],
    ) -> None:
        """
        Args:
            fragments: in the order in which they sync, one in each outer step.
            guard: raises :class:`Guarded` if the members (their rows) must not commit.
            on_quorum: told a quorum's number (for people) and its members' rows, before any data.
        """
        self._quorum = quorum
        self._count = count
        self._wire = wire
        self._reducer = reducer
        self._outer = outer
        self._fragments = fragments
        self._weighting = weighting
        self._bucket_numel = max(bucket_bytes // 4, 1)
        self._bucket = torch.empty(0)
        self._at_point = at_point
        self._guard = guard
        self._on_quorum = on_quorum

    def fly(self, mine: Contribution, feedback: Feedback | None) -> Flown:
        """Take the quorum that was announced, and go as far as the candidate."""
        flown = Flown()
        try:
            flown.formed = self._quorum.take()
            self._wire.set_members(flown.formed.rank, len(flown.formed.replica_ids))
            self._exchange_metadata(mine, flown)
            self._reduce(mine, feedback, flown)
            flown.complete = True
        except ForeignReplica:
            raise
        except Exception as error:
            logger.info("the attempt at outer step %d failed: %s", mine.row.outer_step + 1, error)
            flown.error = error
            # Peers that wait for this rank in the group learn it from their closed connection.
            self._wire.abort()
        return flown

    def _exchange_metadata(self, mine: Contribution, flown: Flown) -> None:
        assert flown.formed is not None
        self._count.see(flown.formed)
        row = replace(mine.row, id_base=self._count.base)
        flown.rows = [Row.from_ints(ints) for ints in self._wire.gather_rows(row.to_ints())]
        # By incarnation, for torchft's id of a replica stays the same when it is restarted.
        self._wire.names = tuple(f"{row.slot}.{row.incarnation}" for row in flown.rows)
        self._on_quorum(self._count.agree([row.id_base for row in flown.rows]), flown.rows)
        flown.standings = judge(flown.rows)
        foreign = [row.slot for row, s in zip(flown.rows, flown.standings, strict=True) if s is Standing.FOREIGN]
        if mine.row.slot in foreign:
            raise ForeignReplica(
                f"replica {mine.row.slot} has another config or other parameter shapes than most of its peers "
                f"({sorted({row.slot for row in flown.rows} - set(foreign))}): start all replicas from one config"
            )
        if foreign:
            raise RuntimeError(f"replicas {foreign} run another config or model and are kept out")
        self._guard(flown.rows)

    def _reduce(self, mine: Contribution, feedback: Feedback | None, flown: Flown) -> None:
        # Who is behind would bring another fragment; it passes on zeros for the one that the others sync.
        fragment = self._fragments[flown.newest % len(self._fragments)]
        counted = [standing is Standing.OK for standing in flown.standings]
        weights = shares([row.weight_tokens for row in flown.rows], counted, self._weighting)  # type: ignore[arg-type]
        counts = flown.standing is Standing.OK
        total = (mine.progress if counts else torch.zeros_like(mine.progress)).to(self._wire.device, copy=True)
        self._wire.all_reduce(total)
        flown.progress = total.cpu()
        committed, candidate = fragment.committed, fragment.candidate
        for number, start in enumerate(range(0, fragment.numel, self._bucket_numel)):
            stop = min(start + self._bucket_numel, fragment.numel)
            bucket = self._buffer(min(self._bucket_numel, fragment.numel))[: stop - start]
            if not counts:
                bucket.zero_()
            elif mine.stored is not None:
                bucket.copy_(mine.stored[start:stop])
            else:
                fragment.pseudo_gradient(bucket, start)
            self._reducer.reduce(bucket, weights, feedback=feedback, at=start)
            if number == 0:
                self._at_point("reduce")
            if counts:
                anchor = committed.anchor[start:stop]
                self._outer.step(
                    bucket.to(anchor.device),
                    anchor,
                    committed.momentum[start:stop],
                    anchor_out=candidate.anchor[start:stop],
                    momentum_out=candidate.momentum[start:stop],
                )
        if fragment.numel == 0:
            self._at_point("reduce")
        if counts:
            if not bool(torch.isfinite(candidate.anchor.sum() + candidate.momentum.sum())):
                # What was finite in the metadata is not so in the data, of this replica or of a peer.
                raise NonFiniteMean("the average of the pseudo-gradients is not finite")
            flown.candidate = candidate.hash()

    def _buffer(self, numel: int) -> torch.Tensor:
        if self._bucket.numel() < numel:
            self._bucket = torch.empty(numel, dtype=torch.float32, device=self._wire.device)
        return self._bucket


class Flight:
    """An attempt beside the inner steps: waits for the quorum, then flies, in a thread of its own."""

    _LOOK_S = 0.05

    def __init__(self, quorum: QuorumSeat, wire: Wire, fly: Callable[[], Flown]) -> None:
        self._quorum = quorum
        self._wire = wire
        self._fly = fly
        self._recalled = threading.Event()
        self._flown: Flown | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.began = False
        """Whether the quorum was there and was taken."""
        self._thread = threading.Thread(target=self._run, name="outer_sync", daemon=True)
        self._thread.start()

    def recall(self) -> bool:
        """Stop waiting for the quorum, which stays announced. False if the attempt has begun: land it."""
        with self._lock:
            if self.began:
                return False
            self._recalled.set()
        self._thread.join()
        return True

    def land(self, alive: Callable[[], None]) -> Flown:
        """Wait for the end of the attempt, which has begun; ``alive`` is called as long as it gets somewhere."""
        seen = -1
        while self._thread.is_alive():
            self._thread.join(self._LOOK_S)
            if self._wire.operations != seen:
                seen = self._wire.operations
                alive()
        if self._error is not None:
            raise self._error
        assert self._flown is not None
        return self._flown

    def _run(self) -> None:
        try:
            while not self._quorum.wait(self._LOOK_S):
                if self._recalled.is_set():
                    return
            with self._lock:
                if self._recalled.is_set():
                    return
                self.began = True
            with side_stream(self._wire.device):
                self._flown = self._fly()
        except BaseException as error:
            self._error = error
