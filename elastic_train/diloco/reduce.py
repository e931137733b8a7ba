"""The weighted mean of a bucket of pseudo-gradients over the members of a quorum, compressed if asked for.

Compression is not linear, so the sum cannot be left to an all-reduce: encoded numbers are exchanged, and every sum
is made here in float32, of what was decoded, always in rank order. Whatever a member decodes, all decode, so the
result is bitwise the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_train.diloco.compress import BLOCK, Codec, Scratch
from elastic_train.diloco.wire import Wire


class Feedback:
    """Error feedback of one fragment: what the codec lost in one sync is added to what is sent in the next.

    It belongs to this rank alone and is no part of the state that all replicas share. A sync holds its new errors
    back until it is known whether it counts. The memory is that of two copies of the fragment, plus two of the part
    that this rank sums up for all.
    """

    def __init__(self) -> None:
        self.sent = Residual()
        """Errors of this rank's own pseudo-gradient."""
        self.summed = Residual()
        """Errors of the sums that this rank made for all members, in its place among them."""
        self._place: tuple[int, int, tuple[str, ...]] | None = None

    def commit(self) -> None:
        """The sync counts, and with it what it lost."""
        self.sent.commit()
        self.summed.commit()

    def abort(self) -> None:
        """The sync does not count: whatever it lost, nobody used."""
        self.sent.abort()
        self.summed.abort()

    def reset(self) -> None:
        """This replica has taken over another's state: its own errors are not part of it."""
        self.sent.reset()
        self.summed.reset()

    def members_changed(self) -> None:
        """Others take part: the sums that this rank made for the earlier ones end here."""
        self.summed = Residual()

    def take_place(self, rank: int, world: int, names: tuple[str, ...] = ()) -> None:
        """This rank's place among the members, for the next bucket. In another place, or among others, it makes other
        sums."""
        if self._place != (rank, world, names):
            self._place = (rank, world, names)
            self.members_changed()


