"""What a trainer sees of the outer sync, whichever engine carries it out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

FaultHook = Callable[[str], None]
"""Called with the name of a point of the sync (quorum, reduce, vote, commit) when it is reached."""

COLD_START_STEP = 1
"""torchft's step counter at outer step 0. A joiner's starts at 0: it is always behind, and must heal."""


@dataclass(frozen=True, kw_only=True)
class SyncHooks:
    """What an engine asks of the trainer that it works for."""

    at_point: FaultHook
    progress: Callable[[], torch.Tensor]
    """int64 ``[virtual_shards, 4]``: what this replica read since its last commit (``PositionTable.delta``). Asked
    for after the quorum, which may have replaced this replica's state."""
    on_state: Callable[[], None]
    """A peer's state is in place, before any data is exchanged."""


class SyncFailed(RuntimeError):
    """More syncs failed in a row than ``diloco.max_retries`` allows; the replica must restart and heal."""


class NoPeerState(RuntimeError):
    """A joiner entered a quorum and got no state from it. It must not train: it would start from scratch."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How one attempt at an outer sync ended."""

    committed: bool
    outer_step: int
    """Committed syncs so far, this one included."""
    progress: torch.Tensor
    """int64 ``[virtual_shards, 4]``: what all read in this interval; meaningless if not committed."""
    wait_s: float
    """Seconds from the announcement to the quorum."""
    reduce_s: float
    """Seconds of this rank's own work on the attempt after the quorum, overlapped inner steps left out."""
    bytes: int
    """Bytes of the pseudo-gradient that this rank gave to the reduction."""
    cause: str | None = None
    """Why it failed; None if committed."""


class OuterSync(ABC):
    """The outer sync of one rank. All ranks of a replica call it in the same order at the same inner step."""

    @property
    @abstractmethod
    def outer_step(self) -> int:
        """Committed syncs that this replica's anchor contains."""

    @abstractmethod
    def enter(self) -> None:
        """Take part in the first quorum of a cold start: everybody has the same parameters.

        Raises:
            RuntimeError: no quorum came within ``diloco.quorum_timeout_s``.
        """

    @abstractmethod
    def join(self) -> Sync:
        """Enter a running quorum, take a peer's state, and take part in the sync that it was formed for.

        Raises:
            NoPeerState: the quorum had no member with a committed state, or its transfer failed.
        """

    @abstractmethod
    def prepare(self) -> None:
        """Called ``diloco.overlap_steps`` inner steps before the end of the interval, if that is not 0."""

    @abstractmethod
    def sync(self) -> Sync:
        """Carry out the outer sync at the end of an interval.

        A replica that turns out to be behind takes a peer's state first; what it trained in the interval is lost.

        Raises:
            SyncFailed: too many attempts failed in a row.
        """

    @abstractmethod
    def anchor(self) -> dict[str, torch.Tensor]:
        """The anchor's shards of this rank by parameter name. Views: copy what must outlive the next sync."""

    @abstractmethod
    def momentum(self) -> dict[str, torch.Tensor]:
        """The outer momentum by fragment and parameter name, sharded like the parameters; empty at first."""

    @abstractmethod
    def export_state(self) -> dict[str, object]:
        """Anchor and outer momentum of this rank, cloned on the host. No collective, no shared memory."""

    @abstractmethod
    def load_state(self, state: dict[str, object]) -> None:
        """Take over what a peer's ``export_state`` gave."""
