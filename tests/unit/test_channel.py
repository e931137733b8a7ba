"""Parts that come over process groups: what arrives, and what is left when somebody fails."""

import gc
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from elastic_train.peer_ckpt import service
from elastic_train.peer_ckpt.channel import (
    JOINER,
    PIECE_BYTES,
    Channel,
    ChannelBroken,
    Channels,
    Invitation,
    library_of,
    pieces,
)
from elastic_train.peer_ckpt.client import Donor, Fetched, PeerClient, TransferFailed
from elastic_train.peer_ckpt.parts import Part
from elastic_train.peer_ckpt.request import Connection, RequestFailed
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.shards import hash_tensors
from elastic_train.peer_ckpt.snapshot import Snapshot
from elastic_train.peer_ckpt.stream import Stream
from scripts.meddler import Act, Meddler
from tests.programs import running
from tests.waiting import wait_until

HOST = "127.0.0.1"
TOKEN = "0123456789abcdef"
CPU = torch.device("cpu")
TIMEOUT_S = 30.0
BOUND_S = 10.0
BRIEF_S = 1.0
STEP = 12
PART = 64 << 10
SECTIONS = ["inner", "outer"]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def open_things() -> tuple[int, int]:
    """Threads, those of libraries too, and file descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def settled() -> tuple[int, int]:
    """The same, once it changes no more: a library's threads end a little later than what they were made for."""
    seen = [open_things()]

    def is_settled() -> bool:
        seen.append(open_things())
        return seen[-1] == seen[-2]

    wait_until(is_settled)
    return seen[-1]


