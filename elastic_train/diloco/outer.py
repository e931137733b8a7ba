"""The outer optimizer: SGD with (Nesterov) momentum on the anchor, from the averaged pseudo-gradient.

Its own few lines instead of ``torch.optim.SGD``, because a sync needs the step as a function: what it computes is
only a candidate until all members agree, and anchor and momentum must be untouched if they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LR_STEP = 0.2
"""Distance of the outer learning rates that arXiv 2503.09799 compared."""


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer:
    """The same numbers, step by step, as ``torch.optim.SGD`` gives with the averaged pseudo-gradient as gradient."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float

    @torch.no_grad()
    def step(
        self,
        d: torch.Tensor,
        anchor: torch.Tensor,
        momentum: torch.Tensor,
        *,
        anchor_out: torch.Tensor,
        momentum_out: torch.Tensor,
    ) -> None:
        """Compute the candidate for the next outer step; nothing of the tensors' size is allocated.

        With g = d + weight_decay * anchor and mu the momentum factor: m' = mu m + g, and anchor' = anchor - lr * x,
        where x is g + mu m' with Nesterov (as Sutskever and torch write it) and m' without.

        Args:
            d: the averaged pseudo-gradient (anchor minus parameters). Overwritten.
            anchor: only read.
            momentum: only read; zeros before the first step.
            anchor_out: receives anchor'. Shares no memory with the others.
            momentum_out: receives m'. Shares no memory with the others.

        All are flat float32 tensors of one size, on one device.
        """
        if self.weight_decay:
            d.add_(anchor, alpha=self.weight_decay)
        torch.mul(momentum, self.momentum, out=momentum_out)
        momentum_out.add_(d)
        direction = d.add_(momentum_out, alpha=self.momentum) if self.nesterov else momentum_out
        torch.add(anchor, direction, alpha=-self.lr, out=anchor_out)


def advice(outer_lr: float, replicas: int) -> str | None:
    """A hint, in one sentence, if experience speaks for another outer learning rate; None if it does not.

    By arXiv 2503.09799 (DiLoCo scaling laws) the best one depends on the number of replicas and not on the size of
    the model. What lies within half a step of the grid that was searched there is as good as the best.
    """
    if replicas <= 1:
        low, high = 0.4, 0.4
    elif replicas <= 4:
        low, high = 0.6, 0.6
    elif replicas < 8:
        low, high = 0.6, 0.8
    else:
        low, high = 0.8, 0.8
    slack = _LR_STEP / 2 + 1e-9
    if low - slack <= outer_lr <= high + slack:
        return None
    best = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    count = "1 replica" if replicas <= 1 else f"{replicas} replicas"
    return f"diloco.outer_lr = {outer_lr:g}, but with {count} {best} trained best in arXiv 2503.09799"
