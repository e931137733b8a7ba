from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.device import Device
from elastic_train.diloco.engine import COLD_START_STEP
from elastic_train.diloco.quorum import FencedClient, Formed, QuorumCount, QuorumFailed, QuorumSeat
from elastic_train.replica.membership import Seat, make_group, make_manager, slot_of
from tests.outer import HOST, OUTER, lighthouse

PAIR = ("replica_0:a", "replica_1:b")
REPLACED = ("replica_0:a", "replica_1:c")
ALONE = ("replica_0:a",)


class Lighthouse:
    """A ManagerClient that gives the answer it was told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Any = None
        self.other = "passed through"

    def will_say(self, number: int, members: tuple[str, ...], max_step: int = 0, rank: int = 0) -> None:
        self.answer = SimpleNamespace(
            quorum_id=number, replica_ids=list(members), max_step=max_step, replica_rank=rank, heal=False
        )

    def _quorum(self, **request: Any) -> Any:
        self.asked.append(request)
        self.answer.max_step = max(self.answer.max_step, request["step"])
        return self.answer


def keys_of(number: int, members: tuple[str, ...], *asked: tuple[FencedClient, int]) -> list[int]:
    """The keys of the members of one quorum, each of which asks at its step and hears the greatest of all."""
    greatest = max(client._stamp << 24 | step for client, step in asked)
    keys = []
    for client, step in asked:
        client._client.will_say(number, members, greatest)
        answer = client._quorum(group_rank=0, step=step, commit_failures=0)
        assert client.formed is not None
        assert answer.quorum_id == client.formed.key
        assert answer.max_step < 2**24
        keys.append(client.formed.key)
    return keys


def key_of(client: FencedClient, number: int, members: tuple[str, ...], step: int = 1) -> int:
    return keys_of(number, members, (client, step))[0]


def member(*, is_new: bool = False) -> FencedClient:
    """One of a run; a new incarnation asks for a new group."""
    client = FencedClient(Lighthouse())
    client.stamp(is_new)
    return client


def test_the_answer_is_kept_and_the_rest_passes_through() -> None:
    asked = Lighthouse()
    client = FencedClient(asked)
    asked.will_say(4, PAIR, 9, 1)

    answer = client._quorum(group_rank=0, step=3, commit_failures=0)

    assert client.formed == Formed(key=answer.quorum_id, number=4, replica_ids=PAIR, rank=1)
    assert (answer.max_step, answer.replica_rank) == (9, 1)
    assert asked.asked == [{"group_rank": 0, "step": 3, "commit_failures": 0}]
    assert client.other == "passed through"


def test_a_stamp_is_above_the_step_and_makes_the_lighthouse_count_up() -> None:
    asked = Lighthouse()
    client = FencedClient(asked, draw=lambda: 5)
    asked.will_say(4, PAIR)
    client.stamp(True)

    answer = client._quorum(group_rank=0, step=3, commit_failures=99)

    assert asked.asked == [{"group_rank": 0, "step": 5 << 24 | 3, "commit_failures": 1}]
    assert answer.max_step == 3


def test_stamps_fit_beside_the_step() -> None:
    client = member()
    for _ in range(1000):
        client.stamp(True)
        assert 0 < client._stamp << 24 < 2**62


def test_the_same_quorum_keeps_its_key_while_steps_are_committed() -> None:
    client = member()

    assert len({key_of(client, 4, PAIR, step) for step in (1, 2, 3)}) == 1


def test_members_that_hear_the_same_have_the_same_key() -> None:
    old, new = member(), member(is_new=True)
    key_of(old, 3, ALONE, 7)

    old_key, new_key = keys_of(4, PAIR, (old, 8), (new, 8))

    assert old_key == new_key


@pytest.mark.parametrize(
    "later",
    [(5, PAIR), (4, REPLACED), (4, ALONE), (4, PAIR[::-1])],
    ids=["number", "id", "members", "order"],
)
def test_another_quorum_has_another_key(later: tuple[Any, ...]) -> None:
    client = member()

    assert key_of(client, 4, PAIR) != key_of(client, *later)


def test_numbers_that_come_again_after_a_restart_give_new_keys() -> None:
    client = member()
    before = [key_of(client, number, members, 5) for number, members in ((1, PAIR), (2, ALONE))]

    after = [key_of(client, number, members, 9) for number, members in ((1, PAIR), (2, ALONE))]

    assert len({*before, *after}) == 4


def test_a_broken_group_gets_another_key_even_under_the_number_it_had() -> None:
    one, other = member(), member()
    keys = [keys_of(1, PAIR, (one, 1), (other, 1))]
    for _ in range(3):
        # Its peer may not have noticed.
        one.stamp(True)
        keys.append(keys_of(1, PAIR, (one, 1), (other, 1)))

    assert all(mine == its for mine, its in keys)
    assert len({mine for mine, _ in keys}) == 4


def test_a_new_incarnation_under_an_old_id_has_a_group_with_the_survivor_at_once() -> None:
    """Lighthouse and replica were started again between two syncs, so that number, members and step are the same."""
    survivor, lost = member(), member()
    before = keys_of(1, PAIR, (survivor, 3), (lost, 3))

    after = keys_of(1, PAIR, (survivor, 3), (member(is_new=True), 3))

    assert after[0] == after[1] != before[0] == before[1]


def test_who_was_left_behind_has_a_group_with_the_others_at_once() -> None:
    """What it was in last has the number and the members of what it is in now, as counted after a restart."""
    one, other, behind = member(), member(), member()
    trio = ("replica_0:a", "replica_1:b", "replica_2:c")
    keys_of(1, trio, (one, 3), (other, 3), (behind, 3))
    keys_of(2, PAIR, (one, 4), (other, 4))

    after = keys_of(1, trio, (one, 5), (other, 5), (behind, 4))

    assert len(set(after)) == 1


def test_a_key_fits_where_torchft_carries_it() -> None:
    """In a signed 64-bit integer, where 0 stands for no quorum."""
    client = member()

    keys = [key_of(client, number, PAIR) for number in range(64)]

    assert all(0 < key < 2**56 for key in keys)
    assert len(set(keys)) == 64


@given(st.data())
def test_all_members_have_one_key_and_a_group_that_is_theirs(data: st.DataObject) -> None:
    """Over any history of a Lighthouse and of three replicas that are restarted, fail in a sync or miss some."""
    clients = [member(is_new=True) for _ in range(3)]
    steps, groups = [1, 1, 1], [0, 0, 0]
    last: tuple[int, tuple[int, ...]] = (0, ())
    used: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        for slot in data.draw(st.sets(st.integers(0, 2), max_size=1)):
            clients[slot], steps[slot], groups[slot] = member(is_new=True), max(steps), 0
        if data.draw(st.booleans()):
            last = (0, ())
        slots = tuple(sorted(data.draw(st.sets(st.integers(0, 2), min_size=1))))
        number = last[0] + int(slots != last[1] or any(clients[slot]._stamp for slot in slots))
        last = number, slots

        keys = keys_of(
            number, tuple(f"replica_{slot}:x" for slot in slots), *((clients[slot], steps[slot]) for slot in slots)
        )

        assert len(set(keys)) == 1
        fresh = [groups[slot] != keys[0] for slot in slots]
        # All set it up, under a key that never was, or all have it.
        assert not any(fresh) or (all(fresh) and keys[0] not in used)
        used.add(keys[0])
        newest = max(steps[slot] for slot in slots)
        commits = data.draw(st.booleans())
        for slot in slots:
            groups[slot] = keys[0]
            took_part = commits and steps[slot] == newest
            clients[slot].stamp(not took_part)
            steps[slot] += took_part


# -- the seat ----------------------------------------------------------------------------------------------------------


class FakeManager:
    """torchft's Manager with requests that the test answers."""

    def __init__(self) -> None:
        self._client: Any = Lighthouse()
        self.states: list[dict[str, int]] = []
        self.requests: list[Future[None]] = []
        self.error: Any = None
        self.left = False
        self._quorum_future: Future[None] | None = None

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.states.append(state)

    def start_quorum(self, *, allow_heal: bool) -> None:
        assert not allow_heal
        if self._quorum_future is not None:
            self._quorum_future.result()
        self._quorum_future = Future()
        self.requests.append(self._quorum_future)

    def errored(self) -> Any:
        return self.error

    def shutdown(self, wait: bool) -> None:
        assert not wait
        self.left = True

    def answers(self, number: int, members: tuple[str, ...] = PAIR) -> None:
        self._client._client.will_say(number, members)
        self._client._quorum(step=1)
        self.requests[-1].set_result(None)


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
def seat(manager: FakeManager) -> QuorumSeat:
    return QuorumSeat(manager)


