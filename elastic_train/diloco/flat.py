"""One fragment's outer state on one rank: anchor and momentum, flat, each twice.

The committed pair is what all replicas agreed on; the candidate pair is where the next outer step is computed. A
commit swaps them, so nothing that was agreed on is touched before the agreement, and nothing is ever allocated
again. Sizes are those of this rank's shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import xxhash
from torch import nn

from elastic_train.peer_ckpt.client import Allocate
from elastic_train.peer_ckpt.shards import StateMismatch, local, raw_bytes

_PIECE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class OuterState:
    """Flat float32 tensors of one size."""

    anchor: torch.Tensor
    momentum: torch.Tensor

    def hash(self) -> int:
        """Signed 64-bit hash of both (xxh3)."""
        digest = xxhash.xxh3_64()
        for tensor in (self.anchor, self.momentum):
            for start in range(0, tensor.numel(), _PIECE):
                digest.update(raw_bytes(tensor[start : start + _PIECE].to("cpu")))
        return int.from_bytes(digest.digest(), "big", signed=True)


class FlatFragment:
    """The parameters of one fragment, as a flat range of numbers, and their outer state."""

    def __init__(
        self, module: nn.Module, *, device: torch.device, pin_memory: bool, allocate: Allocate | None = None
    ) -> None:
        """
        Args:
            device: where anchor and momentum live.
            pin_memory: page-lock them, if they live on the host of an accelerator.
            allocate: gives them their memory, if they live on the host; None: it is ordinary memory.
        """
        named = list(module.named_parameters())
        self._views = [local(parameter.detach()) for _, parameter in named]
        self.layout = tuple(
            (name, tuple(view.shape), str(view.dtype)) for (name, _), view in zip(named, self._views, strict=True)
        )
        """Names, local shapes and types, in order: the same on the same rank of every replica."""
        self._starts = [0, *accumulate(view.numel() for view in self._views)]
        self.numel = self._starts.pop()
        pin = pin_memory and device.type == "cpu"

        def flat() -> torch.Tensor:
            if allocate is not None and device.type == "cpu":
                return allocate((self.numel,), torch.float32).zero_()
            return torch.zeros(self.numel, dtype=torch.float32, device=device, pin_memory=pin)

        self.committed = OuterState(anchor=flat(), momentum=flat())
        self.candidate = OuterState(anchor=flat(), momentum=flat())
        self.read_parameters(self.committed.anchor)

    @torch.no_grad()
    def read_parameters(self, out: torch.Tensor, start: int = 0) -> None:
        """Copy the parameters of the flat range that begins at ``start`` into ``out``, float32 ``[n]``."""
        for view, at, piece in self._pieces(start, start + out.numel()):
            out[at : at + piece.stop - piece.start].copy_(view[piece])

    @torch.no_grad()
    def pseudo_gradient(self, out: torch.Tensor, start: int = 0) -> None:
        """Anchor minus parameters, for the range that begins at ``start``, into ``out``, float32 ``[n]``."""
        self.read_parameters(out, start)
        # In pieces, for one that comes from another device needs memory there.
        for at in range(0, out.numel(), _PIECE):
            part = out[at : at + _PIECE]
            anchor = self.committed.anchor[start + at : start + at + part.numel()]
            torch.sub(anchor.to(part.device), part, out=part)

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Whether no parameter is NaN or infinite; nor their sum, which only parameters far out of range can be."""
        if not self._views:
            return True
        sums = torch.stack([view.sum(dtype=torch.float32).to(self._views[0].device) for view in self._views])
        return bool(torch.isfinite(sums).all())

    @torch.no_grad()
    def write_parameters(self, keep: float = 0.0) -> None:
        """Set the parameters to the anchor, keeping the share ``keep`` of what they were (0 to 1)."""
        for view, at, piece in self._pieces(0, self.numel):
            anchor = self.committed.anchor[at : at + piece.stop - piece.start]
            if keep:
                view[piece].lerp_(anchor.to(view.device, view.dtype), 1 - keep)
            else:
                view[piece].copy_(anchor)

    @torch.no_grad()
    def load(self, anchor: torch.Tensor, momentum: torch.Tensor, *, carry: bool) -> None:
        """Take over a peer's outer state. ``carry`` keeps what this rank has learned since its own anchor.

        Raises:
            StateMismatch: another size; nothing was taken over.
        """
        if anchor.shape != (self.numel,) or momentum.shape != (self.numel,):
            raise StateMismatch(f"a fragment of {self.numel} numbers cannot take {tuple(anchor.shape)}")
        if carry:
            for view, at, piece in self._pieces(0, self.numel):
                span = slice(at, at + piece.stop - piece.start)
                view[piece].add_((anchor[span] - self.committed.anchor[span].to("cpu")).to(view.device, view.dtype))
        self.committed.anchor.copy_(anchor)
        self.committed.momentum.copy_(momentum)
        if not carry:
            self.write_parameters()

    def swap(self) -> None:
        """The candidate is what all agreed on."""
        self.committed, self.candidate = self.candidate, self.committed

    def _pieces(self, start: int, stop: int) -> list[tuple[torch.Tensor, int, slice]]:
        """The flattened parameters that the range touches: the tensor, where in the range it begins, and its part."""
        pieces: list[tuple[torch.Tensor, int, slice]] = []
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._views) and self._starts[index] < stop:
            begin, view = self._starts[index], self._views[index]
            piece = slice(max(start - begin, 0), min(stop - begin, view.numel()))
            if piece.stop > piece.start:
                pieces.append((view.view(-1), begin + piece.start - start, piece))
            index += 1
        return pieces


def flatten(
    fragments: Sequence[nn.Module], *, device: torch.device, pin_memory: bool, allocate: Allocate | None = None
) -> list[FlatFragment]:
    """The fragments in the order in which they sync; arguments as for each of them."""
    return [FlatFragment(fragment, device=device, pin_memory=pin_memory, allocate=allocate) for fragment in fragments]
