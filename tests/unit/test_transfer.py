"""A state fetched from several donors, over real connections, whatever happens to the donors."""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
import xxhash

from elastic_train.peer_ckpt.client import Donor, Fetched, PeerClient, TransferFailed, Unwanted
from elastic_train.peer_ckpt.layout import Layout
from elastic_train.peer_ckpt.manifest import encode_manifest
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.snapshot import Snapshot
from elastic_train.peer_ckpt.transfer import Transfer
from scripts.meddler import Act, Meddler
from tests.liar import Liar
from tests.waiting import wait_until

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0
STEP = 12
PART = 64 << 10
OUTER_BYTES = 2 << 20
INNER_BYTES = 1 << 20
ALL = OUTER_BYTES + INNER_BYTES
SECTIONS = ["inner", "outer"]


def outer() -> dict[str, torch.Tensor]:
    values = torch.arange(OUTER_BYTES // 4, dtype=torch.int32)
    return {"a": values[:100_001].clone(), "none": torch.empty(0), "b": values[100_001:].clone()}


def inner(slot: int) -> dict[str, torch.Tensor]:
    """Each replica's own."""
    return {"moment": torch.arange(INNER_BYTES // 4, dtype=torch.int32) * (slot + 2), "step": torch.tensor([slot])}


class World:
    """Replicas of one rank each, and whatever stands between them."""

    def __init__(self) -> None:
        self.servers: dict[int, PeerServer] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.meddlers: list[Any] = []
        self.served: list[tuple[int, str]] = []

    def replica(
        self, slot: int, outer_step: int = STEP, tensors: dict[str, torch.Tensor] | None = None, part: int = PART
    ) -> Donor:
        """A replica that has published one state."""
        server = PeerServer(
            "127.0.0.1",
            TOKEN,
            lambda attempt, dead: {},
            lambda header, joiner: self.served.append((header["slot"], joiner)),
            part_bytes=part,
        )
        self.servers[slot] = server
        self.publish(slot, outer_step, tensors)
        return Donor(slot=slot, incarnation=0, address=server.address)

    def publish(self, slot: int, outer_step: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
        header = {"outer_step": outer_step, "slot": slot}
        sections = {"outer": outer() if tensors is None else tensors, "inner": inner(slot), "none": {}}
        self.snapshots[slot] = Snapshot(header, sections)
        self.servers[slot].publish(self.snapshots[slot])

    def meddled(self, donor: Donor, act: Act, after: int) -> tuple[Donor, Meddler]:
        """The same donor as seen through a bad network."""
        meddler = Meddler([donor.address], act, after)
        self.meddlers.append(meddler)
        return Donor(slot=donor.slot, incarnation=0, address=meddler.address), meddler

    def close(self) -> None:
        for end in (*self.meddlers, *self.servers.values()):
            end.close()


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World()) as made:
        yield made


def left_behind() -> list[str]:
    return [thread.name for thread in threading.enumerate() if " of replica " in thread.name]


def fetch(donors: Sequence[Donor], sections: Sequence[str] = SECTIONS, **settings: Any) -> Fetched:
    settings = {"want": STEP, "timeout_s": TIMEOUT_S, "shared": {"outer", "none"}, **settings}
    try:
        return PeerClient(TOKEN).fetch(donors, sections, **settings)
    finally:
        assert left_behind() == []


def is_whole(fetched: Fetched) -> bool:
    """Whether it is the state of its primary."""
    snapshot, slot = fetched.snapshot, fetched.primary.slot
    expected = {"outer": outer(), "inner": inner(slot), "none": {}}
    assert snapshot.header == {"outer_step": STEP, "slot": slot}
    assert sum(fetched.donors.values()) == sum(
        tensor.nbytes for section in snapshot.sections for tensor in expected[section].values()
    )
    return all(
        list(tensors) == list(expected[section])
        and all(
            tensor.dtype == expected[section][name].dtype and torch.equal(tensor, expected[section][name])
            for name, tensor in tensors.items()
        )
        for section, tensors in snapshot.sections.items()
    )


def test_a_state_arrives_as_it_was_published(world: World) -> None:
    donor = world.replica(0)
    seen: list[tuple[int, int]] = []
    fetched = fetch([donor], ["none", *SECTIONS], on_progress=lambda done, total, by: seen.append((done, total)))
    assert is_whole(fetched)
    assert list(fetched.snapshot.sections) == ["none", *SECTIONS]
    assert fetched.donors == {donor: ALL + 8}
    assert fetched.refetched == 0
    assert seen[-1] == (ALL + 8, ALL + 8)
    assert seen == sorted(seen)


@pytest.mark.parametrize("sections", [["outer"], ["inner"], ["outer", "inner"], ["none"]])
def test_only_the_sections_that_were_asked_for_arrive(world: World, sections: list[str]) -> None:
    fetched = fetch([world.replica(0)], sections)
    assert list(fetched.snapshot.sections) == sections
    assert is_whole(fetched)


@pytest.mark.parametrize("shared", [set(), {"outer", "inner", "elsewhere"}])
@pytest.mark.parametrize("streams", [1, 3])
def test_nothing_or_everything_may_be_shared(world: World, shared: set[str], streams: int) -> None:
    assert is_whole(fetch([world.replica(0)], shared=shared, streams=streams))


def test_what_was_fetched_can_be_published_again(world: World) -> None:
    donor = world.replica(0)
    first = fetch([donor])
    world.servers[0].publish(first.snapshot)
    assert is_whole(fetch([donor]))


def test_nothing_that_makes_no_sense_is_fetched(world: World) -> None:
    donor = world.replica(0)
    for sections, settings in (([], {}), (["outer", "outer"], {}), (["outer"], {"streams": 0})):
        with pytest.raises(ValueError, match=r"cannot be fetched|nothing can be fetched"):
            fetch([donor], sections, **settings)


def test_two_donors_give_their_share_and_what_is_not_shared_comes_from_one(world: World) -> None:
    first, meddler = world.meddled(world.replica(0), Act.STALL, INNER_BYTES // 2)
    second = world.replica(1)

    def progress(received: int, total: int, by_donor: Mapping[Donor, int]) -> None:
        if by_donor.get(second) and meddler.acted.is_set():
            meddler.release()

    fetched = fetch([first, second], on_progress=progress)
    assert is_whole(fetched)
    assert fetched.primary == first
    assert fetched.donors[first] >= INNER_BYTES
    assert fetched.donors[second] > 0
    assert fetched.refetched == 0


POINTS = [0, 1, 100, 20_000, INNER_BYTES // 2, INNER_BYTES + PART, ALL - 1]


@pytest.mark.parametrize("after", POINTS)
@pytest.mark.parametrize("is_primary", [True, False])
def test_a_donor_that_dies_is_replaced_by_another(world: World, after: int, is_primary: bool) -> None:
    bad, _ = world.meddled(world.replica(0), Act.CUT, after)
    good = world.replica(1)
    fetched = fetch([bad, good] if is_primary else [good, bad])
    assert is_whole(fetched)
    assert fetched.primary == good or is_primary


def test_the_last_donor_is_replaced_at_whatever_moment_it_dies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, meddler = world.meddled(world.replica(0), Act.STALL, 0)
    good = world.replica(1)
    find_primary = Transfer._find_primary

    def behind_its_death(transfer: Transfer) -> None:
        if len(transfer._links) == 1:
            meddler.close()
            wait_until(lambda: not transfer._living())
        find_primary(transfer)

    monkeypatch.setattr(Transfer, "_find_primary", behind_its_death)
    assert is_whole(fetch([bad], replace=lambda lost: [good]))


@pytest.mark.parametrize("after", [0, 20_000, INNER_BYTES // 2])
def test_a_donor_that_falls_silent_is_replaced_by_another(world: World, after: int) -> None:
    bad, _ = world.meddled(world.replica(0), Act.STALL, after)
    fetched = fetch([bad, world.replica(1)], idle_s=2.0)
    assert is_whole(fetched)


def test_only_what_is_missing_is_fetched_again(world: World) -> None:
    bad, _ = world.meddled(world.replica(0), Act.CUT, OUTER_BYTES // 2)
    good = world.replica(1)
    asked: list[set[Donor]] = []

    def replace(lost: Collection[Donor]) -> Sequence[Donor]:
        asked.append(set(lost))
        return [bad, good]

    fetched = fetch([bad], ["outer"], replace=replace, streams=2)
    assert is_whole(fetched)
    assert asked == [{bad}]
    assert fetched.donors[bad] >= OUTER_BYTES // 2 - 4 * PART
    assert fetched.refetched <= 2 * PART


def test_memory_is_used_again_when_the_primary_is_replaced(world: World) -> None:
    bad, _ = world.meddled(world.replica(0), Act.CUT, INNER_BYTES // 2)
    made: list[int] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.Size(shape).numel() * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    fetched = fetch([bad], ["inner"], replace=lambda lost: [world.replica(1)], into=allocate)
    assert is_whole(fetched)
    assert fetched.primary.slot == 1
    assert fetched.refetched >= INNER_BYTES // 4
    assert sum(made) == INNER_BYTES + 8


@pytest.mark.parametrize("after", [0, 30_000, INNER_BYTES + 3 * PART])
def test_what_arrives_damaged_does_not_count(world: World, after: int) -> None:
    bad, meddler = world.meddled(world.replica(0), Act.FLIP, after)
    lost: list[Collection[Donor]] = []

    def replace(donors: Collection[Donor]) -> Sequence[Donor]:
        lost.append(donors)
        return [world.replica(1)]

    fetched = fetch([bad], replace=replace)
    assert meddler.acted.is_set()
    assert lost == [{bad}]
    assert is_whole(fetched)
    assert fetched.refetched > 0


def test_damage_without_another_donor_is_a_failure_that_says_so(world: World) -> None:
    bad, _ = world.meddled(world.replica(3), Act.FLIP, 30_000)
    with pytest.raises(TransferFailed, match=r"no donor is left: replica 3: .* arrived damaged"):
        fetch([bad])


@pytest.mark.parametrize("after", [70, 110, 200, 300])
@pytest.mark.parametrize("section", ["inner", "outer"])
def test_a_manifest_that_arrives_damaged_does_not_count(world: World, after: int, section: str) -> None:
    bad, meddler = world.meddled(world.replica(0), Act.MISLEAD, after)
    fetched = fetch([bad], [section], replace=lambda lost: [world.replica(1)])
    assert meddler.acted.is_set()
    assert is_whole(fetched)


@pytest.mark.parametrize("section", ["inner", "outer"])
def test_memory_that_is_written_anew_is_fetched_elsewhere(world: World, section: str) -> None:
    slow, meddler = world.meddled(world.replica(0), Act.STALL, INNER_BYTES // 2)
    good = world.replica(1)

    def progress(received: int, total: int, by_donor: Mapping[Donor, int]) -> None:
        if meddler.acted.is_set() and not world.snapshots[0].is_retired(section):
            world.snapshots[0].retire(section)
            for tensor in world.snapshots[0].sections[section].values():
                tensor.zero_()
            meddler.release()

    fetched = fetch([slow, good], on_progress=progress)
    assert is_whole(fetched)
    assert fetched.primary == good or section == "outer"


def test_memory_that_is_written_anew_and_nowhere_else_is_a_failure(world: World) -> None:
    slow, meddler = world.meddled(world.replica(0), Act.STALL, INNER_BYTES // 2)

    def progress(received: int, total: int, by_donor: Mapping[Donor, int]) -> None:
        if meddler.acted.is_set():
            world.snapshots[0].retire("inner")
            meddler.release()

    with pytest.raises(TransferFailed, match="replica 0: "):
        fetch([slow], on_progress=progress)


def test_a_transfer_outlives_the_publication_of_the_next_states(world: World) -> None:
    slow, meddler = world.meddled(world.replica(0), Act.STALL, INNER_BYTES // 2)

    def progress(received: int, total: int, by_donor: Mapping[Donor, int]) -> None:
        if meddler.acted.is_set():
            world.publish(0, STEP + 1)
            meddler.release()

    assert is_whole(fetch([slow], on_progress=progress))


def test_no_donor_is_a_failure(world: World) -> None:
    with pytest.raises(TransferFailed, match="no donor is left"):
        fetch([])
    gone = world.replica(0)
    world.servers[0].close()
    with pytest.raises(TransferFailed, match=r"replica 0: http://127\.0\.0\.1.*replica 1: http://127\.0\.0\.1"):
        fetch([gone, Donor(slot=1, incarnation=0, address="http://127.0.0.1:1")])


def test_a_donor_that_is_not_there_yet_is_waited_for(world: World) -> None:
    late = world.replica(0, STEP - 1)
    looks: list[None] = []

    def alive() -> None:
        looks.append(None)
        if len(looks) == 3:
            world.publish(0, STEP)

    assert is_whole(fetch([late], alive=alive))


def test_a_donor_that_stays_behind_is_given_up(world: World) -> None:
    with pytest.raises(TransferFailed, match=r"outer step 12 is not published yet|timed out") as failure:
        fetch([world.replica(0, STEP - 1)], idle_s=2.0)
    assert not isinstance(failure.value, Unwanted)


def test_donors_that_have_all_gone_on_are_not_what_was_wanted(world: World) -> None:
    with pytest.raises(Unwanted, match="it has outer step 13, not 12") as failure:
        fetch([world.replica(0, STEP + 1), world.replica(1, STEP + 3)])
    assert failure.value.outer_step == STEP + 3
    assert is_whole(fetch([world.replica(2, STEP + 1), world.replica(3)]))


def odd_one_is_left_out(world: World, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a donor is, that shows those tensors when another one has given almost everything."""
    first, hold = world.meddled(world.replica(0), Act.STALL, ALL - 3 * PART)
    odd, late = world.meddled(world.replica(1, tensors=tensors), Act.STALL, 0)
    lost: list[Collection[Donor]] = []

    def replace(donors: Collection[Donor]) -> Sequence[Donor]:
        lost.append(donors)
        hold.release()
        return []

    def progress(received: int, total: int, by_donor: Mapping[Donor, int]) -> None:
        if hold.acted.is_set():
            late.release()

    fetched = fetch([first, odd], replace=replace, on_progress=progress)
    return is_whole(fetched) and lost == [{odd}]


def test_a_donor_with_other_tensors_than_the_first_is_left_out(world: World) -> None:
    assert odd_one_is_left_out(world, {name: tensor for name, tensor in outer().items() if name != "none"})


def test_several_joiners_are_served_at_once(world: World) -> None:
    donors = [world.replica(0), world.replica(1)]
    fetched: list[Fetched] = []

    def join(number: int) -> None:
        order = donors if number % 2 else donors[::-1]
        client, joiner = PeerClient(TOKEN), f"{number}.0"
        got = client.fetch(order, SECTIONS, want=STEP, timeout_s=TIMEOUT_S, shared={"outer"}, joiner=joiner)
        assert client.taken(got.primary, STEP, joiner, TIMEOUT_S)
        fetched.append(got)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [is_whole(got) for got in fetched] == [True] * 6
    assert sorted(joiner for _, joiner in world.served) == [f"{number}.0" for number in range(6)]
    assert left_behind() == []


class Ended(Exception):
    pass


def ends(*arguments: Any) -> Any:
    raise Ended


@pytest.mark.parametrize(
    "settings", [{"alive": ends}, {"on_progress": ends}, {"into": ends}, {"replace": ends}], ids=lambda s: next(iter(s))
)
def test_whoever_asks_can_end_it(world: World, settings: dict[str, Any]) -> None:
    donor = world.replica(0)
    if "replace" in settings:
        world.servers[0].close()
    with pytest.raises(Ended):
        fetch([donor], **settings)


def test_the_caller_looks_around_also_when_nothing_arrives(world: World) -> None:
    silent, _ = world.meddled(world.replica(0), Act.STALL, 0)
    looks: list[None] = []
    seen: list[tuple[int, int, Mapping[Donor, int]]] = []

    def alive() -> None:
        looks.append(None)
        if len(looks) > 3:
            raise Ended

    with pytest.raises(Ended):
        fetch([silent], alive=alive, on_progress=lambda *figures: seen.append(figures))
    assert seen == [(0, 0, {})] * 3


def test_it_takes_no_longer_than_it_may(world: World) -> None:
    silent, _ = world.meddled(world.replica(0), Act.STALL, INNER_BYTES)
    with pytest.raises(TransferFailed, match=r"did not arrive within 0\.2 s|timed out"):
        fetch([silent], timeout_s=0.2)


def test_memory_of_another_kind_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="cannot be received into"):
        fetch([world.replica(0)], into=lambda shape, dtype: torch.empty(shape, dtype=torch.float64))


def test_a_client_with_another_token_gets_nothing(world: World) -> None:
    donor = world.replica(0)
    with pytest.raises(TransferFailed, match="401") as failure:
        PeerClient("another").fetch([donor], ["outer"], want=STEP, timeout_s=TIMEOUT_S)
    assert "another" not in str(failure.value)


def test_a_donor_is_told_of_a_joiner_only_by_itself(world: World) -> None:
    donor = world.replica(0)
    fetch([donor], joiner="7.2")
    fetch([donor])
    assert world.served == []
    assert PeerClient(TOKEN).taken(donor, STEP, "7.2", TIMEOUT_S)
    assert world.served == [(0, "7.2")]


def answered(body: bytes, length: int | None = None) -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body) if length is None else length, body)


def described(header: dict[str, Any], sections: list[str], tensor: torch.Tensor) -> bytes:
    return encode_manifest(Layout.of(Snapshot(header, {section: {"w": tensor} for section in sections}), sections))


NO_LAYOUT = (8).to_bytes(8, "little") + b"[1, 2]  "
WHOLE = described({"outer_step": STEP}, ["outer"], torch.ones(4))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "replica 0"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (answered(b""), "too early"),
        (answered((1 << 62).to_bytes(8, "little") + bytes(100)), "a header of"),
        (answered(NO_LAYOUT + xxhash.xxh3_64_digest(NO_LAYOUT)), "cannot be understood"),
        (answered(WHOLE[:-1] + bytes(1)), "its layout arrived damaged"),
        (answered(WHOLE + bytes(7)), "a header of"),
        (answered(WHOLE, len(WHOLE) + 16), "replica 0"),
        (answered(described({"outer_step": STEP}, ["inner"], torch.ones(4))), "has the sections inner"),
        (answered(described({}, ["outer"], torch.ones(4))), "it has outer step None"),
        # It answers the same to everything.
        (answered(WHOLE), "the part has"),
    ],
)
def test_an_answer_that_is_no_snapshot_is_a_failed_transfer(answer: bytes, words: str) -> None:
    with closing(Liar(answer)) as liar, pytest.raises(TransferFailed, match=words):
        fetch([Donor(slot=0, incarnation=0, address=liar.address)], ["outer"])
