"""How the engine goes from one outer step to the next: replicas of one rank in threads, with a real group, registry
and servers. Only the Lighthouse is played by the test; what it takes to break is the matter of the process tests."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchft.process_group import ProcessGroupGloo

from elastic_train.config import DilocoConfig
from elastic_train.diloco.elastic import ElasticEngine
from elastic_train.diloco.engine import NonFinite, Sync, SyncFailed, SyncKind, Trained
from elastic_train.diloco.flat import flatten
from elastic_train.diloco.peers import Offer, Peers, Transfers
from elastic_train.diloco.presence import Identity
from elastic_train.diloco.publication import INNER
from elastic_train.diloco.quorum import Formed, QuorumSeat
from elastic_train.diloco.schedule import OuterSchedule
from elastic_train.lighthouse.registry import RegistryServer
from elastic_train.peer_ckpt.shards import load_tensors
from elastic_train.peer_ckpt.snapshot import Snapshot
from tests.controls import Alone

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
CPU = torch.device("cpu")
CONFIG = DilocoConfig(sync_every=2, outer_lr=0.7, timeout_s=TIMEOUT_S, quorum_timeout_s=TIMEOUT_S, max_retries=1)
TOKENS = (10, 30, 20)
SIZES = (5, 3)

T = TypeVar("T")


class Lighthouse:
    """Gives a quorum as soon as all who are expected have asked."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self._changed = threading.Condition()
        self._expected: frozenset[int] = frozenset()
        self._asked: set[int] = set()
        self._formed: dict[int, Formed] = {}
        self._numbers = itertools.count(1)

    def expect(self, *slots: int) -> None:
        with self._changed:
            self._expected = frozenset(slots)
            self._look()

    def ask(self, slot: int) -> None:
        with self._changed:
            self._asked.add(slot)
            self._look()

    def answered(self, slot: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: slot in self._formed, timeout_s)

    def take(self, slot: int) -> Formed:
        with self._changed:
            return self._formed.pop(slot)

    def _look(self) -> None:
        if self._expected and self._expected <= self._asked:
            number, slots = next(self._numbers), sorted(self._expected)
            names = tuple(f"replica_{slot}:x" for slot in slots)
            for rank, slot in enumerate(slots):
                self._formed[slot] = Formed(key=1000 + number, number=number, replica_ids=names, rank=rank)
            self._asked -= self._expected
            self._changed.notify_all()


class Seat(QuorumSeat):
    """A seat at that Lighthouse. Every quorum has a group of its own."""

    def __init__(self, slot: int, lighthouse: Lighthouse, group: ProcessGroupGloo) -> None:
        self._slot, self._lighthouse, self._group = slot, lighthouse, group
        self._asking = False
        self.left = False

    @property
    def fired(self) -> bool:
        return self._asking and self._lighthouse.answered(self._slot, 0.0)

    def announce(self, outer_step: int) -> None:
        if not self._asking:
            self._asking = True
            self._lighthouse.ask(self._slot)

    def wait(self, timeout_s: float) -> bool:
        return not self._asking or self._lighthouse.answered(self._slot, timeout_s)

    def take(self) -> Formed:
        self._asking = False
        formed = self._lighthouse.take(self._slot)
        place = f"{HOST}:{self._lighthouse.store.port}/{formed.key}"
        self._group.configure(place, str(formed.rank), formed.rank, len(formed.replica_ids))
        return formed

    def rebuild_group(self, broken: bool) -> None: ...

    def shutdown(self) -> None:
        self.left = True


