"""Where a replica is between two outer steps: inner steps done and to do, and what it has trained since.

Pure bookkeeping. A replica may do more or fewer inner steps than the nominal length of an interval: because it is
faster or slower than its peers, or because it joined in the middle.
"""

from __future__ import annotations

import torch

from elastic_train.diloco.engine import Trained
from elastic_train.diloco.schedule import OuterSchedule


class Interval:
    """One replica's way through its intervals."""

    def __init__(self, schedule: OuterSchedule) -> None:
        self.schedule = schedule
        self.outer_step = schedule.first
        self.done = 0
        """Inner steps since the last outer step."""
        self.quota = schedule.quota(schedule.first)
        """Inner steps after which this interval ends at the latest."""
        self.tokens = 0
        """Trained by this replica in this incarnation."""
        self._settled = 0
        self._settled_by_fragment = [0] * schedule.fragments
        self._seconds = 0.0
        self._timed = 0
        self._losses: list[tuple[torch.Tensor, int]] = []
        self._grad_norm: float | None = None

    @property
    def next_step(self) -> int:
        """Nominal number of the next inner step."""
        return self.schedule.number(self.outer_step, self.done + 1, self.quota)

    @property
    def full(self) -> bool:
        return self.done >= self.quota

    @property
    def fragment(self) -> int:
        """Index of the fragment that syncs at the end of this interval."""
        return self.outer_step % self.schedule.fragments

    @property
    def step_s(self) -> float:
        """Mean seconds of an inner step since the last outer step; 0 before the first."""
        return self._seconds / self._timed if self._timed else 0.0

    @property
    def loss(self) -> float | None:
        """Mean loss since the last outer step, by tokens. Waits for an accelerator."""
        tokens = sum(count for _, count in self._losses)
        return sum(loss.item() * count for loss, count in self._losses) / tokens if tokens else None

    @property
    def grad_norm(self) -> float | None:
        """The last gradient norm that is known since the last outer step."""
        return self._grad_norm

    @property
    def unsettled(self) -> int:
        """Tokens that no sync of any fragment has taken in."""
        return self.tokens - self._settled

    def unsettled_of(self, fragment: int) -> int:
        """Tokens trained since that fragment's last sync."""
        return self.tokens - self._settled_by_fragment[fragment]

    def add(self, trained: Trained) -> None:
        """One more inner step."""
        self.done += 1
        self.tokens += trained.tokens
        self._seconds += trained.seconds
        self._timed += 1
        if trained.loss is not None:
            self._losses.append((trained.loss, trained.tokens))
        if trained.grad_norm is not None:
            self._grad_norm = trained.grad_norm

    def end_after(self, steps: int) -> None:
        """End this interval ``steps`` inner steps from now."""
        self.quota = self.done + steps

    def begin(self, outer_step: int, quota: int | None = None) -> None:
        """Begin the interval after ``outer_step``, of ``quota`` inner steps or of its nominal length."""
        nominal = self.schedule.quota(outer_step)
        self.outer_step = outer_step
        self.quota = nominal if quota is None or nominal == 0 else quota
        self.done = 0
        self._seconds, self._timed = 0.0, 0
        self._losses.clear()
        self._grad_norm = None

    def settle(self, fragment: int, tokens: int) -> None:
        """What was trained up to ``tokens`` is in the anchor, as far as that fragment goes."""
        self._settled = self._settled_by_fragment[fragment] = tokens

    def settle_all(self) -> None:
        """Nothing that was trained so far will ever be contributed: it is in the anchor, or gone."""
        self._settled = self.tokens
        self._settled_by_fragment = [self.tokens] * self.schedule.fragments