class Residual:
    """Errors by the offset of the bucket that they come from. Three sets of buffers: kept, held back, and free."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._free: dict[int, torch.Tensor] = {}

    def add_to(self, values: torch.Tensor, at: int) -> None:
        """Add what the last committed sync lost to ``values``, float32 ``[n]``, the bucket at offset ``at``."""
        if at in self._kept:
            values.add_(self._kept[at])

    def hold(self, errors: torch.Tensor, at: int) -> None:
        """Keep a copy of ``errors``, float32 ``[n]``, until ``commit`` or ``abort``."""
        buffer = self._held.pop(at, None)
        if buffer is None:
            buffer = self._free.pop(at, None)
        self._held[at] = errors.clone() if buffer is None else buffer.copy_(errors)

    def commit(self) -> None:
        """What was held back replaces what was kept of the same buckets."""
        for at in self._held:
            if at in self._kept:
                self._free[at] = self._kept[at]
        self._kept.update(self._held)
        self._held.clear()

    def abort(self) -> None:
        """Forget what was held back."""
        self._free.update(self._held)
        self._held.clear()

    def reset(self) -> None:
        """Forget everything."""
        self.abort()
        self._free.update(self._kept)
        self._kept.clear()


class Reducer:
    """Reduces buckets over a wire. All members use the same codec and bucket sizes."""

    def __init__(self, wire: Wire, codec: Codec | None) -> None:
        """``codec`` is this reducer's own; None sends float32."""
        self._wire = wire
        self._codec = codec
        self._padded = Scratch(torch.float32)
        self._sum = Scratch(torch.float32)
        self._decoded = Scratch(torch.float32)
        self._outgoing = Scratch(torch.uint8)
        self._incoming = Scratch(torch.uint8)

    @torch.no_grad()
    def reduce(
        self, bucket: torch.Tensor, weights: Sequence[float], *, feedback: Feedback | None = None, at: int = 0
    ) -> None:
        """Replace ``bucket`` by sum_i w_i d_i over the members, bitwise the same on all.

        Two members send each other all they have. From three on, each sums up one part for all (all-to-all, then
        all-gather of the sums, encoded once more), so that what a rank sends does not grow with their number. A
        rank that is alone encodes nothing, and its feedback waits.

        Args:
            bucket: this rank's unweighted pseudo-gradient d, float32 ``[n]``, contiguous, on the wire's device. With
                weight 0 it may hold anything.
            weights: w_i >= 0 in rank order, the same on all members. What a member with weight 0 has is not looked
                at, and its feedback stays as it is.
            feedback: errors of the fragment; must be committed or aborted when the sync is decided. None: they are
                lost. Without a codec there are none.
            at: the bucket's offset in the fragment.

        Raises:
            ValueError: the number of weights is not that of the members.
            WireError: a peer failed; what ``bucket`` holds is undefined.
        """
        wire = self._wire
        if len(weights) != wire.world:
            raise ValueError(f"{len(weights)} weights for {wire.world} members")
        if feedback is not None:
            feedback.take_place(wire.rank, wire.world, wire.names)
        own = weights[wire.rank]
        if own == 0:
            # 0 times what is not a number would not be 0.
            bucket.zero_()
            feedback = None
        if self._codec is None or wire.world == 1:
            bucket.mul_(own)
            if wire.world > 1:
                wire.all_reduce(bucket)
            return
        if feedback is not None:
            feedback.sent.add_to(bucket, at)
        if wire.world == 2:
            self._reduce_by_gather(self._codec, bucket, weights, feedback, at)
        else:
            self._reduce_by_parts(self._codec, bucket, weights, feedback, at)

    def _reduce_by_gather(
        self, codec: Codec, bucket: torch.Tensor, weights: Sequence[float], feedback: Feedback | None, at: int
    ) -> None:
        wire, size = self._wire, codec.encoded_size(bucket.numel())
        outgoing = self._outgoing.take(size, wire.device)
        codec.encode(bucket, outgoing)
        if feedback is not None:
            self._subtract(codec, outgoing, bucket)
            feedback.sent.hold(bucket, at)
        incoming = self._incoming.take(wire.world * size, wire.device).view(wire.world, size)
        wire.all_gather(outgoing, out=incoming.unbind())
        self._add_up(codec, incoming, weights, bucket)

    def _reduce_by_parts(
        self, codec: Codec, bucket: torch.Tensor, weights: Sequence[float], feedback: Feedback | None, at: int
    ) -> None:
        wire, numel = self._wire, bucket.numel()
        # Whole blocks, so that every part begins at a block; the last parts may be partly or all padding.
        part = -(-numel // (wire.world * BLOCK)) * BLOCK
        size = codec.encoded_size(part)
        padded = self._padded.take(wire.world * part, wire.device)
        padded[:numel].copy_(bucket)
        padded[numel:].zero_()
        parts = padded.view(wire.world, part)
        outgoing = self._outgoing.take(wire.world * size, wire.device).view(wire.world, size)
        incoming = self._incoming.take(wire.world * size, wire.device).view(wire.world, size)
        for values, encoded in zip(parts, outgoing, strict=True):
            codec.encode(values, encoded)
            if feedback is not None:
                self._subtract(codec, encoded, values)
        if feedback is not None:
            feedback.sent.hold(padded[:numel], at)
        wire.all_to_all(outgoing.view(-1), out=incoming.view(-1))
        total = self._sum.take(part, wire.device)
        self._add_up(codec, incoming, weights, total)
        if feedback is not None:
            feedback.summed.add_to(total, at)
        codec.encode(total, outgoing[0])
        if feedback is not None:
            self._subtract(codec, outgoing[0], total)
            feedback.summed.hold(total, at)
        wire.all_gather(outgoing[0], out=incoming.unbind())
        for values, encoded in zip(parts, incoming, strict=True):
            codec.decode(encoded, values)
        bucket.copy_(padded[:numel])

    def _subtract(self, codec: Codec, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Leave in ``values`` what their encoding lost."""
        decoded = self._decoded.take(values.numel(), values.device)
        codec.decode(encoded, decoded)
        values.sub_(decoded)

    def _add_up(self, codec: Codec, encoded: torch.Tensor, weights: Sequence[float], out: torch.Tensor) -> None:
        """Sum over the members of weight times what row i of ``encoded`` says, into ``out``."""
        out.zero_()
        for row, weight in zip(encoded, weights, strict=True):
            if weight > 0:
                decoded = self._decoded.take(out.numel(), out.device)
                codec.decode(row, decoded)
                out.add_(decoded, alpha=weight)