class Journal:
    """Notes what it is told, and lets the test act on it."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.on_retry: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*values: Any) -> None:
            self.told.append((name, *values))
            if name == "retried":
                self.on_retry()

        return note

    def of(self, *names: str) -> list[tuple[Any, ...]]:
        return [told for told in self.told if told[0] in names]


class Replica:
    """A trainer of one rank with its engine. Its inner steps add what the test says to each parameter."""

    def __init__(self, slot: int, lighthouse: Lighthouse, registry: str, config: DilocoConfig, steps: int) -> None:
        self.slot = slot
        self.parameters = [nn.Parameter(torch.arange(float(size))) for size in SIZES[: config.fragments]]
        self.moment = torch.full((2,), float(slot))
        self.points: list[str] = []
        self.strike: Callable[[str], None] = lambda point: None
        self.journal = Journal()
        self.followed: list[bool] = []
        self.group = ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S))
        self.seat = Seat(slot, lighthouse, self.group)
        modules = [nn.ParameterList([parameter]) for parameter in self.parameters]
        trainee: Any = self
        journal: Any = self.journal
        self.engine = ElasticEngine(
            Identity(
                slot=slot,
                incarnation=0,
                host=HOST,
                registry=registry,
                token=TOKEN,
                config_digest=0,
                transfers=Transfers(timeout_s=TIMEOUT_S),
                watchdog_s=TIMEOUT_S,
            ),
            config=config,
            schedule=OuterSchedule(steps=steps, sync_every=config.sync_every, fragments=config.fragments),
            fragments=flatten(modules, device=CPU, pin_memory=False),
            control=Alone(),
            group=self.group,
            wire_device=CPU,
            make_seat=lambda: self.seat,
            trainee=trainee,
            journal=journal,
        )

    # What the engine asks of a trainee.

    def at_point(self, point: str) -> None:
        self.points.append(point)
        self.strike(point)

    def alive(self) -> None: ...

    def waiting(self) -> None: ...

    def progress(self) -> torch.Tensor:
        return torch.full((1, 4), 10**self.slot, dtype=torch.int64)

    def moments(self) -> dict[str, torch.Tensor]:
        return {"exp_avg": self.moment}

    def counters(self) -> dict[str, Any]:
        return {}

    def take(self, snapshot: Snapshot) -> None:
        load_tensors(self.moments().items(), snapshot.sections[INNER])

    def follow(self, snapshot: Snapshot, *, included: bool) -> None:
        self.followed.append(included)

    # What a trainer does.

    def train(self, by: float, *, steps: int = CONFIG.sync_every, loss: float = 1.0, seconds: float = 1.0) -> None:
        for _ in range(steps):
            self.engine.before_optimizer()
            for parameter in self.parameters:
                parameter.data += by
            trained = Trained(tokens=TOKENS[self.slot], seconds=seconds, loss=torch.tensor(loss), grad_norm=loss / 2)
            self.engine.step_ended(trained)

    def sync(self) -> Sync:
        sync = self.engine.sync()
        self.engine.settled()
        # As a trainer's next step does.
        self.engine.before_optimizer()
        return sync

    def until_committed(self, by: float = 1.0) -> list[Sync]:
        """Sync, and train on and sync again as long as it ends otherwise."""
        syncs: list[Sync] = []
        while not (syncs and syncs[-1].committed):
            while not self.engine.due:
                self.train(by, steps=1)
            syncs.append(self.sync())
        return syncs

    def values(self) -> list[list[float]]:
        return [parameter.tolist() for parameter in self.parameters]

    def anchor_hash(self) -> str:
        return self.engine.anchor_hash(lambda value: [value])

    def close(self) -> None:
        self.engine.close()
        self.group.abort()


class World:
    """A run's replicas. Those of a cold start have entered it."""

    def __init__(self, replicas: int, config: DilocoConfig = CONFIG, *, steps: int = 100) -> None:
        self.config, self.steps = config, steps
        self.lighthouse = Lighthouse()
        self.registry = RegistryServer(HOST, 0, TOKEN)
        self._pool = ThreadPoolExecutor(len(TOKENS))
        self.replicas: list[Replica] = []
        for _ in range(replicas):
            replica = self.add()
            replica.engine.open_membership()
            replica.engine.enter()
            replica.engine.before_optimizer()
        self.lighthouse.expect(*range(replicas))

    def add(self) -> Replica:
        replica = Replica(len(self.replicas), self.lighthouse, self.registry.url, self.config, self.steps)
        self.replicas.append(replica)
        return replica

    def each(self, act: Callable[[Replica], T], among: Sequence[Replica] | None = None) -> list[T]:
        """Have replicas act at the same time; their results, or the first failure."""
        futures = [self._pool.submit(act, replica) for replica in (self.replicas if among is None else among)]
        return [future.result() for future in futures]

    def interval(self) -> list[Sync]:
        """Let all train for an interval, each its own way, and sync."""
        for replica in self.replicas:
            replica.train(replica.slot + 1.0)
        return self.each(Replica.sync)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self.registry.close()
        self._pool.shutdown()


