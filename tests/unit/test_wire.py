import threading
from typing import Any

import pytest
import torch

from elastic_train.diloco.wire import Wire, WireError
from tests.wires import CPU, members


@pytest.mark.parametrize("world", [1, 2, 3])
def test_operations_and_what_they_send(world: int) -> None:
    with members(world) as joined:

        def act(rank: int) -> tuple[list[float], list[list[float]], list[int], list[list[int]], list[int]]:
            wire, sent = joined.wires[rank], []
            summed = torch.full((6,), 1.0 + rank)
            wire.all_reduce(summed)
            sent.append(wire.take_bytes())
            gathered = wire.all_gather(torch.tensor([float(rank), 0.5]))
            sent.append(wire.take_bytes())
            mixed = wire.all_to_all(torch.arange(2 * world, dtype=torch.uint8) + 10 * rank)
            sent.append(wire.take_bytes())
            rows = wire.gather_rows([rank, -(2**63), 2**63 - 1])
            sent.append(wire.take_bytes())
            return summed.tolist(), [part.tolist() for part in gathered], mixed.tolist(), rows, sent

        results = joined.each(act)

    others = world - 1
    for rank, (summed, gathered, mixed, rows, sent) in enumerate(results):
        assert summed == [world * (world + 1) / 2] * 6
        assert gathered == [[float(peer), 0.5] for peer in range(world)]
        assert mixed == [2 * rank + 10 * peer + i for peer in range(world) for i in (0, 1)]
        assert rows == [[peer, -(2**63), 2**63 - 1] for peer in range(world)]
        assert sent == [2 * 24 * others // world, 8 * others, 2 * others, 24 * others]


def test_results_go_where_they_are_wanted() -> None:
    with members(2) as joined:

        def act(rank: int) -> bool:
            wire = joined.wires[rank]
            out = torch.zeros(2, 3)
            parts = wire.all_gather(torch.full((3,), float(rank)), out=out.unbind())
            received = torch.zeros(2)
            same = wire.all_to_all(torch.full((2,), float(rank)), out=received)
            assert out.tolist() == [[0.0] * 3, [1.0] * 3]
            assert received.tolist() == [0.0, 1.0]
            return same is received and [part.data_ptr() for part in parts] == [row.data_ptr() for row in out]

        assert joined.each(act) == [True, True]


def test_every_operation_is_announced_first() -> None:
    with members(1) as joined:
        wire, calls = joined.wires[0], []
        wire._on_operation = lambda: calls.append(wire.take_bytes())
        wire.all_reduce(torch.ones(1))
        wire.gather_rows([1])
        wire.all_to_all(torch.ones(1))

    assert calls == [0, 0, 0]


def test_one_who_gives_up_frees_who_waits() -> None:
    waits = threading.Event()
    with members(3) as joined:

        def act(rank: int) -> str:
            wire = joined.wires[rank]
            if rank == 2:
                waits.wait()
                wire.abort()
                return "gone"
            wire._on_operation = waits.set
            with pytest.raises(WireError, match=f"all-reduce of rank {rank} of 3"):
                wire.all_reduce(torch.ones(1000))
            wire.abort()
            return "freed"

        assert joined.each(act) == ["freed", "freed", "gone"]


def test_a_silent_peer_is_given_up_after_the_timeout() -> None:
    with members(2, timeout_s=0.2) as joined, pytest.raises(WireError, match="all-to-all of rank 0 of 2"):
        joined.wires[0].all_to_all(torch.ones(2))


def test_a_group_that_was_given_up_fails_every_operation() -> None:
    with members(1) as joined:
        wire = joined.wires[0]
        wire.abort()
        for act in (lambda: wire.all_reduce(torch.ones(1)), lambda: wire.gather_rows([1])):
            with pytest.raises(WireError):
                act()


class _Aborted:
    """A group like NCCL's: an operation returns, and only the group knows that it was aborted."""

    def __init__(self) -> None:
        self.bounds: list[float] = []

    def allreduce(self, tensors: object, options: Any) -> "_Aborted":
        self.bounds.append(options.timeout.total_seconds())
        return self

    allgather = alltoall_base = lambda self, *given: self.allreduce(given[0], given[-1])

    def wait(self) -> bool:
        return True

    def errored(self) -> Exception:
        return RuntimeError("aborted")


def test_every_operation_has_a_bound_and_is_asked_how_it_went() -> None:
    group = _Aborted()
    wire = Wire(group, CPU, 1.5)
    for act in (wire.all_reduce, wire.all_gather, wire.all_to_all):
        with pytest.raises(WireError, match="aborted"):
            act(torch.ones(1))

    assert group.bounds == [1.5, 1.5, 1.5]
    assert wire.take_bytes() == 0
