"""The learning rate at a given step of the schedule."""

from __future__ import annotations

from torchtitan.components.optimizer import LRSchedulersContainer


def set_lr_step(schedulers: LRSchedulersContainer, step: int) -> None:
    """Put every LR schedule at ``step`` finished inner steps, and its rate into its optimizer.

    Loading a schedule's state alone leaves the old rate in the optimizer until the schedule next steps, so the
    next inner step would train with it.
    """
    schedulers.load_state_dict({"last_epoch": step})
    for scheduler in schedulers:
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def lr_step(schedulers: LRSchedulersContainer) -> int:
    """Finished inner steps of the LR schedule."""
    return int(schedulers.state_dict()["last_epoch"])
