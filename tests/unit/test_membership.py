import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchft.manager
from torchft.manager import REPLICA_ID_KEY, Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from elastic_train.config import ConfigError, RunConfig
from elastic_train.device import Device, detect
from elastic_train.diloco.quorum import Formed, QuorumSeat
from elastic_train.replica.membership import Seat, make_group, make_manager, slot_of, wire_device
from elastic_train.replica.rank import Incarnation
from tests.outer import HOST, OUTER, lighthouse
from tests.programs import running


@pytest.mark.parametrize(("replica_id", "slot"), [("replica_0:6f1c", 0), ("replica_12:a:b", 12), ("replica_3", 3)])
def test_the_slot_in_a_replica_id(replica_id: str, slot: int) -> None:
    assert slot_of(replica_id) == slot


@pytest.mark.parametrize(("backend", "kind"), [("auto", "cpu"), ("gloo", "cpu"), ("gloo", "cuda"), ("gloo", "rocm")])
def test_gloo_works_on_every_device(backend: str, kind: str) -> None:
    assert type(make_group(backend, Device(kind), 5.0)) is ProcessGroupGloo  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_an_accelerator_has_its_own_library(backend: str) -> None:
    assert type(make_group(backend, detect(), 5.0)) is ProcessGroupNCCL


def test_nccl_needs_an_accelerator() -> None:
    with pytest.raises(ConfigError, match=r'diloco\.backend = "nccl" needs an accelerator; use "gloo" or "auto"'):
        make_group("nccl", Device("cpu"), 5.0)


@pytest.mark.parametrize(
    ("backend", "kind", "device"),
    [
        ("auto", "cpu", "cpu"),
        ("gloo", "cpu", "cpu"),
        ("gloo", "cuda", "cpu"),
        ("auto", "cuda", "cuda:1"),
        ("nccl", "cuda", "cuda:1"),
        ("auto", "rocm", "cuda:1"),
    ],
)
def test_tensors_go_where_the_group_takes_them_from(backend: str, kind: str, device: str) -> None:
    assert wire_device(backend, Device(kind), torch.device("cuda", 1)) == torch.device(device)  # type: ignore[arg-type]


# -- ids ---------------------------------------------------------------------------------------------------------------


def seat(address: str, slot: int, run: str = "run") -> Seat:
    return Seat(slot=slot, rank=0, ranks=1, lighthouse=address, host=HOST, run=run)


