"""How a pseudo-gradient is made small for the wire: pure functions from numbers to bytes and back.

Replicas are far apart, and pseudo-gradients bear coarse rounding well: Streaming DiLoCo (arXiv 2501.18512) found no
loss with 4 bits a number, as long as sums are made in float32. The rounding error itself is kept and sent next time,
see :class:`elastic_train.diloco.reduce.Feedback`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

BLOCK = 128
"""Numbers that share one scale. Offsets that are multiples of it fall between encoded bytes for every codec."""

_ALIGNMENT = 4


class Scratch:
    """Memory that is used again: a flat tensor that grows to the largest size asked for and then stays."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory: torch.Tensor | None = None

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """``[numel]``, contents undefined. It is the same memory as what was taken before."""
        if self._memory is None or self._memory.numel() < numel or self._memory.device != device:
            self._memory = torch.empty(numel, dtype=self._dtype, device=device)
        return self._memory[:numel]


class Codec(ABC):
    """Encodes flat float32 tensors of any size, on any device. Not for several threads at once."""

    name: str

    @abstractmethod
    def encoded_size(self, numel: int) -> int:
        """Bytes that ``numel`` numbers need: a multiple of 4."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encode ``values``, float32 ``[n]``, into ``out``, uint8 ``[encoded_size(n)]``, 4-byte aligned.

        Numbers that are not finite decode to numbers that are not finite, possibly with others of their block.
        """

    @abstractmethod
    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode what ``encode`` gave into ``out``, float32 ``[n]``: the same bits on every device."""


class Bfloat16(Codec):
    """Two bytes a number, rounded to nearest even; the range of float32."""

    name = "bf16"

    def encoded_size(self, numel: int) -> int:
        return _aligned(2 * numel)

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.view(torch.bfloat16)[: values.numel()].copy_(values)

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(encoded.view(torch.bfloat16)[: out.numel()])


class BlockQuantizer(Codec):
    """Whole numbers of ``bits`` bits, times one float32 scale a block: the scales first, then the numbers.

    A block's largest magnitude is mapped to the largest whole number, the others are rounded to the nearest: the
    error of a number is at most half the scale of its block. A block of zeros stays zero.
    """

    def __init__(self, name: str, *, bits: int) -> None:
        self.name = name
        self._largest = 2 ** (bits - 1) - 1
        self._per_byte = 8 // bits
        self._values = Scratch(torch.float32)
        self._halves = Scratch(torch.uint8)

    def encoded_size(self, numel: int) -> int:
        return 4 * _blocks(numel) + _aligned(-(-numel // self._per_byte))

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        numel, count = values.numel(), _blocks(values.numel())
        scales, numbers = self._parts(out, numel)
        padded = self._values.take(count * BLOCK, values.device)
        padded[:numel].copy_(values)
        padded[numel:].zero_()
        blocks = padded.view(count, BLOCK)
        # The largest magnitude, eight times as fast as vector_norm finds it on the CPU.
        torch.amax(blocks, dim=1, out=scales)
        torch.maximum(scales.abs_(), torch.amin(blocks, dim=1).abs_(), out=scales)
        scales.div_(self._largest)
        # A block of zeros is divided by 1; the clamp is for scales so small that they are rounded themselves.
        blocks.div_((scales + (scales == 0)).unsqueeze(1)).round_().clamp_(-self._largest, self._largest)
        if self._per_byte == 1:
            numbers.view(torch.int8).copy_(padded[:numel])
        else:
            pairs = padded.add_(self._largest + 1).view(-1, 2)
            numbers.copy_(pairs[:, 0].add_(pairs[:, 1], alpha=16)[: numbers.numel()])

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        numel, whole = out.numel(), out.numel() // BLOCK
        scales, numbers = self._parts(encoded, numel)
        if self._per_byte == 1:
            out.copy_(numbers.view(torch.int8))
        else:
            halves = self._halves.take(numbers.numel(), encoded.device)
            out[0::2].copy_(torch.bitwise_and(numbers, 15, out=halves))
            out[1::2].copy_(torch.bitwise_right_shift(numbers, 4, out=halves)[: numel // 2])
            out.sub_(self._largest + 1)
        out[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole].unsqueeze(1))
        if numel > whole * BLOCK:
            out[whole * BLOCK :].mul_(scales[whole])

    def _parts(self, encoded: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, float32 ``[blocks]``, and the bytes of the numbers."""
        start = 4 * _blocks(numel)
        return encoded[:start].view(torch.float32), encoded[start : start - (-numel // self._per_byte)]


def make_codec(name: str) -> Codec | None:
    """The codec that ``diloco.compression`` names: "bf16", "int8" or "int4"; None for "none".

    Raises:
        ValueError: no such codec.
    """
    if name == "none":
        return None
    if name == "bf16":
        return Bfloat16()
    if name in ("int8", "int4"):
        return BlockQuantizer(name, bits=int(name[3:]))
    raise ValueError(f"no compression is called {name!r}; there are none, bf16, int8 and int4")


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
