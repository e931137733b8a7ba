"""What a trainer sees of the outer sync, whichever engine carries it out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

FaultHook = Callable[[str], None]
"""Called with the name of a point of the sync (quorum, reduce, vote, commit) when it is reached."""

COLD_START_STEP = 1
"""torchft's step counter at outer step 0. Under stock DiLoCo a joiner's starts at 0: it is always behind, and must
heal."""


class SyncFailed(RuntimeError):
    """More syncs failed in a row than ``diloco.max_retries`` allows; the replica must restart and heal."""


class NoPeerState(RuntimeError):
    """A joiner got no state from any peer. It must not train: it would start from scratch."""


class Diverged(RuntimeError):
    """This replica's outer state is not what the replicas agreed on, and could not be healed in place."""


class NonFinite(RuntimeError):
    """This replica's parameters are not finite, and it could not be healed in place."""


class ForeignReplica(RuntimeError):
    """This replica's config, or the shapes of its parameters, differ from those of the majority."""


class SyncKind(Enum):
    """How a sync ended for this replica."""

    COMMITTED = "committed"
    CAUGHT_UP = "caught up"
    """A peer was ahead: its state is in place, with what this replica had trained carried over."""
    HEALED = "healed"
    """This replica's own state was unfit: a peer's is in place, and what it had trained is gone."""
    FAILED = "failed"
    """Stock DiLoCo only: the interval is lost."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One inner step."""

    tokens: int
    """Trained by the whole replica."""
    seconds: float
    loss: torch.Tensor | None = None
    """Mean over the tokens of this rank, where it is known; may still be under way on an accelerator."""
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How an outer sync ended."""

    kind: SyncKind
    outer_step: int
    """Committed syncs so far, this one included."""
    participants: tuple[int, ...] = ()
    """Slots whose parameters are in the new anchor, or that have taken it, in rising order."""
    progress: torch.Tensor | None = None
    """int64 ``[virtual_shards, 4]``: what all read since the last commit; only if committed."""
    retired: tuple[int, ...] = ()
    """Slots that are given up for good from here on, and whose data the others read; only if committed."""
    tokens: int = 0
    """Tokens of this replica that the sync settled: in the average if committed, already in the peer's state if
    caught up."""
    carried: int = 0
    """Tokens of this replica that wait for a later sync, on top of the state that it now has; only if caught up."""
    wait_s: float = 0.0
    """Seconds from the end of the interval to the quorum; 0 if it was announced in mid-interval."""
    reduce_s: float = 0.0
    """Seconds of this rank's own work on the last attempt after the quorum, overlapped inner steps left out."""
    bytes: int = 0
    """Bytes that the replica's ranks sent to peers for the pseudo-gradient."""
    loss: float | None = None
    """Mean loss of the interval over all participants, weighted by their tokens."""
    grad_norm: float | None = None
    """The same of the gradient norm."""
    cause: str | None = None
    """Why it failed; None if it did not."""

    @property
    def committed(self) -> bool:
        return self.kind is SyncKind.COMMITTED


class OuterSync(ABC):
    """The outer sync of one rank. All ranks of a replica call it in the same order at the same inner step."""

    @property
    @abstractmethod
    def outer_step(self) -> int:
        """Committed syncs that this replica's anchor contains."""

    @property
    @abstractmethod
    def next_step(self) -> int:
        """The nominal step (``diloco.schedule``) that the next inner step is."""

    @property
    @abstractmethod
    def due(self) -> bool:
        """Whether :meth:`sync` has to come before the next inner step."""

    @property
    def steps_to_sync(self) -> int:
        """Inner steps that this replica makes before its next sync, at the most; 0 if that is not known."""
        return 0

    @abstractmethod
    def open_membership(self) -> None:
        """Become known to the Lighthouse; from here on others wait for this replica at their syncs."""

    @abstractmethod
    def enter(self) -> None:
        """Begin a cold start, in which everybody has the same parameters.

        Raises:
            RuntimeError: no quorum came within ``diloco.quorum_timeout_s``.
        """

    @abstractmethod
    def join(self) -> Sync:
        """Enter a running run: take a peer's state and become a member.

        Raises:
            NoPeerState: no peer has a state, or its transfer failed.
        """

    def before_optimizer(self) -> None:
        """The inner optimizer is about to step: its moments and the parameters change now."""
        return

    @abstractmethod
    def step_ended(self, trained: Trained) -> None:
        """An inner step has ended, with the optimizer and the LR schedule stepped."""

    @abstractmethod
    def sync(self) -> Sync:
        """Carry out the outer sync at the end of an interval.

        Raises:
            SyncFailed: too many attempts failed in a row.
            NonFinite, Diverged, ForeignReplica: this replica must not take part as it is.
        """

    @abstractmethod
    def settled(self) -> None:
        """The trainer's counters and data positions are where the last sync left them."""

    @abstractmethod
    def anchor_hash(self, gather: Callable[[int], list[int]]) -> str:
        """Hash of the outer state over all ranks of the replica. Every rank calls; ``gather`` collects by rank."""

    @abstractmethod
    def anchor(self) -> Mapping[str, torch.Tensor]:
        """The anchor's shards of this rank by name. Views: copy what must outlive the next sync."""

    @abstractmethod
    def momentum(self) -> Mapping[str, torch.Tensor]:
        """The outer momentum's shards of this rank by name; may be empty before the first outer step. Views."""

    def rewind(self) -> None:
        """Go back to where the last commit left this replica, if a run can go on from there: what it has trained since
        is gone.
        """
        return

    def leave(self) -> None:
        """Be no member any more, so that nobody waits for this replica. It commits nothing after this."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Leave the quorum and end what runs in the background."""