def test_a_request_goes_from_announced_to_taken(seat: QuorumSeat, manager: FakeManager) -> None:
    assert (seat.pending, seat.fired, seat.wait(0)) == (False, False, True)

    seat.announce(3)
    assert (seat.pending, seat.fired, seat.wait(0)) == (True, False, False)
    manager.answers(7)
    assert (seat.pending, seat.fired, seat.wait(0)) == (True, True, True)
    formed = seat.take()

    assert (seat.pending, seat.fired, seat.wait(0)) == (False, False, True)
    assert (formed.number, formed.replica_ids) == (7, PAIR)
    assert manager.states == [{"step": 3 + COLD_START_STEP, "batches_committed": 0}]


def test_a_pending_request_is_not_asked_again_but_its_step_follows(seat: QuorumSeat, manager: FakeManager) -> None:
    seat.announce(3)
    seat.announce(4)

    assert len(manager.requests) == 1
    assert [state["step"] - COLD_START_STEP for state in manager.states] == [3, 4]
    manager.answers(1)
    seat.take()
    seat.announce(5)
    assert len(manager.requests) == 2


def test_a_request_that_failed_does_not_stand_in_the_way_of_the_next(seat: QuorumSeat, manager: FakeManager) -> None:
    seat.announce(3)
    manager.requests[-1].set_exception(TimeoutError("the Lighthouse is gone"))
    assert seat.fired

    with pytest.raises(QuorumFailed, match="no quorum: the Lighthouse is gone"):
        seat.take()

    assert not seat.pending
    seat.announce(3)
    manager.answers(2)
    assert seat.take().number == 2


