"""torchft's own DiLoCo behind :class:`elastic_train.diloco.engine.OuterSync`.

``torchft.local_sgd.DiLoCo`` hangs itself into ``optimizer.step()``. Here its fragments are driven explicitly
after the LR schedule has stepped, so that a donor's state is always that of a whole inner step, and the
last interval can be short. What stock DiLoCo costs is documented in ``docs/recovery.md``: a failed sync
throws the interval of every survivor away, and a joiner repeats its donor's pseudo-gradient once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ReduceOp
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager

from elastic_train.config import DilocoConfig
from elastic_train.diloco.engine import (
    COLD_START_STEP,
    FaultHook,
    NoPeerState,
    OuterSync,
    Sync,
    SyncFailed,
    SyncKind,
    Trained,
)
from elastic_train.diloco.interval import Interval
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.peer_ckpt.shards import (
    combine_hashes,
    export_optimizer,
    export_tensors,
    hash_tensors,
    load_optimizer,
    load_tensors,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SyncHooks:
    """What the engine asks of the trainer that it works for."""

    at_point: FaultHook
    progress: Callable[[], torch.Tensor]
    """int64 ``[virtual_shards, 4]``: what this replica read since its last commit (``PositionTable.delta``). Asked
    for after the quorum, which may have replaced this replica's state."""
    on_state: Callable[[], None]
    """A peer's state is in place, before any data is exchanged."""
    participants: Callable[[], Sequence[int]] = tuple
    """Slots in the quorum that this replica is in."""


class _Fragments(DiLoCo):
    """Stock DiLoCo without its own state export, which hands out live DTensors."""

    def _register_state_dict_fn(self) -> None:
        return None