@contextlib.contextmanager
def managed(where: Seat) -> Iterator[Manager]:
    """A Manager, until the end of the context."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    group = make_group("gloo", Device("cpu"), OUTER.connect_timeout_s)
    manager = make_manager(where, config=OUTER, min_replicas=1, store=store, group=group)
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)
        group.abort()


def id_of(where: Seat) -> str:
    with managed(where) as manager:
        return str(manager._store.get(REPLICA_ID_KEY), "utf-8")


def test_a_slot_keeps_its_id_over_incarnations_and_shares_it_with_nobody() -> None:
    with lighthouse() as address:
        first, again = id_of(seat(address, 3)), id_of(seat(address, 3))
        other_slot, other_run = id_of(seat(address, 4)), id_of(seat(address, 3, "another"))

    assert first == again
    assert len({first, other_slot, other_run}) == 3
    assert [slot_of(i) for i in (first, other_slot, other_run)] == [3, 4, 3]


def test_the_runs_token_makes_the_difference_and_does_not_show(tmp_path: Path) -> None:
    one, two = (
        Seat.of(
            Incarnation(
                config=RunConfig(),
                run_dir=tmp_path,
                slot=0,
                number=number,
                joining=False,
                lighthouse="http://nowhere",
                host=HOST,
                fired=frozenset(),
                token=token,
            ),
            rank=0,
            ranks=1,
        )
        for number, token in ((0, "secret"), (1, "another"))
    )
    assert one.run != two.run
    assert "secret" not in one.run


def test_who_begins_anew_with_all_others_shares_no_id_with_those_who_died(tmp_path: Path) -> None:
    incarnation = Incarnation(
        config=RunConfig(),
        run_dir=tmp_path,
        slot=0,
        number=1,
        joining=False,
        lighthouse="http://nowhere",
        host=HOST,
        fired=frozenset(),
        token="secret",
    )
    before, after = (Seat.of(replace(incarnation, restores=number), rank=0, ranks=1) for number in (0, 1))
    assert before.run != after.run


def test_torchft_gives_other_managers_ids_as_before() -> None:
    with lighthouse() as address, managed(seat(address, 0)):
        assert torchft.manager.uuid is uuid


def quorum_of(*seats: QuorumSeat) -> list[Formed]:
    """The next quorum, as each of them sees it."""
    for each in seats:
        each.announce(0)
    return [taken(each) for each in seats]


def taken(seat: QuorumSeat) -> Formed:
    assert seat.wait(30), "no quorum"
    return seat.take()


def settled(*seats: QuorumSeat) -> list[Formed]:
    """A quorum of these that is not their first, so that nobody asks for new groups any more."""
    quorum_of(*seats)
    for each in seats:
        each.rebuild_group(broken=False)
    return quorum_of(*seats)


def test_a_joiner_under_an_old_id_makes_a_new_quorum_for_all() -> None:
    with lighthouse(min_replicas=2) as address, managed(seat(address, 0)) as manager:
        survivor = QuorumSeat(manager)
        with managed(seat(address, 1)) as old:
            before = settled(survivor, QuorumSeat(old))
        with managed(seat(address, 1)) as new:
            after = quorum_of(survivor, QuorumSeat(new))

    assert {formed.replica_ids for formed in before} == {formed.replica_ids for formed in after}
    assert len({formed.number for formed in after}) == len({formed.key for formed in after}) == 1
    assert after[0].number > before[0].number
    assert after[0].key != before[0].key


_MEMBER = """
import sys
from datetime import timedelta
import torch.distributed as dist
from elastic_train.device import Device
from elastic_train.diloco.quorum import QuorumSeat
from elastic_train.replica.membership import Seat, make_group, make_manager
from tests.outer import HOST, OUTER

store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
where = Seat(slot=1, rank=0, ranks=1, lighthouse=sys.argv[1], host=HOST, run="run")
group = make_group("gloo", Device("cpu"), OUTER.connect_timeout_s)
member = QuorumSeat(make_manager(where, config=OUTER, min_replicas=1, store=store, group=group))
member.announce(0)
assert member.wait(60)
member.take()
print("in", flush=True)
input()
"""


def test_a_replica_that_is_back_under_its_old_id_is_what_the_others_wait_for() -> None:
    """With heartbeats that count for a minute, the Lighthouse takes the killed member for one that is late."""
    with (
        lighthouse(min_replicas=2, heartbeat_timeout_ms=60_000) as address,
        contextlib.ExitStack() as stack,
        running(_MEMBER, address) as member,
    ):
        survivor = QuorumSeat(stack.enter_context(managed(seat(address, 0))))
        survivor.announce(0)
        assert member.stdout is not None
        assert member.stdout.readline() == "in\n"
        before = taken(survivor)
        member.kill()
        member.wait()

        # One with another id does not take its place.
        stranger = QuorumSeat(stack.enter_context(managed(seat(address, 2))))
        survivor.announce(0)
        stranger.announce(0)
        assert not survivor.wait(1)
        assert not stranger.fired

        back = QuorumSeat(stack.enter_context(managed(seat(address, 1))))
        back.announce(0)
        after = [taken(each) for each in (survivor, back, stranger)]

    assert [slot_of(i) for i in before.replica_ids] == [0, 1]
    assert {formed.replica_ids[:2] for formed in after} == {before.replica_ids}
    assert len({formed.key for formed in after}) == 1
    assert after[0].number > before.number