@contextmanager
def connected(channels: Channels, bound_s: float = BOUND_S) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel: the donor's and the joiner's."""
    with ThreadPoolExecutor(1) as pool:
        invited: list[Invitation] = []
        waiting = pool.submit(channels.open, bound_s, invited.append)
        wait_until(lambda: invited or waiting.done())
        joiner = Channel(invited[0], CPU, JOINER)
        donor = waiting.result()
    with closing(donor), closing(joiner):
        yield donor, joiner


def nothing() -> None:
    return


def room(size: int) -> memoryview:
    return memoryview(bytearray(size))


# -- one channel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1], [PIECE_BYTES], [3, 1, PIECE_BYTES, 8] * 5, [PIECE_BYTES] * 9])
def test_pieces_arrive_in_their_order_and_are_told_of_in_it(sizes: list[int]) -> None:
    given = [
        torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        for i, size in enumerate(sizes)
    ]
    taken = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    sent, arrived = threading.Semaphore(0), list[int]()

    def announced() -> None:
        assert sent.acquire(timeout=TIMEOUT_S)

    with connected(Channels(HOST, CPU)) as (donor, joiner), ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            sending = pool.submit(donor.send, [one.numpy().data for one in given], sent.release)
            joiner.receive([one.numpy().data for one in taken], announced, lambda piece: arrived.append(len(piece)))
            sending.result(TIMEOUT_S)
            assert all(map(torch.equal, given, taken))
            assert arrived == sizes
            arrived.clear()
            for one in taken:
                one.zero_()


def test_a_part_is_cut_where_its_tensors_and_pieces_end() -> None:
    tensors = [torch.zeros(3, dtype=torch.uint8), torch.empty(0), torch.zeros(PIECE_BYTES + 5, dtype=torch.uint8)]
    sizes = [len(piece) for piece in pieces(tensors, Part(section="a", start=1, stop=PIECE_BYTES + 8))]
    assert sizes == [2, PIECE_BYTES, 5]
    with pytest.raises(ValueError, match="ends at byte"):
        pieces(tensors, Part(section="a", start=1, stop=PIECE_BYTES + 9))


def test_nobody_is_waited_for_without_end() -> None:
    channels = Channels(HOST, CPU)
    with pytest.raises(ChannelBroken, match="no channel could be made"):
        channels.open(BRIEF_S, lambda invitation: None)
    assert channels.count == 0


def test_who_was_invited_by_nobody_finds_nobody() -> None:
    invited: list[Invitation] = []
    with pytest.raises(ChannelBroken):
        Channels(HOST, CPU).open(BRIEF_S, invited.append)
    with pytest.raises(ChannelBroken, match="no channel could be made"):
        Channel(invited[0], CPU, JOINER)


def test_only_so_many_are_open_at_once() -> None:
    channels = Channels(HOST, CPU, limit=1)
    with connected(channels):
        assert channels.count == 1
        with pytest.raises(ChannelBroken, match="1 channels are open"):
            channels.open(BOUND_S, lambda invitation: None)
    assert channels.count == 0
    with connected(channels):
        pass


def test_an_invitation_that_cannot_be_told_holds_no_place() -> None:
    channels = Channels(HOST, CPU)

    def fail(invitation: Invitation) -> None:
        raise BrokenPipeError("gone")

    with pytest.raises(BrokenPipeError):
        channels.open(BOUND_S, fail)
    assert channels.count == 0


def test_both_sides_need_the_same_library() -> None:
    assert (library_of(CPU), library_of(torch.device("cuda", 1))) == ("gloo", "nccl")
    other = Invitation(library="nccl", host=HOST, port=1, secret="a", bound_s=BOUND_S)
    closed = threading.Event()
    with pytest.raises(ChannelBroken, match="the other side has nccl, this one gloo"):
        Channel(other, CPU, JOINER, on_close=closed.set)
    assert closed.is_set()


@pytest.mark.parametrize(
    "wrong", [{"port": 0}, {"port": "1"}, {"bound_s": 0}, {"bound_s": 1e9}, {"host": None}, {"secret": 3}]
)
def test_what_is_no_invitation_is_not_taken_for_one(wrong: dict[str, Any]) -> None:
    right = Invitation(library="gloo", host=HOST, port=1, secret="a", bound_s=2.5)
    assert Invitation.from_json(right.to_json()) == right
    with pytest.raises(ValueError, match="no invitation"):
        Invitation.from_json(right.to_json() | wrong)
    with pytest.raises(ValueError, match="no invitation"):
        Invitation.from_json([])


def test_nothing_is_written_any_more_once_a_receiver_has_given_up() -> None:
    taken = torch.zeros(4, PIECE_BYTES, dtype=torch.uint8)

    def give_up() -> None:
        raise RequestFailed("cut off")

    with connected(Channels(HOST, CPU), BRIEF_S) as (donor, joiner):
        with pytest.raises(RequestFailed):
            joiner.receive([row.numpy().data for row in taken], give_up, lambda piece: None)
        with pytest.raises(ChannelBroken):
            donor.send([torch.ones(PIECE_BYTES, dtype=torch.uint8).numpy().data] * 9, nothing)
        assert not taken.any()
        for end in (donor, joiner):
            with pytest.raises(ChannelBroken, match="closed"):
                end.send([room(1)], nothing)


def test_a_receiver_that_goes_in_the_middle_leaves_a_sender_that_gives_up() -> None:
    channels = Channels(HOST, CPU)
    given = torch.ones(16 * PIECE_BYTES, dtype=torch.uint8)
    taken = torch.zeros(4 * PIECE_BYTES, dtype=torch.uint8)
    with connected(channels, BRIEF_S) as (donor, joiner), ThreadPoolExecutor(1) as pool:
        part = Part(section="a", start=0, stop=given.nbytes)
        sending = pool.submit(donor.send, pieces([given], part), nothing)
        # Four pieces and no more: the rest finds no place.
        joiner.receive(pieces([taken], Part(section="a", start=0, stop=taken.nbytes)), nothing, lambda piece: None)
        joiner.close()
        with pytest.raises(ChannelBroken, match="the channel broke"):
            sending.result(TIMEOUT_S)
        assert channels.count == 0
    assert taken.all()


def test_a_sender_that_is_gone_is_noticed_at_once() -> None:
    with connected(Channels(HOST, CPU), bound_s=30.0) as (donor, joiner):
        donor.close()
        with pytest.raises(ChannelBroken, match="the channel broke"):
            joiner.receive([room(PIECE_BYTES)], nothing, lambda piece: None)


def test_a_sender_that_says_it_has_sent_and_has_not_is_given_up() -> None:
    with connected(Channels(HOST, CPU), BRIEF_S) as (_, joiner), pytest.raises(ChannelBroken, match="Timed out"):
        joiner.receive([room(8)], nothing, lambda piece: None)


def test_closed_channels_leave_nothing_behind() -> None:
    channels = Channels(HOST, CPU)
    with connected(channels):
        pass
    before = settled()
    for _ in range(3):
        with connected(channels) as (donor, joiner), ThreadPoolExecutor(1) as pool:
            sending = pool.submit(donor.send, [room(100)], nothing)
            joiner.receive([room(100)], nothing, lambda piece: None)
            sending.result(TIMEOUT_S)
    with pytest.raises(ChannelBroken):
        channels.open(BRIEF_S, lambda invitation: None)
    wait_until(lambda: open_things() <= before)


# -- states ------------------------------------------------------------------------------------------------------------


def outer() -> dict[str, torch.Tensor]:
    values = torch.arange(700_000, dtype=torch.int32)
    return {
        "a": values[:100_001].clone(),
        "none": torch.empty(0),
        "mask": torch.tensor([True, False, True]),
        "half": torch.arange(999, dtype=torch.bfloat16),
        "b": values[100_001:].clone().reshape(-1, 1),
    }


def inner(slot: int) -> dict[str, torch.Tensor]:
    """Each replica's own. Two steps whose checksums are as long as they are, with one behind them."""
    return {
        "moment": torch.arange(250_000, dtype=torch.float64) * (slot + 2),
        "s": torch.tensor(slot),
        "t": torch.tensor(1.0),
    }


