"""The nominal step: which inner steps belong to which outer step, and where a run ends.

Pure arithmetic. Learning rate, logs, faults and the end of the run all use the nominal step, so that a
replica that lost or skipped inner steps is still at the same place of the run as its peers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OuterSchedule:
    """The plan of a run's outer steps.

    With ``fragments`` > 1 every outer step syncs one fragment, and each fragment syncs once in
    ``sync_every`` inner steps (Streaming DiLoCo, arXiv 2501.18512). The last inner step syncs however short
    its interval is, and syncs every fragment, so that all replicas end with the same parameters.
    """

    steps: int
    """Inner steps of the whole run (``training.steps``)."""
    sync_every: int
    """Inner steps between two syncs of the same fragment."""
    fragments: int = 1
    first: int = 0
    """Outer step that the run begins at: above 0 if it goes on from a durable snapshot."""

    @property
    def interval(self) -> int:
        """Inner steps between two outer steps, except at the end of the run."""
        return self.sync_every // self.fragments

    @property
    def outer_steps(self) -> int:
        """Outer steps of the whole run."""
        return -(-self.steps // self.interval) + self.fragments - 1

    def start(self, outer_step: int) -> int:
        """Nominal step at which ``outer_step`` syncs were committed and none of the next interval trained."""
        return min(outer_step * self.interval, self.steps)

    def quota(self, outer_step: int) -> int:
        """Inner steps to train after outer step ``outer_step`` before the next sync; 0 only at the end."""
        return self.start(outer_step + 1) - self.start(outer_step)

    def number(self, outer_step: int, done: int, quota: int) -> int:
        """Nominal step of the ``done``-th inner step after ``outer_step``, of ``quota`` that the replica does.

        With a quota of its own a replica walks through the nominal steps faster or slower than one by one; the
        first of its inner steps is the interval's first at the earliest, the last one the interval's last.
        """
        length = self.quota(outer_step)
        return self.start(outer_step) + (min(-(-done * length // quota), length) if quota else length)
