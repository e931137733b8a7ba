"""The outer sync of a replica that is alone in its quorum."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.diloco.engine import NoPeerState, SyncFailed, SyncKind, Trained
from elastic_train.diloco.torchft_engine import SyncHooks
from tests.outer import NOTHING_READ, OUTER, Member, lighthouse, member

INNER_STEP = Trained(tokens=8, seconds=0.5)


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


def make_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]


def modules(parameters: list[nn.Parameter], fragments: int) -> list[nn.Module]:
    return [nn.ParameterList(parameters[f::fragments]) for f in range(fragments)]


def move(parameters: list[nn.Parameter], by: float) -> None:
    for number, parameter in enumerate(parameters):
        parameter.data += by + number


class Points:
    """Hooks that note what they were called for."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.hooks = dataclasses.replace(NOTHING_READ, at_point=self.passed.append)


def flat(tensors: dict[str, torch.Tensor]) -> list[float]:
    return [value for tensor in tensors.values() for value in tensor.flatten().tolist()]


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"), [(0.9, True, 0.0), (0.9, False, 0.0), (0.0, False, 0.0), (0.5, True, 0.1)]
)
def test_outer_optimizer(address: str, momentum: float, nesterov: bool, decay: float) -> None:
    config = dataclasses.replace(
        OUTER, outer_lr=0.5, outer_momentum=momentum, outer_nesterov=nesterov, outer_weight_decay=decay
    )
    parameters = make_parameters()
    anchor, velocity = np.ones(1), np.zeros(1)
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters), config=config) as seat:
        seat.engine.enter()
        for by in (0.25, -0.5, 1.0):
            parameters[0].data += by
            assert seat.engine.sync().committed

            d = -by + decay * anchor
            velocity = momentum * velocity + d
            anchor = anchor - 0.5 * (d + momentum * velocity if nesterov else velocity)
            assert parameters[0].tolist() == pytest.approx([anchor.item()] * 3, abs=1e-6)
            assert seat.engine.anchor()["0.0"].tolist() == parameters[0].tolist()


def test_a_sync_passes_its_points_in_order(address: str) -> None:
    parameters, points = make_parameters(), Points()
    quorums: list[Any] = []
    with member(
        address,
        modules(parameters, 1),
        torch.optim.SGD(parameters),
        slot=3,
        hooks=points.hooks,
        on_quorum=quorums.append,
    ) as seat:
        seat.engine.enter()
        assert points.passed == ["quorum"]

        outcome = seat.engine.sync()

        assert points.passed == ["quorum", "quorum", "reduce", "vote", "commit"]
        assert (outcome.kind, outcome.outer_step, outcome.cause) == (SyncKind.COMMITTED, 1, None)
        assert outcome.wait_s > 0
        assert outcome.reduce_s > 0
        assert [(quorum.participants, quorum.donor, quorum.outer_step) for quorum in quorums] == [((3,), None, 0)] * 2
        assert seat.manager.quorum == quorums[-1]


def test_fragments_sync_in_turn(address: str) -> None:
    config = dataclasses.replace(
        OUTER, sync_every=4, fragments=2, outer_momentum=0.0, outer_nesterov=False, outer_lr=1.0
    )
    parameters = make_parameters()
    with member(address, modules(parameters, 2), torch.optim.SGD(parameters), config=config) as seat:
        engine = seat.engine
        engine.enter()
        anchors = []
        for _ in range(3):
            for parameter in parameters:
                parameter.data += 1.0
            outcome = engine.sync()
            anchors.append((engine.anchor()["0.0"][0].item(), engine.anchor()["1.0"][0, 0].item()))
            assert outcome.bytes == 4 * (4 if outcome.outer_step == 2 else 3)

    assert anchors == [(2.0, 1.0), (2.0, 3.0), (4.0, 3.0)]


def test_a_reduction_that_overlaps_takes_what_was_trained_before_it(address: str) -> None:
    config = dataclasses.replace(
        OUTER, sync_every=4, overlap_steps=1, outer_momentum=0.0, outer_nesterov=False, outer_lr=1.0, merge_alpha=0.0
    )
    parameters = make_parameters()
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters), config=config) as seat:
        engine = seat.engine
        engine.enter()
        for moved_before in (1.0, 0.0, 0.0):
            parameters[0].data += moved_before
            engine.step_ended(INNER_STEP)
        parameters[0].data += 10.0
        engine.step_ended(INNER_STEP)
        assert engine.due

        outcome = engine.sync()

        assert outcome.committed
        assert parameters[0].tolist() == [2.0] * 3


