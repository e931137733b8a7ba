import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.outer import OuterOptimizer, advice
from tests.allocations import Allocations


def optimizers() -> st.SearchStrategy[OuterOptimizer]:
    return st.builds(
        OuterOptimizer,
        lr=st.floats(0.01, 1.5),
        momentum=st.sampled_from([0.0, 0.6, 0.9, 0.99]),
        nesterov=st.booleans(),
        weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    )


class Run:
    """Outer steps in a row, with the buffers swapped after each, as a commit does."""

    def __init__(self, optimizer: OuterOptimizer, anchor: torch.Tensor) -> None:
        self._optimizer = optimizer
        self.now = (anchor.clone(), torch.zeros_like(anchor))
        self._next = (torch.full_like(anchor, float("nan")), torch.full_like(anchor, float("nan")))

    def step(self, d: torch.Tensor) -> None:
        (anchor, momentum), (anchor_out, momentum_out) = self.now, self._next
        self._optimizer.step(d, anchor, momentum, anchor_out=anchor_out, momentum_out=momentum_out)
        self.now, self._next = self._next, self.now


@given(optimizers(), st.integers(1, 300), st.integers(1, 5), st.sampled_from([1e-4, 1.0, 100.0]), st.integers(0, 2**32))
def test_follows_the_formula_in_float64(
    optimizer: OuterOptimizer, numel: int, steps: int, scale: float, seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    anchor = torch.randn(numel, generator=numbers)
    run = Run(optimizer, anchor)
    x, m = anchor.double().numpy(), np.zeros(numel)
    largest = 1.0
    for _ in range(steps):
        d = scale * torch.randn(numel, generator=numbers)
        g = d.double().numpy() + optimizer.weight_decay * x
        m = optimizer.momentum * m + g
        x = x - optimizer.lr * (g + optimizer.momentum * m if optimizer.nesterov else m)
        run.step(d)
        largest = max(largest, *np.abs([x, m, g]).flatten())

        np.testing.assert_allclose(run.now[0].numpy(), x, rtol=0, atol=3e-6 * largest)
        np.testing.assert_allclose(run.now[1].numpy(), m, rtol=0, atol=3e-6 * largest)


@given(optimizers(), st.integers(1, 100), st.integers(0, 2**32))
def test_equals_the_sgd_of_torch_in_every_step(optimizer: OuterOptimizer, numel: int, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(numel, generator=numbers))
    sgd = torch.optim.SGD(
        [parameter],
        lr=optimizer.lr,
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov and optimizer.momentum > 0,
        weight_decay=optimizer.weight_decay,
    )
    run = Run(optimizer, parameter.detach())
    for _ in range(6):
        d = torch.randn(numel, generator=numbers)
        parameter.grad = d.clone()
        sgd.step()
        run.step(d)

        assert torch.equal(run.now[0], parameter)
        if optimizer.momentum:
            assert torch.equal(run.now[1], sgd.state[parameter]["momentum_buffer"])


@given(optimizers())
def test_what_was_agreed_on_stays_untouched(optimizer: OuterOptimizer) -> None:
    anchor, momentum = torch.randn(50), torch.randn(50)
    before = anchor.clone(), momentum.clone()
    d = torch.randn(50)
    results = []
    for _ in range(2):
        out = torch.empty(50), torch.empty(50)
        optimizer.step(d.clone(), anchor, momentum, anchor_out=out[0], momentum_out=out[1])
        results.append(out)

    assert torch.equal(anchor, before[0])
    assert torch.equal(momentum, before[1])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@given(optimizers())
def test_nothing_is_allocated(optimizer: OuterOptimizer) -> None:
    tensors = torch.ones(4, 1000)
    with Allocations() as allocations:
        optimizer.step(torch.ones(1000), tensors[0], tensors[1], anchor_out=tensors[2], momentum_out=tensors[3])
        made_by_the_test = allocations.largest
        allocations.largest = 0
        optimizer.step(tensors[0].view(-1), tensors[1], tensors[1], anchor_out=tensors[2], momentum_out=tensors[3])

    assert made_by_the_test == 4000
    assert allocations.largest == 0


@pytest.mark.parametrize(
    ("lr", "replicas"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.7, 4), (0.5, 3), (0.6, 6), (0.9, 5), (0.7, 8), (0.8, 30)]
)
def test_no_advice_near_what_trained_best(lr: float, replicas: int) -> None:
    assert advice(lr, replicas) is None


@pytest.mark.parametrize(
    ("lr", "replicas", "best"),
    [(0.7, 1, "1 replica 0.4"), (0.9, 2, "2 replicas 0.6"), (0.4, 6, "0.6 to 0.8"), (0.6, 8, "0.8")],
)
def test_advice_names_what_trained_best(lr: float, replicas: int, best: str) -> None:
    hint = advice(lr, replicas)

    assert hint is not None
    assert best in hint
    assert f"diloco.outer_lr = {lr}" in hint
