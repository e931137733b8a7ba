"""What a rank proves of the state that the replicas have agreed on."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.diloco.control import ControlGroup
from elastic_train.diloco.flat import flatten
from elastic_train.diloco.ledger import Ledger, parts_of
from elastic_train.diloco.publication import OUTER
from elastic_train.diloco.quorum import Formed
from elastic_train.peer_ckpt.shards import StateMismatch, combine
from elastic_train.peer_ckpt.snapshot import Snapshot
from tests.controls import Alone, each, together

MEMBERS = [(0, 3), (2, 0)]


def ledger_of(*sizes: int, control: ControlGroup | None = None, first: float = 0.0) -> Ledger:
    """Of fragments of those sizes, whose numbers count up."""
    modules = [nn.ParameterList([nn.Parameter(torch.arange(float(size)) + first)]) for size in sizes]
    return Ledger(flatten(modules, device=torch.device("cpu"), pin_memory=False), control or Alone())


def commit(ledger: Ledger, outer_step: int, fragment: int, value: float) -> int:
    """An outer step whose candidate is ``value`` throughout; the hash of it."""
    candidate = ledger.fragments[fragment].candidate
    candidate.anchor.fill_(value)
    candidate.momentum.fill_(-value)
    part = candidate.hash()
    state_hash = combine([ledger.rank_hash_with(fragment, part)])
    ledger.commit(outer_step, fragment, part=part, state_hash=state_hash, members=MEMBERS)
    return state_hash


def shown(ledger: Ledger, outer_step: int, **header: Any) -> Snapshot:
    """What a peer gets of it."""
    outer: dict[str, torch.Tensor] = {}
    for index, fragment in enumerate(ledger.fragments):
        outer[f"{index}.anchor"] = fragment.committed.anchor.clone()
        outer[f"{index}.momentum"] = fragment.committed.momentum.clone()
    return Snapshot({**ledger.header(outer_step), **header}, {OUTER: outer})


def test_all_replicas_begin_with_the_same_hash() -> None:
    one, other = ledger_of(3, 2), ledger_of(3, 2)

    assert one.state_hash == other.state_hash == combine([one.rank_hash])
    assert one.rank_hash == combine([fragment.committed.hash() for fragment in one.fragments])
    assert ledger_of(3, 2, first=1.0).state_hash != one.state_hash
    assert one.is_sound()
    assert (one.history, one.members) == ({}, [])


def test_the_state_is_that_of_all_ranks_in_their_order() -> None:
    controls = together(2)

    ranks = each(2, lambda rank: ledger_of(3, control=controls[rank], first=float(rank)))

    assert ranks[0].rank_hash != ranks[1].rank_hash
    assert [ledger.state_hash for ledger in ranks] == [combine([ledger.rank_hash for ledger in ranks])] * 2


def test_a_candidate_changes_nothing_until_it_is_committed() -> None:
    ledger = ledger_of(3, 2)
    before = ledger.rank_hash, ledger.state_hash

    ledger.fragments[1].candidate.anchor.fill_(7.0)
    foreseen = ledger.rank_hash_with(1, ledger.fragments[1].candidate.hash())

    assert (ledger.rank_hash, ledger.state_hash) == before
    assert ledger.is_sound()
    assert foreseen != ledger.rank_hash
    assert ledger.rank_hash_with(1, ledger.fragments[1].committed.hash()) == ledger.rank_hash


@pytest.mark.parametrize("fragment", [0, 1])
def test_a_commit_is_what_was_foreseen(fragment: int) -> None:
    ledger = ledger_of(3, 2)
    other = ledger.fragments[1 - fragment].committed
    ledger.fragments[fragment].candidate.anchor.fill_(5.0)
    foreseen = ledger.rank_hash_with(fragment, ledger.fragments[fragment].candidate.hash())

    ledger.commit(4, fragment, part=ledger.fragments[fragment].candidate.hash(), state_hash=-9, members=MEMBERS)

    assert ledger.rank_hash == foreseen
    assert set(ledger.fragments[fragment].committed.anchor.tolist()) == {5.0}
    assert ledger.fragments[1 - fragment].committed is other
    assert (ledger.state_hash, ledger.history, ledger.members) == (-9, {4: -9}, MEMBERS)
    assert ledger.is_sound()


def test_only_the_last_outer_steps_are_remembered() -> None:
    ledger = ledger_of(3, 2)

    hashes = {step: commit(ledger, step, step % 2, float(step)) for step in range(1, 12)}

    assert ledger.history == {step: hashes[step] for step in range(4, 12)}
    assert len(set(hashes.values())) == 11


@pytest.mark.parametrize("kind", ["anchor", "momentum"])
@pytest.mark.parametrize("fragment", [0, 1])
@pytest.mark.parametrize("bit", [0, 30])
def test_one_bit_that_flips_in_memory_is_found(kind: str, fragment: int, bit: int) -> None:
    ledger = ledger_of(3, 2)
    for step in range(1, 4):
        commit(ledger, step, step % 2, float(step))
    agreed = ledger.rank_hash

    word = getattr(ledger.fragments[fragment].committed, kind).view(torch.int32)
    word[1] ^= 1 << bit

    assert not ledger.is_sound()
    # What was agreed on is what it was.
    assert ledger.rank_hash == agreed
    word[1] ^= 1 << bit
    assert ledger.is_sound()


def test_a_candidate_that_is_being_computed_is_no_damage() -> None:
    ledger = ledger_of(3)

    ledger.fragments[0].candidate.momentum.fill_(torch.nan)

    assert ledger.is_sound()


def test_a_peer_that_adopts_a_state_has_it_with_all_its_proofs() -> None:
    donor, joiner = ledger_of(3, 2), ledger_of(3, 2, first=50.0)
    donor.count.see(Formed(key=1, number=6, replica_ids=("a", "b"), rank=0))
    donor.count.agree([40])
    for step in range(1, 4):
        commit(donor, step, step % 2, float(step))

    joiner.adopt(shown(donor, 3), carried=())

    assert (joiner.rank_hash, joiner.state_hash) == (donor.rank_hash, donor.state_hash)
    assert joiner.is_sound()
    assert (joiner.history, joiner.members) == (donor.history, MEMBERS)
    assert joiner.count.to_list() == donor.count.to_list() == [40, 6, 1]
    assert json.loads(json.dumps(joiner.header(3))) == json.loads(json.dumps(donor.header(3)))
    # And both go on alike.
    assert [commit(ledger, 4, 0, 4.5) for ledger in (donor, joiner)] == [donor.state_hash] * 2
    assert joiner.history == donor.history


def test_the_header_names_the_state_and_its_outer_step() -> None:
    ledger = ledger_of(3)
    state_hash = commit(ledger, 1, 0, 2.0)

    assert json.loads(json.dumps(ledger.header(1))) == {
        "outer_step": 1,
        "rank_hash": ledger.rank_hash,
        "state_hash": state_hash,
        "history": {"1": state_hash},
        "members": [[0, 3], [2, 0]],
        "quorum_count": [0, 0, 0],
        "retired": [],
    }


@pytest.mark.parametrize("carried", [set(), {0}, {1}, {0, 1}])
def test_fragments_that_are_carried_keep_what_they_have_learned(carried: set[int]) -> None:
    parameters = [nn.Parameter(torch.arange(float(size))) for size in (3, 2)]
    modules = [nn.ParameterList([parameter]) for parameter in parameters]
    ledger = Ledger(flatten(modules, device=torch.device("cpu"), pin_memory=False), Alone())
    donor = ledger_of(3, 2, first=8.0)
    for parameter in parameters:
        parameter.data += 0.5

    ledger.adopt(shown(donor, 3), carried=carried)

    for index, (parameter, fragment) in enumerate(zip(parameters, donor.fragments, strict=True)):
        assert torch.equal(parameter.detach(), fragment.committed.anchor + 0.5 * (index in carried))
    assert ledger.is_sound()
    assert ledger.rank_hash == donor.rank_hash


def test_the_parts_of_a_snapshot_hash_as_its_owner_says() -> None:
    ledger = ledger_of(3, 2)
    commit(ledger, 1, 1, 2.0)

    snapshot = shown(ledger, 1)

    assert combine([part.hash() for part in parts_of(snapshot, 2)]) == snapshot.header["rank_hash"]
    with pytest.raises(KeyError):
        parts_of(snapshot, 3)


@pytest.mark.parametrize("sizes", [(4, 2), (3, 1)])
def test_a_state_of_other_sizes_is_refused(sizes: tuple[int, int]) -> None:
    ledger = ledger_of(3, 2)
    before = [fragment.committed.hash() for fragment in ledger.fragments], ledger.header(0)

    with pytest.raises(StateMismatch):
        ledger.adopt(shown(ledger_of(*sizes), 3), carried=())

    assert ([fragment.committed.hash() for fragment in ledger.fragments], ledger.header(0)) == before