@contextlib.contextmanager
def world(replicas: int, config: DilocoConfig = CONFIG, *, steps: int = 100) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        made = World(replicas, config, steps=steps)
        try:
            yield made
        finally:
            made.close()


def test_replicas_commit_the_mean_of_what_they_learned_by_their_tokens() -> None:
    with world(2) as run:
        one, two = run.replicas
        one.train(1.0, loss=2.0)
        two.train(3.0, loss=4.0)
        assert (one.engine.due, one.engine.next_step) == (True, 2)

        syncs = run.each(Replica.sync)

        # A quarter of 2 and three quarters of 6, by 0.7 and, for Nesterov's momentum of 0.9, 1.9 times.
        moved = (0.25 * 2 + 0.75 * 6) * 0.7 * 1.9
        expected = torch.arange(5.0) + moved
        for replica, sync in zip(run.replicas, syncs, strict=True):
            assert sync.kind is SyncKind.COMMITTED
            assert (sync.outer_step, sync.participants) == (1, (0, 1))
            assert sync.tokens == 2 * TOKENS[replica.slot]
            assert sync.loss == pytest.approx(3.5)
            assert sync.grad_norm == pytest.approx(1.75)
            assert sync.progress is not None
            assert sync.progress.tolist() == [[11] * 4]
            torch.testing.assert_close(replica.parameters[0].detach(), expected)
            assert torch.equal(replica.engine.anchor()["0"], replica.parameters[0].detach())
            assert replica.engine.momentum()["0"].tolist() == [-5.0] * 5
            assert (replica.engine.outer_step, replica.engine.next_step, replica.engine.due) == (1, 3, False)
            assert replica.points == ["snapshot", "quorum", "reduce", "vote", "commit", "snapshot"]
        assert one.anchor_hash() == two.anchor_hash()
        assert one.engine.tokens == 2 * TOKENS[0]


def test_a_replica_is_given_up_once_all_members_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[int, tuple[int, ...]] = {0: (), 1: (), 2: ()}
    monkeypatch.setattr(Peers, "retired", property(lambda peers: known[peers._slot]))
    with world(2) as run:
        known[0] = (7, 5)
        assert [sync.retired for sync in run.interval()] == [(), ()]

        known[1] = (7,)
        assert [sync.retired for sync in run.interval()] == [(7,), (7,)]

        known[1] = (7, 5)
        assert [sync.retired for sync in run.interval()] == [(5,), (5,)]
        assert [sync.retired for sync in run.interval()] == [(), ()]
        # Who comes later takes it over with the state.
        late = run.add()
        late.engine.join()
        assert late.engine._ledger.retired == (7, 5)


def test_a_run_goes_on_to_its_end_and_leaves_the_membership() -> None:
    with world(2, steps=5) as run:
        kinds = [[sync.kind for sync in run.interval()] for _ in range(2)]
        assert not run.replicas[0].seat.left
        for replica in run.replicas:
            replica.train(1.0, steps=1)
        run.each(Replica.sync)

        assert kinds == [[SyncKind.COMMITTED] * 2] * 2
        assert [replica.engine.outer_step for replica in run.replicas] == [3, 3]
        assert [replica.seat.left for replica in run.replicas] == [True, True]
        assert len({replica.anchor_hash() for replica in run.replicas}) == 1