class Flipping(Channels):
    """Every piece leaves with another first byte."""

    def open(self, bound_s: float, invite: Callable[[Invitation], None]) -> Channel:
        channel = super().open(bound_s, invite)
        send = channel.send

        def flipped(piece: memoryview) -> memoryview:
            copy = bytearray(piece)
            copy[0] ^= 4
            return memoryview(copy)

        channel.send = lambda content, sent: send(map(flipped, content), sent)  # type: ignore[method-assign]
        return channel


class World:
    """Replicas of one rank each, and whatever stands between them and who asks."""

    def __init__(self) -> None:
        self.servers: dict[int, PeerServer] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.channels: dict[int, Channels] = {}
        self.meddlers: list[Meddler] = []

    def replica(self, slot: int, channels: Channels | None = None, *, has_channels: bool = True) -> Donor:
        self.channels[slot] = channels or Channels(HOST, CPU)
        server = self.servers[slot] = PeerServer(
            HOST,
            TOKEN,
            lambda attempt, dead: {},
            part_bytes=PART,
            channels=self.channels[slot] if has_channels else None,
        )
        sections = {"outer": outer(), "inner": inner(slot)}
        self.snapshots[slot] = Snapshot({"outer_step": STEP, "slot": slot}, sections)
        server.publish(self.snapshots[slot])
        return Donor(slot=slot, incarnation=0, address=server.address)

    def meddled(self, donor: Donor, act: Act, after: int) -> tuple[Donor, Meddler]:
        """The same donor behind a network that is bad for what is said on connections."""
        meddler = Meddler([donor.address], act, after)
        self.meddlers.append(meddler)
        return Donor(slot=donor.slot, incarnation=0, address=meddler.address), meddler

    def close(self) -> None:
        ends: list[Meddler | PeerServer] = [*self.meddlers, *self.servers.values()]
        for end in ends:
            end.close()
        wait_until(lambda: not any(channels.count for channels in self.channels.values()))


@pytest.fixture
def world() -> Iterator[World]:
    with closing(World()) as made:
        yield made


def fetch(donors: Sequence[Donor], sections: Sequence[str] = SECTIONS, **settings: Any) -> Fetched:
    settings = {"want": STEP, "timeout_s": TIMEOUT_S, "shared": {"outer"}, **settings}
    return PeerClient(TOKEN, channel_device=CPU).fetch(donors, sections, **settings)


def total() -> int:
    return sum(tensor.nbytes for tensor in (*outer().values(), *inner(0).values()))


