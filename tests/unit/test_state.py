"""A joiner's way to its donor's state. Around ``state`` everything is real but the trainer that holds it together."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip  (must come before the rest of torchtitan)

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer

from elastic_train.diloco.torchft_engine import SyncHooks
from elastic_train.peer_ckpt.shards import StateMismatch
from elastic_train.replica.data.loader import ElasticDataLoader
from elastic_train.replica.data.position import ShardPosition
from elastic_train.replica.state import counters, export_state, load_counters, load_moments, load_state, moments
from tests.outer import lighthouse, member

SHARDS = 3


class ByteTokenizer(BaseTokenizer):
    """A token for each byte."""

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Rank(SimpleNamespace):
    """What ``state`` sees of a trainer: a model of two parts that learns to predict the next byte."""

    def inner_step(self) -> None:
        inputs, labels = next(iter(self.dataloader))
        self.optimizers.zero_grad()
        hidden = self.model_parts[0](inputs["input"])
        logits = self.model_parts[1](nn.functional.dropout(hidden, 0.5))
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.step += 1
        self.ntokens_seen += labels.numel()

    def outer_step(self) -> None:
        outcome = self.engine.sync()
        assert outcome.committed
        self.dataloader.commit(self.dataloader.committed.plus(outcome.progress))

    def count(self, **counters: int) -> None:
        self.__dict__.update(counters)

    def train(self, outer_steps: int) -> None:
        for _ in range(outer_steps):
            self.inner_step()
            self.inner_step()
            self.outer_step()


@contextlib.contextmanager
def rank(folder: Path, seed: int, width: int = 8) -> Iterator[Any]:
    torch.manual_seed(seed)
    parts = [nn.Embedding(256, width), nn.Linear(width, 256)]
    optimizers: OptimizersContainer = OptimizersContainer.Config(
        implementation="for-loop",
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})],
    ).build(model_parts=parts)
    schedulers = LRSchedulersContainer.Config(warmup_steps=20).build(optimizers=optimizers, training_steps=40)
    text = folder / "data.txt"
    text.write_text("\n\n".join(f"document {number} says {number * number}" for number in range(200)))
    loader = ElasticDataLoader.Config(dataset=str(text), virtual_shards=SHARDS).build(
        dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), seq_len=5, local_batch_size=2
    )
    hooks = SyncHooks(
        at_point=lambda point: None,
        progress=lambda: loader.positions().delta(loader.committed),
        on_state=lambda: None,
    )
    with lighthouse() as address, member(address, [nn.ModuleList(parts)], optimizers, hooks=hooks) as seat:
        yield Rank(
            model_parts=parts,
            optimizers=optimizers,
            lr_schedulers=schedulers,
            dataloader=loader,
            engine=seat.engine,
            step=0,
            ntokens_seen=0,
        )


@pytest.fixture
def donor(tmp_path: Path) -> Iterator[Any]:
    with rank(tmp_path, seed=0) as made:
        made.train(2)
        yield made


@pytest.fixture
def joiner(tmp_path: Path) -> Iterator[Any]:
    with rank(tmp_path, seed=1) as made:
        yield made


def learning_rate(trainer: Any) -> float:
    return float(trainer.optimizers.optimizers[0].param_groups[0]["lr"])


def test_a_joiner_goes_on_like_its_donor(donor: Any, joiner: Any) -> None:
    given = export_state(donor)
    joiner.train(1)

    load_state(joiner, given)

    assert export_state(joiner)["hash"] == given["hash"]
    assert (joiner.step, joiner.ntokens_seen) == (4, donor.ntokens_seen)
    assert learning_rate(joiner) == learning_rate(donor)
    after = []
    for trainer in (donor, joiner):
        torch.set_rng_state(given["rng"])
        trainer.train(2)
        after.append(export_state(trainer))
    assert after[0]["hash"] == after[1]["hash"]
    assert after[0]["hash"] != given["hash"]


def test_what_was_exported_stays_while_the_donor_trains_on(donor: Any, joiner: Any) -> None:
    given = export_state(donor)

    donor.train(1)
    load_state(joiner, given)

    assert export_state(joiner)["hash"] == given["hash"]
    assert export_state(donor)["hash"] != given["hash"]


def test_uncommitted_reading_is_not_handed_on(donor: Any, joiner: Any) -> None:
    donor.inner_step()

    load_state(joiner, export_state(donor))

    assert donor.dataloader.positions() != donor.dataloader.committed
    assert joiner.dataloader.positions() == joiner.dataloader.committed == donor.dataloader.committed


def one_bit_of(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8)[0] ^= 1


def moment(trainer: Any, name: str) -> Any:
    return next(iter(trainer.optimizers.optimizers[1].state.values()))[name]


CHANGES = {
    "parameter": lambda trainer: one_bit_of(trainer.model_parts[1].bias),
    "first moment": lambda trainer: one_bit_of(moment(trainer, "exp_avg")),
    "optimizer step": lambda trainer: moment(trainer, "step").add_(1),
    "anchor": lambda trainer: one_bit_of(trainer.engine.anchor()["0.1.bias"]),
    "outer momentum": lambda trainer: one_bit_of(trainer.engine.momentum()["0.1.bias"]),
    "step": lambda trainer: trainer.count(step=5),
    "rate": lambda trainer: trainer.lr_schedulers.step(),
    "tokens": lambda trainer: trainer.count(ntokens_seen=0),
    "random numbers": lambda trainer: torch.rand(1),
    "positions": lambda trainer: trainer.dataloader.commit(
        trainer.dataloader.committed.replace({1: ShardPosition(document=9)})
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_covers(donor: Any, change: str) -> None:
    before = export_state(donor)["hash"]
    assert export_state(donor)["hash"] == before

    CHANGES[change](donor)

    assert export_state(donor)["hash"] != before


def test_a_state_of_another_model_is_refused(donor: Any, tmp_path: Path) -> None:
    with rank(tmp_path, seed=1, width=4) as other:
        before = export_state(other)

        with pytest.raises(StateMismatch, match=r"0\.weight has shape \(256, 8\), not \(256, 4\)"):
            load_state(other, export_state(donor))

        assert export_state(other)["hash"] == before["hash"]


# -- what a joiner takes over beside the outer state, under the elastic engine ----------------------------------------


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": parameter.detach()
        for part, module in enumerate(trainer.model_parts)
        for name, parameter in module.named_parameters()
    }


def through_json(trainer: Any) -> Any:
    return json.loads(json.dumps(counters(trainer)))


def test_moments_and_counters_make_a_joiner_go_on_like_its_donor(donor: Any, joiner: Any) -> None:
    given_moments, given_counters = copied(moments(donor)), through_json(donor)
    given_parameters = copied(parameters(donor))
    joiner.train(1)
    assert not same(moments(joiner), given_moments)
    torch.rand(7)

    with torch.no_grad():
        for name, parameter in parameters(joiner).items():
            parameter.copy_(given_parameters[name])
    load_moments(joiner, given_moments)
    load_counters(joiner, given_counters)

    assert same(moments(joiner), given_moments)
    assert counters(joiner) == counters(donor) | {"rng": given_counters["rng"]}
    assert learning_rate(joiner) == learning_rate(donor)
    joiner.inner_step()
    load_counters(donor, given_counters)
    donor.inner_step()
    assert same(parameters(joiner), parameters(donor))
    assert same(moments(joiner), moments(donor))
    assert counters(joiner) == counters(donor)
    assert joiner.dataloader.positions() == donor.dataloader.positions()
    assert not same(moments(joiner), given_moments)


def test_moments_are_those_that_the_optimizer_goes_on_with(donor: Any) -> None:
    live = moments(donor)

    assert live.keys() == {
        f"{part}.{key}" for part in ("0.0", "1.0", "1.1") for key in ("exp_avg", "exp_avg_sq", "step")
    }
    before = copied(live)
    donor.inner_step()
    assert all(torch.equal(tensor, live[name]) for name, tensor in moments(donor).items())
    assert not same(live, before)


def test_moments_that_were_taken_over_are_the_joiners_own(donor: Any, joiner: Any) -> None:
    given = copied(moments(donor))
    load_moments(joiner, given)

    for tensor in given.values():
        tensor.fill_(-1)

    assert same(moments(joiner), moments(donor))


def test_of_a_donor_that_never_stepped_there_is_nothing_to_take_over(donor: Any, joiner: Any) -> None:
    assert moments(joiner) == {}

    load_moments(donor, moments(joiner))

    assert moments(donor) == {}
    donor.inner_step()


@pytest.mark.parametrize("name", ["0.1.exp_avg", "1.2.exp_avg", "2.0.exp_avg"])
def test_moments_of_a_parameter_that_is_not_there_are_refused(donor: Any, name: str) -> None:
    before = copied(moments(donor))

    with pytest.raises(StateMismatch, match=f"have a parameter {name[:3]}, ours have none"):
        load_moments(donor, {**copied(before), name: torch.ones(2)})

    assert same(moments(donor), before)


def test_moments_of_another_shape_are_refused(donor: Any, joiner: Any) -> None:
    given = copied(moments(donor))
    given["0.0.exp_avg_sq"] = torch.ones(256, 4)

    with pytest.raises(StateMismatch, match=r"exp_avg_sq has shape \(256, 4\), not \(256, 8\)"):
        load_moments(joiner, given)

    assert moments(joiner) == {}


def test_counters_hand_on_what_was_committed_and_no_more(donor: Any, joiner: Any) -> None:
    donor.inner_step()

    load_counters(joiner, through_json(donor))

    assert donor.dataloader.positions() != donor.dataloader.committed
    assert joiner.dataloader.positions() == joiner.dataloader.committed == donor.dataloader.committed
    assert (joiner.step, joiner.ntokens_seen) == (donor.step, donor.ntokens_seen)


def test_counters_bring_back_the_same_random_numbers(donor: Any) -> None:
    given = through_json(donor)
    drawn = torch.rand(5)

    load_counters(donor, given)

    assert torch.equal(torch.rand(5), drawn)
    assert not torch.equal(torch.rand(5), drawn)


def test_counters_of_another_number_of_shards_are_refused(donor: Any) -> None:
    given = through_json(donor)
    given["positions"] = given["positions"][:-1]

    with pytest.raises(ValueError, match="positions of 2 virtual shards"):
        load_counters(donor, given)