@pytest.mark.parametrize("merge_alpha", [0.0, 0.5])
def test_a_sync_beside_the_inner_steps_takes_in_what_was_learned_before(merge_alpha: float) -> None:
    config = replace(CONFIG, sync_every=3, overlap_steps=1, merge_alpha=merge_alpha)
    with world(2, config) as run:
        for replica in run.replicas:
            replica.train(1.0, steps=2)
            replica.train(50.0, steps=1)

        syncs = run.each(Replica.sync)

        anchor = torch.arange(5.0) + 2 * 0.7 * 1.9
        for replica, sync in zip(run.replicas, syncs, strict=True):
            assert sync.committed
            torch.testing.assert_close(replica.engine.anchor()["0"], anchor)
            kept = torch.lerp(torch.arange(5.0) + 52, anchor, 1 - merge_alpha)
            torch.testing.assert_close(replica.parameters[0].detach(), kept)


def test_fragments_take_turns() -> None:
    with world(2, replace(CONFIG, fragments=2)) as run:
        before = run.replicas[0].engine.anchor()["1"].clone()
        for replica in run.replicas:
            replica.train(1.0, steps=1)
        run.each(Replica.sync)
        anchors = run.replicas[0].engine.anchor()

        assert not torch.equal(anchors["0"], torch.arange(5.0))
        assert torch.equal(anchors["1"], before)
        # It is not touched where it did not sync.
        assert torch.equal(run.replicas[0].parameters[1].detach(), before + 1)


def test_an_attempt_that_fails_is_made_again_with_the_same_contribution() -> None:
    with world(2) as run, world(2) as undisturbed:
        one, _ = run.replicas

        def strike(point: str) -> None:
            if point == "reduce":
                one.strike = lambda point: None
                raise OSError("no memory")

        one.strike = strike
        syncs = run.interval()
        undisturbed.interval()

        assert [sync.kind for sync in syncs] == [SyncKind.COMMITTED] * 2
        assert [told[1:4] for told in one.journal.of("retried")] == [(1, 1, "no memory")]
        assert one.anchor_hash() == undisturbed.replicas[0].anchor_hash()


def test_a_replica_that_fails_again_and_again_gives_up() -> None:
    def strike(point: str) -> None:
        if point == "reduce":
            raise OSError("no memory")

    with world(1, replace(CONFIG, max_retries=2)) as run:
        (replica,) = run.replicas
        replica.strike = strike
        replica.train(1.0)

        with pytest.raises(SyncFailed, match="3 attempts at outer step 1 failed, the last: no memory"):
            replica.sync()

        assert [told[2] for told in replica.journal.of("retried")] == [1, 2, 3]
        assert torch.equal(replica.engine.anchor()["0"], torch.arange(5.0))
        assert replica.values() == [[2.0, 3.0, 4.0, 5.0, 6.0]]


def test_nobody_goes_on_without_a_peer_that_lives_on() -> None:
    with world(2, replace(CONFIG, max_retries=0)) as run:
        run.interval()
        one, two = run.replicas
        one.train(1.0)
        two.train(1.0)
        retries = 0

        def retried() -> None:
            # More often than attempts may fail.
            nonlocal retries
            retries += 1
            if retries == 3:
                run.lighthouse.expect(0, 1)
                arrived.set()

        arrived = threading.Event()
        one.journal.on_retry = retried
        run.lighthouse.expect(0)

        def sync(replica: Replica) -> Sync:
            if replica is two:
                assert arrived.wait(TIMEOUT_S)
            return replica.sync()

        syncs = run.each(sync)

        assert [sync.participants for sync in syncs] == [(0, 1)] * 2
        causes = {told[3] for told in one.journal.of("retried")}
        assert causes == {"replica 1 is not in this quorum and lives on at outer step 1"}
        assert one.anchor_hash() == two.anchor_hash()


