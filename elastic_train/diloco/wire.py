"""The collectives of the outer sync: one at a time, each with a bound, every failure the same exception.

torchft's groups differ in how a failure shows: gloo raises, NCCL is aborted by a timer and tells afterwards. What
comes back from here is complete and in memory, or a :class:`WireError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions
from torchft.process_group import ProcessGroup


class WireError(RuntimeError):
    """A collective failed or took too long: the group is broken and must be set up anew with those who live."""


class Wire:
    """The connection of one rank to the same rank of the other replicas.

    All members call the same operations in the same order, with tensors of the same sizes.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        timeout_s: float,
        *,
        on_operation: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            group: set up and torn down by who owns it; after that, ``set_members``.
            device: where the tensors of all operations live.
            timeout_s: longest silence of the peers within one operation.
            on_operation: called before each operation, so that a watchdog sees progress.
        """
        self.device = device
        self.rank = 0
        self.world = 1
        self.names: tuple[str, ...] = ()
        self.operations = 0
        """Begun so far: it rises as long as a sync gets somewhere."""
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._on_operation = on_operation
        self._one_at_a_time = threading.Lock()
        self._bytes = 0
        if device.type == "cuda":
            # torchft's NCCL group clears the timeout of an operation and goes by its own.
            group.set_timeout(self._timeout)

    def set_members(self, rank: int, world: int, names: Sequence[str] = ()) -> None:
        """The group was set up anew: this rank's place in it, the number of members, and who they are."""
        self.rank = rank
        self.world = world
        self.names = tuple(names)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by the sum over the members, in place.

        Raises:
            WireError: it failed; what ``tensor`` holds is undefined.
        """
        options = AllreduceOptions()  # of a sum, unless told otherwise
        options.timeout = self._timeout
        self._run("all-reduce", lambda: self._group.allreduce([tensor], options))
        self._count(2 * tensor.nbytes)

    def all_gather(self, tensor: torch.Tensor, out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Every member's ``tensor``, in rank order; in ``out``, one tensor for each member, if given.

        Raises:
            WireError: it failed; what ``out`` holds is undefined.
        """
        parts = [torch.empty_like(tensor) for _ in range(self.world)] if out is None else list(out)
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._run("all-gather", lambda: self._group.allgather([parts], [tensor], options))
        self._count(self.world * tensor.nbytes)
        return parts

    def all_to_all(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Send the i-th of ``world`` equal parts of ``tensor`` to member i; get its part for this rank in place i.

        Raises:
            WireError: it failed; what ``out`` holds is undefined.
        """
        received = torch.empty_like(tensor) if out is None else out
        options = AllToAllOptions()
        options.timeout = self._timeout
        self._run("all-to-all", lambda: self._group.alltoall_base(received, tensor, [], [], options))
        self._count(tensor.nbytes)
        return received

    def gather_rows(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's ``row`` of 64-bit integers, in rank order. All have the same length.

        Raises:
            WireError: it failed.
        """
        parts = self.all_gather(torch.tensor(row, dtype=torch.int64, device=self.device))
        return [[int(number) for number in part.tolist()] for part in parts]

    def take_bytes(self) -> int:
        """Bytes that this rank sent since it was last asked, by the algorithms that need the fewest."""
        sent, self._bytes = self._bytes, 0
        return sent

    def abort(self) -> None:
        """Give the group up, so that no peer waits for this rank in it. Every operation fails from here on."""
        self._group.abort()

    def _run(self, name: str, start: Callable[[], Work]) -> None:
        self.operations += 1
        self._on_operation()
        # Old work that meets a new operation would mix their data up.
        with self._one_at_a_time:
            try:
                start().wait()
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
                error = self._group.errored()
            except Exception as failure:
                raise WireError(f"{name} of rank {self.rank} of {self.world}: {failure}") from failure
        if error is not None:
            raise WireError(f"{name} of rank {self.rank} of {self.world}: {error}") from error

    def _count(self, size: int) -> None:
        """Count what leaves this rank when all but its own part of ``size`` bytes does."""
        self._bytes += size * (self.world - 1) // self.world