class TorchftEngine(OuterSync):
    """Stock DiLoCo: uniform mean over the quorum, Nesterov SGD on the anchor by ``torch.optim.SGD``."""

    def __init__(
        self,
        manager: Manager,
        fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        config: DilocoConfig,
        schedule: OuterSchedule,
        *,
        pin_memory: bool,
        hooks: SyncHooks,
    ) -> None:
        """
        Args:
            manager: in synchronous quorum mode, its own step at ``COLD_START_STEP`` or, for a joiner, 0. It is a
                member from here on.
            fragments: modules that together hold every parameter once, in the order in which they sync.
            inner_optimizer: only kept by stock DiLoCo; its hooks are not used.
            pin_memory: pin the host copy of the anchor, on accelerators.
        """
        self._manager = manager
        self._config = config
        self._hooks = hooks
        self._interval = Interval(schedule)
        self._outer = [
            torch.optim.SGD(
                [p for p in fragment.parameters() if p.requires_grad],
                lr=config.outer_lr,
                momentum=config.outer_momentum,
                nesterov=config.outer_nesterov,
                weight_decay=config.outer_weight_decay,
            )
            for fragment in fragments
        ]
        self._diloco = _Fragments(
            manager,
            list(fragments),
            inner_optimizer,
            self._outer,
            sync_every=config.sync_every,
            pin_memory=pin_memory,
            fragment_sync_delay=config.overlap_steps,
            fragment_update_alpha=config.merge_alpha,
        )
        self._modules = list(fragments)
        self._failures = 0
        self._state_loaded = False
        self._prepared: tuple[float, float] | None = None
        """Seconds waited and worked by ``prepare``, while its reduction is in flight."""

    @property
    def outer_step(self) -> int:
        return max(self._manager.current_step() - COLD_START_STEP, 0)

    @property
    def _fragment_id(self) -> int:
        return self.outer_step % len(self._modules)

    @property
    def next_step(self) -> int:
        return self._interval.next_step

    @property
    def due(self) -> bool:
        return self._interval.full

    def open_membership(self) -> None:
        return

    def enter(self) -> None:
        self._manager.start_quorum()

    def join(self) -> Sync:
        self._prepare()
        return self.sync()

    def step_ended(self, trained: Trained) -> None:
        self._interval.add(trained)
        overlap = self._config.overlap_steps
        if overlap and self._interval.done == self._interval.quota - overlap:
            self._prepare()

    def settled(self) -> None:
        return

    def anchor_hash(self, gather: Callable[[int], list[int]]) -> str:
        return combine_hashes(gather(hash_tensors(self.anchor())))

    def close(self) -> None:
        self._manager.shutdown(wait=False)

    def _prepare(self) -> None:
        began = time.monotonic()
        self._state_loaded = False
        self._manager.start_quorum()
        wait_s = time.monotonic() - began
        if self._manager.current_step() < COLD_START_STEP:
            error = self._manager.errored()
            reason = f"the transfer failed: {error.original_exception}" if error else "no member has state"
            raise NoPeerState(f"entered a quorum but got no state from a peer: {reason}")
        if self._state_loaded:
            self._hooks.on_state()
        self._diloco._fragments[self._fragment_id].prepare_sync()
        self._hooks.at_point("reduce")
        self._prepared = (wait_s, time.monotonic() - began - wait_s)

    def sync(self) -> Sync:
        if self._prepared is None:
            self._prepare()
        assert self._prepared is not None
        (wait_s, prepare_s), self._prepared = self._prepared, None
        return self._finish(wait_s, prepare_s)

    def anchor(self) -> dict[str, torch.Tensor]:
        return {
            f"{i}.{name}": tensor
            for i, fragment in enumerate(self._diloco._fragments)
            for name, tensor in fragment.original_parameters.items()
        }

    def momentum(self) -> dict[str, torch.Tensor]:
        return {
            f"{i}.{name}": optimizer.state[parameter]["momentum_buffer"]
            for i, (module, optimizer) in enumerate(zip(self._modules, self._outer, strict=True))
            for name, parameter in module.named_parameters()
            if optimizer.state.get(parameter)
        }

    def export_state(self) -> dict[str, object]:
        return {
            "anchor": export_tensors(self.anchor().items()),
            "momentum": [export_optimizer(optimizer) for optimizer in self._outer],
        }

    def load_state(self, state: dict[str, object]) -> None:
        self._state_loaded = True
        load_tensors(self.anchor().items(), state["anchor"])  # type: ignore[arg-type]
        for optimizer, source in zip(self._outer, state["momentum"], strict=True):  # type: ignore[call-overload]
            load_optimizer(optimizer, source)

    def _finish(self, wait_s: float, prepare_s: float) -> Sync:
        began = time.monotonic()
        fragment_id = self._fragment_id
        fragment = self._diloco._fragments[fragment_id]
        total = self._hooks.progress().to(self._device)
        self._manager.allreduce(total, reduce_op=ReduceOp.SUM).wait()
        committed = fragment.perform_sync()
        error = self._manager.errored()
        self._failures = 0 if committed else self._failures + 1
        cause = None if committed else str(error.original_exception if error else "a rank voted no")
        # Syncs fail for everybody at once. If all gave up at once, nobody would be left with the run's state.
        patience = self._config.max_retries + (self._manager.participating_rank() or 0)
        if self._failures > patience:
            raise SyncFailed(f"{self._failures} syncs failed in a row, the last: {cause}")
        settled = self._interval.unsettled
        self._interval.settle_all()
        self._interval.begin(self.outer_step)
        return Sync(
            kind=SyncKind.COMMITTED if committed else SyncKind.FAILED,
            outer_step=self.outer_step,
            participants=tuple(sorted(self._hooks.participants())),
            progress=total.cpu(),
            tokens=settled if committed else 0,
            wait_s=wait_s,
            reduce_s=prepare_s + time.monotonic() - began,
            bytes=sum(t.numel() * t.element_size() for t in fragment.original_parameters.values()),
            cause=cause,
        )

    @property
    def _device(self) -> torch.device:
        """Where the cross-replica group wants its tensors: with the parameters."""
        return next(self._modules[0].parameters()).device