def test_a_peer_that_has_left_is_not_waited_for_and_still_gives_its_state() -> None:
    with world(2, replace(CONFIG, max_retries=0)) as run:
        run.interval()
        one, two = run.replicas
        two.engine.leave()
        run.lighthouse.expect(0)
        late = run.add()
        assert two.seat.left

        late.engine.join()
        assert late.anchor_hash() == two.anchor_hash()
        one.train(1.0)
        sync = one.sync()

        assert (sync.kind, sync.outer_step, sync.participants) == (SyncKind.COMMITTED, 2, (0,))
        assert one.journal.of("retried") == []


def test_a_commit_of_a_peer_that_has_left_is_not_made_again() -> None:
    with world(2) as run:
        run.interval()
        gone, behind = run.replicas
        run.lighthouse.expect(0)
        # As a peer that it is right to leave behind, for the sake of the test.
        gone.engine._ledger.members = [(0, 0)]
        gone.train(1.0)
        gone.sync()
        gone.engine.leave()
        run.lighthouse.expect(1)
        behind.train(3.0)

        syncs = behind.until_committed()

        assert [(sync.kind, sync.outer_step) for sync in syncs] == [(SyncKind.CAUGHT_UP, 2), (SyncKind.COMMITTED, 3)]
        assert syncs[0].carried == 2 * TOKENS[1]
        assert syncs[1].tokens >= syncs[0].carried


def test_one_that_no_peer_mends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(3) as run:
        run.interval()
        broken = run.replicas[1]
        for replica in run.replicas:
            replica.train(1.0)
        broken.parameters[0].data[2] = math.nan
        monkeypatch.setattr(broken.engine._adoption, "heal_from_any", lambda at_least, among: None)

        def sync(replica: Replica) -> str:
            if replica is not broken:
                return replica.sync().kind.value
            with pytest.raises(NonFinite) as raised:
                replica.sync()
            return str(raised.value)

        said = run.each(sync)[1]

        assert "no peer's state mended it" in said
        assert broken.journal.of("fenced", "heal_failed") == [
            ("fenced", "non_finite", 1),
            ("heal_failed", "non_finite", said),
        ]


def test_one_whose_parameters_are_no_numbers_is_mended_in_place() -> None:
    with world(3) as run:
        run.interval()
        for replica in run.replicas:
            replica.train(1.0)
        broken = run.replicas[1]
        broken.parameters[0].data[2] = math.nan

        syncs = run.each(Replica.sync)

        assert [sync.kind for sync in syncs] == [SyncKind.COMMITTED, SyncKind.HEALED, SyncKind.COMMITTED]
        assert [syncs[0].participants, syncs[2].participants] == [(0, 2)] * 2
        assert broken.journal.of("fenced") == [("fenced", "non_finite", 1)]
        assert torch.equal(broken.parameters[0].detach(), broken.engine.anchor()["0"])
        assert bool(torch.isfinite(broken.parameters[0]).all())
        # Whoever healed it, it is that one's moments that it has.
        assert broken.moment[0] in (0.0, 2.0)


def test_if_all_parameters_are_no_numbers_the_run_says_what_to_change() -> None:
    with world(2) as run:
        for replica in run.replicas:
            replica.train(math.inf)

        def sync(replica: Replica) -> str:
            with pytest.raises(NonFinite) as raised:
                replica.sync()
            return str(raised.value)

        assert all("lower optimizer.lr" in said for said in run.each(sync))


