from collections.abc import Iterator

import pytest
import torch

from elastic_train.diloco.control import ControlGroup, ReplicaBroken
from tests.groups import group_of_one


@pytest.fixture
def control() -> Iterator[ControlGroup]:
    with group_of_one():
        yield ControlGroup(30.0)


def test_a_rank_alone_hears_itself(control: ControlGroup) -> None:
    assert (control.rank, control.ranks) == (0, 1)
    assert control.gather([2**63 - 1, -(2**63), 0]) == [[2**63 - 1, -(2**63), 0]]
    assert control.word([-(2**63), 7]).heard() == [-(2**63), 7]
    control.barrier()


def test_a_sum_is_a_new_tensor(control: ControlGroup) -> None:
    mine = torch.tensor([1, 2])

    total = control.sum(mine)
    total.zero_()

    assert mine.tolist() == [1, 2]


def test_after_an_abort_every_exchange_fails(control: ControlGroup) -> None:
    control.abort()

    for exchange in (
        lambda: control.gather([1]),
        lambda: control.word([1]),
        lambda: control.sum(torch.ones(1)),
        control.barrier,
    ):
        with pytest.raises(ReplicaBroken, match="control group of this replica was aborted"):
            exchange()
