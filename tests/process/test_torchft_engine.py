"""The outer sync between processes, against its mathematics in float64."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from elastic_train.config import DilocoConfig
from tests.outer import OUTER, lighthouse
from tests.outer_process import SHAPES, Arrays, Moment, ReplicaProcess, replicas

TOLERANCE = 1e-5


class Oracle:
    """Nesterov SGD on the anchor, in float64."""

    def __init__(self, config: DilocoConfig) -> None:
        self.config = config
        self.anchor: Arrays = {name: np.ones(shape) for name, shape in SHAPES.items()}
        self.momentum: Arrays = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def step(self, moves: list[Arrays]) -> None:
        """``moves``: what each participant added to its parameters in the interval."""
        lr, mu = self.config.outer_lr, self.config.outer_momentum
        for name in SHAPES:
            d = -np.mean([move[name] for move in moves], axis=0, dtype=np.float64)
            self.momentum[name] = mu * self.momentum[name] + d
            self.anchor[name] = self.anchor[name] - lr * (d + mu * self.momentum[name])

    def agrees_with(self, replica: ReplicaProcess) -> None:
        tensors = replica.ask("tensors")
        for name in SHAPES:
            np.testing.assert_allclose(tensors["anchor"][name], self.anchor[name], atol=TOLERANCE)
            np.testing.assert_array_equal(tensors["theta"][name], tensors["anchor"][name])
            if tensors["momentum"]:
                np.testing.assert_allclose(tensors["momentum"][name], self.momentum[name], atol=TOLERANCE)


def bits(tensors: dict[str, Arrays]) -> dict[str, bytes]:
    return {f"{kind} {name}": array.tobytes() for kind, arrays in tensors.items() for name, array in arrays.items()}


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


@pytest.fixture
def patient() -> Iterator[str]:
    """Address of a Lighthouse that takes nobody for dead who is only late."""
    with lighthouse(heartbeat_timeout_ms=10_000) as address:
        yield address


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def train(generator: np.random.Generator, *trained: ReplicaProcess) -> list[Arrays]:
    """Let each replica move its parameters and read from a shard of its own; gives the moves."""
    moves: list[Arrays] = []
    for shard, replica in enumerate(trained):
        move = {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        progress = np.zeros((2, 4), dtype=np.int64)
        progress[shard] = [shard, 10 + shard, 20, 30]
        replica.ask("train", move, progress)
        moves.append(move)
    return moves


def together(order: str, *asked: ReplicaProcess) -> list[Any]:
    for replica in asked:
        replica.send(order)
    return [replica.answer() for replica in asked]


def test_anchors_are_the_same_bits_and_follow_nesterov(patient: str, generator: np.random.Generator) -> None:
    first, second = (ReplicaProcess(patient, slot, OUTER) for slot in (0, 1))
    oracle = Oracle(OUTER)
    with replicas(first, second):
        first.open()
        second.open()
        together("enter", first, second)

        for outer_step in (1, 2, 3):
            moves = train(generator, first, second)
            outcomes = together("sync", first, second)

            oracle.step(moves)
            for outcome in outcomes:
                assert (outcome["committed"], outcome["cause"], outcome["healed"]) == (True, None, 0)
                assert (outcome["outer_step"], outcome["participants"]) == (outer_step, [0, 1])
                assert outcome["progress"] == [[0, 10, 20, 30], [1, 11, 20, 30]]
                assert outcome["bytes"] == 4 * (15 + 7)
            assert bits(first.ask("tensors")) == bits(second.ask("tensors"))
            oracle.agrees_with(first)


@pytest.mark.parametrize("moment", ["formed", "vote"])
def test_the_survivor_goes_on_and_its_peer_comes_back(
    address: str, generator: np.random.Generator, moment: Moment
) -> None:
    survivor, victim = (ReplicaProcess(address, slot, OUTER) for slot in (0, 1))
    joiner = ReplicaProcess(address, 1, OUTER)
    oracle = Oracle(OUTER)
    with replicas(survivor, victim, joiner):
        survivor.open()
        victim.open()
        together("enter", survivor, victim)
        moves = train(generator, survivor, victim)
        together("sync", survivor, victim)
        oracle.step(moves)

        moves = train(generator, survivor, victim)
        victim.ask("die at", moment)
        victim.send("sync")
        lost = survivor.ask("sync")
        victim.process.join(30)
        assert victim.process.exitcode == -signal.SIGKILL
        if lost["committed"]:
            oracle.step([moves[slot] for slot in lost["participants"]])
        else:
            assert lost["cause"]
            assert lost["outer_step"] == 1
        # Nothing of a reduction that failed is in the parameters.
        oracle.agrees_with(survivor)
        # The victim was gone before it could send anything.
        assert moment != "formed" or not lost["committed"]

        moves = train(generator, survivor)
        alone = survivor.ask("sync")
        oracle.step(moves)
        assert (alone["committed"], alone["participants"]) == (True, [0])
        assert alone["outer_step"] == lost["outer_step"] + 1
        oracle.agrees_with(survivor)

        joiner.open(joining=True)
        joiner.send("join")
        met = alone
        while met["participants"] == [0] and joiner.process.is_alive():
            moves = train(generator, survivor)
            met = survivor.ask("sync")
            # The joiner starts with the donor's parameters, so the mean is the donor's own pseudo-gradient.
            oracle.step(moves)
            oracle.agrees_with(survivor)
        joined = joiner.answer()
        assert (joined["committed"], joined["healed"], joined["donor"]) == (True, 1, 0)
        assert joined == {**met, "healed": 1, "donor": 0}
        assert (joined["participants"], joined["progress"]) == ([0, 1], [[0, 10, 20, 30], [0, 0, 0, 0]])
        assert bits(joiner.ask("tensors")) == bits(survivor.ask("tensors"))

        moves = train(generator, survivor, joiner)
        outcomes = together("sync", survivor, joiner)
        oracle.step(moves)
        assert [outcome["outer_step"] for outcome in outcomes] == [joined["outer_step"] + 1] * 2
        oracle.agrees_with(survivor)
        assert bits(joiner.ask("tensors")) == bits(survivor.ask("tensors"))