def is_whole(fetched: Fetched) -> bool:
    """Whether it is the state of its primary."""
    expected = {"outer": outer(), "inner": inner(fetched.primary.slot)}
    assert sum(fetched.donors.values()) == total()
    return all(
        [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        == [(name, tensor.dtype, tensor.shape) for name, tensor in expected[section].items()]
        and hash_tensors(tensors) == hash_tensors(expected[section])
        for section, tensors in fetched.snapshot.sections.items()
    )


@pytest.mark.parametrize("streams", [1, 3])
def test_a_state_comes_over_channels_alone(world: World, streams: int) -> None:
    fetched = fetch([world.replica(0)], streams=streams)
    assert is_whole(fetched)
    assert (fetched.by_channel, fetched.refetched) == (total(), 0)
    wait_until(lambda: world.channels[0].count == 0)


def test_two_donors_share_the_work(world: World) -> None:
    first, hold = world.meddled(world.replica(0), Act.STALL, 4000)
    second = world.replica(1)

    def progress(received: int, total: int, by_donor: Any) -> None:
        if hold.acted.is_set() and by_donor.get(second):
            hold.release()

    fetched = fetch([first, second], on_progress=progress)
    assert is_whole(fetched)
    assert (fetched.by_channel, set(fetched.donors)) == (total(), {first, second})


DONOR_PROGRAM = """
import sys, torch
from elastic_train.peer_ckpt.channel import Channels
from elastic_train.peer_ckpt.server import PeerServer
from elastic_train.peer_ckpt.snapshot import Snapshot
from tests.unit.test_channel import CPU, HOST, PART, STEP, TOKEN, inner, outer
channels = Channels(HOST, CPU)
server = PeerServer(HOST, TOKEN, lambda attempt, dead: {}, part_bytes=PART, channels=channels)
server.publish(Snapshot({"outer_step": STEP, "slot": 0}, {"outer": outer(), "inner": inner(0)}))
print(server.address, flush=True)
sys.stdin.read()
"""


def test_a_donor_that_is_killed_in_the_middle_is_replaced(world: World) -> None:
    with running(DONOR_PROGRAM) as process:
        assert process.stdout is not None
        donor = Donor(slot=0, incarnation=0, address=process.stdout.readline().strip())
        bad, meddler = world.meddled(donor, Act.STALL, 4000)

        def progress(received: int, total: int, by_donor: Any) -> None:
            if meddler.acted.is_set() and process.poll() is None:
                process.kill()
                process.wait()
                meddler.release()

        lost: list[Collection[Donor]] = []

        def replace(donors: Collection[Donor]) -> Sequence[Donor]:
            lost.append(donors)
            return [world.replica(1)]

        fetched = fetch([bad], on_progress=progress, replace=replace)
    assert is_whole(fetched)
    assert lost == [{bad}]
    assert (fetched.primary.slot, fetched.by_channel >= total()) == (1, True)


@pytest.mark.parametrize("after", [0, 300, 1000, 4000])
@pytest.mark.parametrize("act", [Act.CUT, Act.STALL])
def test_a_donor_that_says_no_more_is_replaced(world: World, act: Act, after: int) -> None:
    bad, _ = world.meddled(world.replica(0), act, after)
    assert is_whole(fetch([bad], replace=lambda lost: [world.replica(1)], idle_s=BRIEF_S))


def test_memory_that_is_written_anew_is_fetched_elsewhere(world: World) -> None:
    slow, meddler = world.meddled(world.replica(0), Act.STALL, 4000)

    def progress(received: int, total: int, by_donor: Any) -> None:
        if meddler.acted.is_set() and not world.snapshots[0].is_retired("inner"):
            world.snapshots[0].retire("inner")
            for tensor in world.snapshots[0].sections["inner"].values():
                tensor.zero_()
            meddler.release()

    fetched = fetch([slow, world.replica(1)], on_progress=progress)
    assert is_whole(fetched)
    assert fetched.primary.slot == 1


def test_retiring_waits_for_no_joiner_and_nothing_after_it_counts(world: World) -> None:
    tensors = {"big": torch.ones(16 * PIECE_BYTES, dtype=torch.uint8)}
    server = PeerServer(HOST, TOKEN, lambda attempt, dead: {}, channels=Channels(HOST, CPU))
    snapshot = Snapshot({"outer_step": STEP}, {"outer": tensors})
    server.publish(snapshot)
    part = Part(section="outer", start=0, stop=tensors["big"].nbytes)
    taken = [torch.empty_like(tensors["big"])]
    donor = Donor(slot=0, incarnation=0, address=server.address)
    begun, retired = threading.Event(), threading.Event()
    with closing(server), streaming(donor, BRIEF_S) as stream, ThreadPoolExecutor(1) as pool:
        channel = stream._channel
        assert channel is not None
        receive = channel.receive

        def slowly(into: Any, announced: Any, arrived: Any) -> None:
            def look(piece: memoryview) -> None:
                begun.set()
                assert retired.wait(TIMEOUT_S)
                arrived(piece)

            receive(into, announced, look)

        channel.receive = slowly  # type: ignore[method-assign]
        fetching = pool.submit(stream.fetch, target(part), taken, part)
        assert begun.wait(TIMEOUT_S)
        snapshot.retire("outer")
        tensors["big"].zero_()
        retired.set()
        with pytest.raises(RequestFailed):
            fetching.result(TIMEOUT_S)


def target(part: Part) -> str:
    return f"/part?outer_step={STEP}&section={part.section}&start={part.start}&stop={part.stop}"


@contextmanager
def streaming(donor: Donor, bound_s: float = BOUND_S) -> Iterator[Stream]:
    """A stream with a channel."""
    with (
        Connection(donor.address, TOKEN) as connection,
        closing(Stream(connection, float("inf"), f"replica {donor.slot}")) as stream,
    ):
        stream.open_channel("/channel", CPU, bound_s)
        yield stream


def blank(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors.values()]


def test_a_part_that_is_refused_is_not_waited_for_and_the_next_comes(world: World) -> None:
    with streaming(world.replica(0)) as stream:
        world.snapshots[0].retire("inner")
        with pytest.raises(RequestFailed, match="410 being written anew: inner"):
            stream.fetch(
                target(Part(section="inner", start=0, stop=100)),
                blank(inner(0)),
                Part(section="inner", start=0, stop=100),
            )
        taken = blank(outer())
        part = Part(section="outer", start=0, stop=sum(tensor.nbytes for tensor in taken))
        stream.fetch(target(part), taken, part)
        assert stream.by_channel == part.size
    assert all(map(torch.equal, taken, outer().values()))


def test_a_donor_whose_end_was_idle_for_long_sends_over_the_connection(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_IDLE_S", 0.05)
    caplog.set_level("INFO")
    with streaming(world.replica(3)) as stream:
        wait_until(lambda: world.channels[3].count == 0)
        taken = blank(inner(3))
        part = Part(section="inner", start=0, stop=sum(tensor.nbytes for tensor in taken))
        for _ in range(2):
            stream.fetch(target(part), taken, part)
        assert (stream.arrived, stream.by_channel) == (2 * part.size, 0)
    assert all(map(torch.equal, taken, inner(3).values()))
    assert [text for text in caplog.messages if "closed its end" in text] == [
        "replica 3 has closed its end of a channel: parts come over the connection"
    ]


@pytest.mark.parametrize("channels", [None, Channels(HOST, torch.device("cuda")), Channels(HOST, CPU, limit=0)])
def test_a_donor_without_a_channel_gives_its_parts_over_connections(
    world: World, channels: Channels | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fetched = fetch([world.replica(0, channels, has_channels=channels is not None)], streams=2)
    assert is_whole(fetched)
    assert fetched.by_channel == 0
    assert len([text for text in caplog.messages if "come over connections" in text]) == 1


def test_a_channel_that_cannot_be_made_costs_the_donor_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Channels):
        """Its joiners are sent to where nobody is."""

        def open(self, bound_s: float, invite: Callable[[Invitation], None]) -> Channel:
            return super().open(
                bound_s, lambda one: invite(Invitation.from_json(one.to_json() | {"secret": "another"}))
            )

    fetched = fetch([world.replica(0, Elsewhere(HOST, CPU))], idle_s=2 * BRIEF_S, streams=1)
    assert is_whole(fetched)
    assert (fetched.by_channel, fetched.refetched) == (0, 0)


def test_one_channel_more_than_there_may_be_is_done_without(world: World) -> None:
    fetched = fetch([world.replica(0, Channels(HOST, CPU, limit=1))], streams=3)
    assert is_whole(fetched)


def test_what_arrives_damaged_does_not_count(world: World) -> None:
    bad = world.replica(0, Flipping(HOST, CPU))
    with pytest.raises(TransferFailed, match=r"replica 0: .* arrived damaged"):
        fetch([bad])
    fetched = fetch([bad], replace=lambda lost: [world.replica(1)])
    assert is_whole(fetched)
    assert (fetched.primary.slot, fetched.refetched > 0) == (1, True)


def test_a_request_for_a_channel_that_means_nothing_is_refused(world: World) -> None:
    donor = world.replica(0)
    with Connection(donor.address, TOKEN) as connection:
        bodies: list[object] = [[], {"library": "gloo"}, {"library": "gloo", "bound_s": 0}]
        for body in bodies:
            with (
                pytest.raises(RequestFailed, match="400"),
                connection.request("/channel", deadline=float("inf"), body=body),
            ):
                pass
    with streaming(donor) as stream, pytest.raises(RequestFailed, match="409 this connection has a channel"):
        stream.open_channel("/channel", CPU, BOUND_S)


def test_a_server_that_closes_ends_its_channels(world: World) -> None:
    slow, meddler = world.meddled(world.replica(0), Act.STALL, 4000)

    def progress(received: int, total: int, by_donor: Any) -> None:
        if meddler.acted.is_set():
            world.servers[0].close()

    with pytest.raises(TransferFailed, match="no donor is left"):
        fetch([slow], on_progress=progress, idle_s=BRIEF_S)
    wait_until(lambda: world.channels[0].count == 0)


def test_transfers_leave_no_thread_and_no_socket(world: World) -> None:
    donors = [world.replica(0), world.replica(1)]
    fetch(donors)
    wait_until(lambda: not any(channels.count for channels in world.channels.values()))
    before = settled()
    for _ in range(3):
        assert is_whole(fetch(donors))
    bad, _ = world.meddled(donors[0], Act.CUT, 4000)
    assert is_whole(fetch([bad, donors[1]], idle_s=BRIEF_S))
    world.meddlers.pop().close()
    wait_until(lambda: open_things() <= before)