def test_a_part_of_its_own_parameters_is_kept(address: str) -> None:
    config = dataclasses.replace(OUTER, merge_alpha=0.25, outer_momentum=0.0, outer_nesterov=False, outer_lr=0.5)
    parameters = make_parameters()
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters), config=config) as seat:
        seat.engine.enter()
        parameters[0].data += 4.0
        assert seat.engine.sync().committed

        assert seat.engine.anchor()["0.0"].tolist() == [3.0] * 3
        assert parameters[0].tolist() == [3.0 * 0.75 + 5.0 * 0.25] * 3


def fail_next(seat: Member) -> None:
    """Let the reduction of the next sync fail, as with a peer that died."""
    fail = seat.manager.allreduce

    def allreduce(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        seat.manager.allreduce = fail
        seat.manager.report_error(ConnectionError("Connection closed by peer"))
        return fail(tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor, *arguments, **settings)

    seat.manager.allreduce = allreduce


def test_a_failed_sync_leaves_nothing_behind(address: str) -> None:
    parameters, points = make_parameters(), Points()
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters), hooks=points.hooks) as seat:
        engine = seat.engine
        engine.enter()
        move(parameters, 1.0)
        engine.sync()
        before = flat(engine.anchor()), flat(engine.momentum())

        move(parameters, 2.0)
        fail_next(seat)
        outcome = engine.sync()

        assert (outcome.kind, outcome.outer_step) == (SyncKind.FAILED, 1)
        assert "Connection closed by peer" in str(outcome.cause)
        assert points.passed[-1] == "vote"
        assert (flat(engine.anchor()), flat(engine.momentum())) == before
        assert [parameter.tolist() for parameter in parameters] == [t.tolist() for t in engine.anchor().values()]

        move(parameters, 1.0)
        assert engine.sync().outer_step == 2


def test_a_sync_settles_what_was_trained_since_the_last(address: str) -> None:
    parameters = make_parameters()
    hooks = dataclasses.replace(NOTHING_READ, participants=lambda: (4, 0, 2))
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters), hooks=hooks) as seat:
        engine = seat.engine
        engine.enter()
        steps: list[int] = []
        syncs = []
        for fails in (False, True, False):
            while not engine.due:
                steps.append(engine.next_step)
                engine.step_ended(INNER_STEP)
            if fails:
                fail_next(seat)
            syncs.append(engine.sync())

    # What a failed sync loses is trained again, under the same nominal steps.
    assert steps == [1, 2, 3, 4, 3, 4]
    assert [sync.tokens for sync in syncs] == [16, 0, 16]
    assert [sync.participants for sync in syncs] == [(0, 2, 4)] * 3


def test_too_many_failures_in_a_row(address: str) -> None:
    config = dataclasses.replace(OUTER, max_retries=2)
    parameters = make_parameters()
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters), config=config) as seat:
        engine = seat.engine
        engine.enter()
        for fails in (True, True, False, True, True):
            if fails:
                fail_next(seat)
            assert engine.sync().committed != fails
        fail_next(seat)

        with pytest.raises(SyncFailed, match="3 syncs failed in a row, the last: Connection closed by peer"):
            engine.sync()


def test_a_joiner_that_finds_nobody_does_not_train(address: str) -> None:
    parameters, points = make_parameters(), Points()
    inner = torch.optim.SGD(parameters)
    with (
        member(address, modules(parameters, 1), inner, first_step=0, hooks=points.hooks) as seat,
        pytest.raises(NoPeerState, match="no member has state"),
    ):
        seat.engine.join()

    assert points.passed == ["quorum"]


def test_progress_is_asked_for_after_the_quorum(address: str) -> None:
    parameters, points = make_parameters(), Points()
    read = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    asked: list[list[str]] = []

    def progress() -> torch.Tensor:
        asked.append(list(points.passed))
        return read.clone()

    hooks = SyncHooks(at_point=points.passed.append, progress=progress, on_state=lambda: None)
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters), hooks=hooks) as seat:
        outcome = seat.engine.sync()

    assert outcome.progress is not None
    assert outcome.progress.tolist() == read.tolist()
    assert asked == [["quorum", "reduce"]]


def test_state_goes_from_one_engine_to_another(address: str) -> None:
    parameters = make_parameters()
    with member(address, modules(parameters, 1), torch.optim.SGD(parameters)) as seat:
        seat.engine.enter()
        move(parameters, 1.0)
        seat.engine.sync()
        given = seat.engine.export_state()
        anchor, momentum = flat(seat.engine.anchor()), flat(seat.engine.momentum())
        move(parameters, 1.0)
        seat.engine.sync()

        seat.engine.load_state(given)

        assert flat(seat.engine.anchor()) == anchor
        assert flat(seat.engine.momentum()) == momentum