def test_a_group_that_could_not_be_set_up_is_no_quorum(seat: QuorumSeat, manager: FakeManager) -> None:
    seat.announce(3)
    manager.answers(2)
    manager.error = SimpleNamespace(original_exception=ConnectionError("nobody is at the store"))

    with pytest.raises(QuorumFailed, match="was not set up: nobody is at the store"):
        seat.take()

    assert not seat.pending


def test_only_an_unbroken_group_may_stay(seat: QuorumSeat, manager: FakeManager) -> None:
    told, keys = [], []
    for broken in [True, False, True, True, False]:
        seat.rebuild_group(broken)
        seat.announce(0)
        manager.answers(1)
        keys.append(seat.take().key)
        told.append(manager._client._client.asked[-1]["commit_failures"])

    assert told == [1, 0, 1, 1, 0]
    assert keys[0] == keys[1]
    assert keys[3] == keys[4]
    assert len(set(keys)) == 3


def test_a_new_incarnation_asks_for_a_new_group(seat: QuorumSeat, manager: FakeManager) -> None:
    seat.announce(0)
    manager.answers(1)

    assert manager._client._client.asked[-1]["commit_failures"] == 1


def test_to_leave_is_not_to_wait(seat: QuorumSeat, manager: FakeManager) -> None:
    seat.shutdown()

    assert manager.left


@pytest.fixture
def real_seat() -> Iterator[QuorumSeat]:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    with lighthouse() as address:
        group = make_group("gloo", Device("cpu"), OUTER.connect_timeout_s)
        made = QuorumSeat(
            make_manager(
                Seat(slot=3, rank=0, ranks=1, lighthouse=address, host=HOST),
                config=OUTER,
                min_replicas=1,
                store=store,
                group=group,
            )
        )
        try:
            yield made
        finally:
            made.shutdown()
            group.abort()


