from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from elastic_train.replica.titan.lr import lr_step, set_lr_step

STEPS = 30


def make(**settings: Any) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """Two optimizers over two parts of a model, each with two groups at rates of their own."""
    optimizers: OptimizersContainer = OptimizersContainer.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(pattern="bias", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.5}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01}),
        ],
    ).build(model_parts=[nn.Linear(2, 2), nn.Linear(2, 2)])
    return optimizers, LRSchedulersContainer.Config(**settings).build(optimizers=optimizers, training_steps=STEPS)


def rates(optimizers: OptimizersContainer) -> list[float]:
    return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


def advance(optimizers: OptimizersContainer, schedulers: LRSchedulersContainer, steps: int) -> None:
    for _ in range(steps):
        optimizers.step()
        schedulers.step()


SETTINGS = st.fixed_dictionaries(
    {
        "warmup_steps": st.integers(0, STEPS),
        "decay_ratio": st.none() | st.floats(0.1, 1.0),
        "decay_type": st.sampled_from(["linear", "sqrt", "cosine"]),
        "min_lr_factor": st.floats(0.0, 1.0),
    }
)


@given(settings=SETTINGS, before=st.integers(0, STEPS), step=st.integers(0, STEPS - 1))
def test_is_where_that_many_steps_lead(settings: dict[str, Any], before: int, step: int) -> None:
    optimizers, schedulers = make(**settings)
    advance(optimizers, schedulers, before)
    fresh_optimizers, fresh = make(**settings)
    advance(fresh_optimizers, fresh, step)

    set_lr_step(schedulers, step)

    assert rates(optimizers) == rates(fresh_optimizers)
    assert lr_step(schedulers) == lr_step(fresh) == step
    advance(optimizers, schedulers, 1)
    advance(fresh_optimizers, fresh, 1)
    assert rates(optimizers) == rates(fresh_optimizers)


def test_warmup_and_decay_by_hand() -> None:
    optimizers, schedulers = make(warmup_steps=10, decay_ratio=0.5, min_lr_factor=0.2)

    def at(step: int) -> float:
        set_lr_step(schedulers, step)
        return rates(optimizers)[1] / 0.01

    assert [at(0), at(4), at(10), at(15)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert at(29) == pytest.approx(0.2 + 0.8 / 15)