@pytest.mark.parametrize("kind", ["anchor", "momentum"])
def test_one_whose_memory_changed_takes_a_peers_state(kind: str) -> None:
    with world(3) as run:
        run.interval()
        struck = run.replicas[2]
        for replica in run.replicas:
            replica.train(1.0)
        held = struck.engine.anchor() if kind == "anchor" else struck.engine.momentum()
        held["0"].view(torch.int32)[1] ^= 1 << 20

        syncs = run.each(Replica.until_committed)

        assert [[sync.kind for sync in of_one] for of_one in syncs] == [
            [SyncKind.COMMITTED],
            [SyncKind.COMMITTED],
            [SyncKind.HEALED, SyncKind.COMMITTED],
        ]
        assert {of_one[-1].participants for of_one in syncs} == {(0, 1, 2)}
        assert struck.journal.of("fenced") == [("fenced", "diverged", 1)]
        assert struck.journal.of("joined") == [("joined", 1, 3)]
        assert len({replica.anchor_hash() for replica in run.replicas}) == 1
        # Nobody else takes a peer's state for it.
        assert not any(replica.journal.of("fenced") for replica in run.replicas[:2])


def test_a_joiner_takes_a_peers_state_and_is_in_the_next_sync() -> None:
    with world(2) as run:
        run.interval()
        late = run.add()
        run.lighthouse.expect(0, 1, 2)
        for replica in run.replicas[:2]:
            replica.train(1.0)

        def act(replica: Replica) -> list[Sync]:
            if replica is not late:
                return replica.until_committed()
            healed = replica.engine.join()
            replica.engine.settled()
            return [healed, *replica.until_committed(1.0)]

        syncs = run.each(act)

        assert [[sync.kind for sync in of_one] for of_one in syncs] == [
            [SyncKind.COMMITTED],
            [SyncKind.COMMITTED],
            [SyncKind.HEALED, SyncKind.COMMITTED],
        ]
        assert {of_one[-1].participants for of_one in syncs} == {(0, 1, 2)}
        assert len({replica.anchor_hash() for replica in run.replicas}) == 1
        # With the steps that it had done when the quorum was there.
        assert syncs[2][-1].tokens in (TOKENS[2], 2 * TOKENS[2])
        assert len(late.journal.of("heal_finished")) == 1


@pytest.mark.parametrize("knows", ["waits", "votes"])
def test_one_that_is_behind_catches_up_with_what_it_has_learned(knows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2) as run:
        run.interval()
        ahead, behind = run.replicas
        run.lighthouse.expect(0)
        # As a peer that it is right to leave behind, for the sake of the test.
        ahead.engine._ledger.members = [(0, 0)]
        ahead.train(1.0)
        ahead.sync()
        behind.train(1.0)
        if knows == "votes":
            # It hears of it from the metadata, before it looks for itself.
            ahead.train(1.0)
            run.lighthouse.expect(0, 1)
            look, published = behind.engine._adoption.look, threading.Event()

            def look_late(*arguments: Any) -> Offer | None:
                assert published.wait(TIMEOUT_S)
                return look(*arguments)

            def sync(replica: Replica) -> Sync:
                ended = replica.sync()
                published.set()
                return ended

            monkeypatch.setattr(behind.engine._adoption, "look", look_late)
            syncs = run.each(sync)
            assert syncs[0].participants == (0,)
            caught_up = syncs[1]
        else:
            run.lighthouse.expect()
            caught_up = behind.sync()

        assert caught_up.kind is SyncKind.CAUGHT_UP
        assert caught_up.outer_step == ahead.engine.outer_step
        assert behind.followed == [False]
        assert behind.anchor_hash() == ahead.anchor_hash()
        learned = behind.parameters[0].detach() - behind.engine.anchor()["0"]
        torch.testing.assert_close(learned, torch.full((5,), 2.0))


def test_replicas_of_different_speed_get_intervals_of_the_same_time() -> None:
    with world(2, replace(CONFIG, sync_every=6, interval="time")) as run:
        one, two = run.replicas
        one.train(1.0, steps=6, seconds=0.1)
        two.train(1.0, steps=6, seconds=0.2)
        run.each(Replica.sync)

        steps = []
        for replica in run.replicas:
            done = 0
            while not replica.engine.due:
                replica.train(1.0, steps=1)
                done += 1
            steps.append(done)

        assert steps == [8, 4]