def test_a_real_lighthouse_answers(real_seat: QuorumSeat) -> None:
    """With torchft's own Manager, whose inner parts the seat reaches into."""
    taken = []
    for outer_step, broken in enumerate([False, False, True]):
        real_seat.rebuild_group(broken)
        real_seat.announce(outer_step)
        assert real_seat.wait(30)
        taken.append(real_seat.take())

    assert [[slot_of(i) for i in formed.replica_ids] for formed in taken] == [[3]] * 3
    assert [formed.rank for formed in taken] == [0] * 3
    # The second quorum is the first one still; the third has a group of its own.
    assert taken[0] == taken[1]
    assert taken[2].number > taken[1].number
    assert taken[2].key != taken[1].key


# -- numbers for people ------------------------------------------------------------------------------------------------


def formed(number: int, members: tuple[str, ...] = PAIR, group: int = 0) -> Formed:
    """``group`` tells groups apart that have the same number and members."""
    key = hash((number, members, group)) % 2**40 + 1
    return Formed(key=key, number=number, replica_ids=members, rank=0)


def shown(count: QuorumCount, quorum: Formed, *others: int) -> int:
    count.see(quorum)
    return count.agree([count.base, *others])


def test_without_a_restart_it_is_the_lighthouses_number() -> None:
    count = QuorumCount()

    assert [shown(count, formed(number, ALONE if number > 2 else PAIR)) for number in (1, 2, 2, 3, 7)] == [
        1,
        2,
        2,
        3,
        7,
    ]


def test_after_a_restart_it_goes_on_counting() -> None:
    count = QuorumCount()

    assert [shown(count, formed(number)) for number in (1, 5, 1, 2, 1)] == [1, 5, 6, 7, 8]


def test_a_number_that_others_have_now_tells_of_a_restart() -> None:
    count = QuorumCount()
    shown(count, formed(1))

    assert shown(count, formed(1, REPLACED)) == 2


def test_a_number_that_stands_for_another_group_now_tells_of_a_restart() -> None:
    """As after a restart of the Lighthouse and of a replica, which has kept its id."""
    count, joiner = QuorumCount(), QuorumCount()
    shown(count, formed(1))
    joiner.follow(count.to_list())

    assert shown(count, formed(1, group=1)) == shown(joiner, formed(1, group=1)) == 2


def test_a_joiner_counts_like_its_peers() -> None:
    old, joiner = QuorumCount(), QuorumCount()
    for number in (4, 1, 2):
        shown(old, formed(number))
    joiner.follow(old.to_list())

    old.see(formed(3, REPLACED))
    joiner.see(formed(3, REPLACED))

    assert old.agree([old.base, joiner.base]) == joiner.agree([old.base, joiner.base]) == 7


def test_who_missed_a_restart_hears_of_it() -> None:
    knows, missed = QuorumCount(), QuorumCount()
    for number in (4, 1):
        shown(knows, formed(number))
    shown(missed, formed(1))

    bases = []
    for count in (knows, missed):
        count.see(formed(5, REPLACED))
        bases.append(count.base)

    assert bases == [4, 0]
    assert [count.agree(bases) for count in (knows, missed)] == [9, 9]


@given(st.lists(st.tuples(st.sets(st.integers(0, 2), min_size=1), st.integers(1, 3), st.booleans()), max_size=15))
def test_all_members_show_the_same_number_and_it_only_grows(history: list[tuple[set[int], int, bool]]) -> None:
    """Over any history of a Lighthouse that skips numbers and is restarted, with replicas that are away for a while."""
    counts = {slot: QuorumCount() for slot in range(3)}
    seen: dict[int, tuple[Formed, int]] = {}
    number = 0
    for slots, skipped, restarted in history:
        number = (0 if restarted else number) + skipped
        quorum = formed(number, tuple(f"replica_{slot}:x" for slot in sorted(slots)))
        for slot in slots:
            counts[slot].see(quorum)
        bases = [counts[slot].base for slot in slots]

        numbers = {counts[slot].agree(bases) for slot in slots}

        assert len(numbers) == 1
        for slot in slots:
            before = seen.get(slot)
            if before is not None:
                looks_the_same = before[0] == quorum
                assert min(numbers) > before[1] or (looks_the_same and min(numbers) == before[1])
            seen[slot] = quorum, min(numbers)
