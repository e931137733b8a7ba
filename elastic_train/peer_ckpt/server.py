"""What a rank says to its peers: how it stands, and the states that it publishes for those that are behind."""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import torch
import xxhash

from elastic_train.peer_ckpt.channel import CHECKSUMS, Channel, ChannelBroken, Channels, pieces
from elastic_train.peer_ckpt.layout import Layout
from elastic_train.peer_ckpt.manifest import CHECKSUM_BYTES, encode_manifest
from elastic_train.peer_ckpt.parts import PART_BYTES, Part, part_bytes_of, spans
from elastic_train.peer_ckpt.service import BadRequest, Exchange, TokenServer
from elastic_train.peer_ckpt.shards import raw_bytes
from elastic_train.peer_ckpt.shared_memory import SharedMemory
from elastic_train.peer_ckpt.snapshot import Retired, Snapshot
from elastic_train.peer_ckpt.tls import Tls

Status = Callable[[str, frozenset[int]], Mapping[str, Any]]
"""Given an attempt ("" if none is meant) and the slots that the asker knows to be dead in it: how this rank stands."""

Served = Callable[[Mapping[str, Any], str], None]
"""Given a snapshot's header and a joiner, "<slot>.<incarnation>": it has put that state in place."""

_WAIT_S = 60.0
"""The longest that a peer may wait here for a state which is not published yet."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_JOINER = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}")
_REMEMBERED = 64
_BYTES = "application/octet-stream"
_PIECE = 1 << 20
"""Bytes: still in the processor's cache when they are sent, after their checksum was computed."""
_CHANNEL = "channel"
_WORTH_A_FILE = 64 << 10
"""Bytes: a smaller tensor is copied sooner than its pages are handed over."""


class PeerServer:
    """Serves in threads beside the training. Peers ask for

    ``/status?attempt=&dead=1,2``: how this rank stands;
    ``/manifest?outer_step=&sections=a,b&wait_ms=&for=``: what those sections hold;
    ``/part?outer_step=&section=&start=&stop=&for=``: the bytes of a part, and their checksum; with ``by=channel``, and
    if this connection has one, only the checksums of the pieces in which the part comes over the channel;
    ``/channel`` (POST: library, bound_s): a channel that lasts as long as this connection, and the invitation to it;
    ``/taken?outer_step=&for=``: nothing; they say that they have the state and that it is sound.

    Without ``outer_step`` the newest is meant; ``wait_ms`` says how long it may be waited for; ``for`` is the joiner,
    "<slot>.<incarnation>". Of an outer step that it has left behind, the manifest is empty and names the newest.
    """

    def __init__(
        self,
        host: str,
        token: str,
        status: Status,
        on_served: Served = lambda header, joiner: None,
        *,
        keep: int = 2,
        part_bytes: int = PART_BYTES,
        memory: SharedMemory | None = None,
        channels: Channels | None = None,
        tls: Tls | None = None,
    ) -> None:
        """
        Args:
            host: name or address to listen at, and under which peers connect.
            status: called in a thread of the server; what it returns is sent as JSON.
            on_served: called in a thread of the server, once for a joiner and a snapshot.
            keep: snapshots that are served at the same time, the newest ones.
            part_bytes: the most that is sent, checked and lost as one.
            memory: where tensors of snapshots may lie; from there they are sent to other hosts without a copy, if not
                encrypted.
            channels: those by which parts may be sent; None: they go by connections alone.
            tls: None: in plain text, for networks that are the run's own. What goes over channels is in any case.

        Raises:
            OSError: it cannot listen there.
            ValueError: the token is empty, or nothing could be served.
        """
        if keep < 1 or part_bytes < 1:
            raise ValueError(f"{keep} snapshots in parts of {part_bytes} bytes cannot be served")
        self._status = status
        self._on_served = on_served
        self._keep = keep
        self._part_bytes = part_bytes
        self._memory = memory
        self._channels = channels
        self._changed = threading.Condition()
        self._shown: list[Snapshot] = []
        self._begun: OrderedDict[tuple[int, str], Mapping[str, Any]] = OrderedDict()
        self._taking: Counter[str] = Counter()
        self._closed = False
        self._server = TokenServer(host, 0, token, self._respond, tls=tls)

    @property
    def address(self) -> str:
        """``http://host:port``, or ``https://host:port``."""
        return self._server.address

    @property
    def load(self) -> int:
        """How many joiners are being sent something right now."""
        with self._changed:
            return len(self._taking)

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this under its outer step from now on, beside the last ones that are not retired as a whole.

        Transfers of those that are not kept go on until their sections are retired.

        Raises:
            ValueError: its header has no outer step.
        """
        outer_step = _outer_step(snapshot)
        with self._changed:
            # A rank that goes on from an earlier state has left the later ones behind.
            older = [
                shown
                for shown in self._shown
                if _outer_step(shown) < outer_step and not all(map(shown.is_retired, shown.sections))
            ]
            self._shown = [*older, snapshot][-self._keep :]
            self._changed.notify_all()

    def close(self) -> None:
        """Stop serving and cut off every transfer; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.close()

    def _respond(self, exchange: Exchange) -> None:
        match exchange.place:
            case "/status":
                self._say_status(exchange)
            case "/manifest":
                self._send_manifest(exchange)
            case "/part":
                self._send_part(exchange)
            case "/channel":
                self._open_channel(exchange)
            case "/taken":
                self._note_taken(exchange)
            case other:
                exchange.refuse(HTTPStatus.NOT_FOUND, f"there is no {other}")

    def _say_status(self, exchange: Exchange) -> None:
        listed = exchange.arguments.get("dead", "")
        try:
            dead = frozenset(int(slot) for slot in listed.split(",") if slot)
        except ValueError as error:
            raise BadRequest(f"dead={listed} is no list of slots") from error
        exchange.answer(dict(self._status(exchange.arguments.get("attempt", ""), dead)))

    def _send_manifest(self, exchange: Exchange) -> None:
        joiner = _joiner(exchange)
        sections = [section for section in exchange.arguments.get("sections", "").split(",") if section]
        shown = self._await(exchange)
        if shown is None:
            return
        if (wanted := _number(exchange, "outer_step", max(shown))) not in shown:
            # Who asks learns what there is instead.
            self._send_layout(exchange, Layout(header={"outer_step": max(shown)}, sections=(), places=()))
            return
        snapshot = shown[wanted]
        if not _may_be_read(exchange, snapshot, sections):
            return
        if joiner:
            self._remember(snapshot, joiner)
        size = sum(tensor.nbytes for section in sections for tensor in snapshot.sections[section].values())
        layout = Layout.of(snapshot, sections, part_bytes_of(size, self._part_bytes))
        with self._sending_to(joiner):
            self._send_layout(exchange, layout)

    def _send_layout(self, exchange: Exchange, layout: Layout) -> None:
        manifest = encode_manifest(layout)
        exchange.begin(len(manifest), _BYTES)
        exchange.send(memoryview(manifest))

    def _send_part(self, exchange: Exchange) -> None:
        joiner = _joiner(exchange)
        section = exchange.arguments.get("section", "")
        part = Part(section=section, start=_number(exchange, "start"), stop=_number(exchange, "stop"))
        shown = self._await(exchange)
        if shown is None:
            return
        if (wanted := _number(exchange, "outer_step", max(shown))) not in shown:
            exchange.refuse(HTTPStatus.GONE, f"outer step {wanted} is not kept any more")
            return
        snapshot = shown[wanted]
        if not _may_be_read(exchange, snapshot, [section]):
            return
        if not part.start < part.stop <= sum(tensor.nbytes for tensor in snapshot.sections[section].values()):
            raise BadRequest(f"{section} has no bytes {part.start} to {part.stop}")
        try:
            with self._sending_to(joiner), snapshot.reading(section, exchange.cut_off) as tensors:
                if exchange.arguments.get("by") == _CHANNEL and _CHANNEL in exchange.companions:
                    _send_over_channel(exchange, pieces(list(tensors.values()), part))
                    return
                exchange.begin(part.size + CHECKSUM_BYTES, _BYTES)
                digest = xxhash.xxh3_64()
                listed = list(tensors.values())
                for index, start, stop in spans([tensor.nbytes for tensor in listed], part):
                    self._send_bytes(exchange, listed[index], start, stop, digest)
                # Pages of a file may still wait in the socket when the section is retired: what is written there then
                # does not fit this checksum, so the joiner loses the part and never takes it for whole.
                exchange.send(memoryview(digest.digest()))
        except Retired:
            exchange.refuse(HTTPStatus.GONE, f"being written anew: {section}")

    def _send_bytes(
        self, exchange: Exchange, tensor: torch.Tensor, start: int, stop: int, digest: xxhash.xxh3_64
    ) -> None:
        """Send some bytes of a tensor, and let them be part of the checksum."""
        place = None
        if self._memory is not None and exchange.takes_files and stop - start >= _WORTH_A_FILE:
            place = self._memory.locate(tensor)
        content = raw_bytes(tensor)[start:stop]
        for at in range(0, len(content), _PIECE):
            piece = content[at : at + _PIECE]
            digest.update(piece)
            if place is None:
                exchange.send(piece)
            else:
                exchange.send_file(place.file, place.start + start + at, len(piece))

    def _open_channel(self, exchange: Exchange) -> None:
        match exchange.read_json():
            case {"library": str(library), "bound_s": int() | float() as bound_s} if bound_s > 0:
                pass
            case _:
                raise BadRequest("a channel needs a library and a bound_s")
        if self._channels is None or library != self._channels.library:
            exchange.refuse(HTTPStatus.NOT_IMPLEMENTED, f"there are no channels of {library}")
            return
        if _CHANNEL in exchange.companions:
            exchange.refuse(HTTPStatus.CONFLICT, "this connection has a channel")
            return
        try:
            channel = self._channels.open(bound_s, lambda invitation: exchange.answer(invitation.to_json()))
        except ChannelBroken as error:
            if exchange.has_begun:
                raise
            exchange.refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        exchange.companions[_CHANNEL] = channel

    def _note_taken(self, exchange: Exchange) -> None:
        outer_step, joiner = _number(exchange, "outer_step"), _joiner(exchange)
        with self._changed:
            header = self._begun.pop((outer_step, joiner), None)
        if header is None:
            exchange.refuse(HTTPStatus.NOT_FOUND, f"{joiner} has taken nothing of outer step {outer_step} here")
            return
        self._on_served(header, joiner)
        exchange.answer({})

    def _await(self, exchange: Exchange) -> dict[int, Snapshot] | None:
        """What is published once the outer step that is asked for can be; None: it is not, which was answered."""
        wanted = _number(exchange, "outer_step", 0)
        wait_s = min(_number(exchange, "wait_ms", 0) / 1000, _WAIT_S)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._newest() >= wanted, wait_s)
            shown = {_outer_step(snapshot): snapshot for snapshot in self._shown}
        if not shown:
            exchange.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "nothing is published yet")
            return None
        if max(shown) < wanted:
            exchange.refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"outer step {wanted} is not published yet")
            return None
        return shown

    def _newest(self) -> int:
        return _outer_step(self._shown[-1]) if self._shown else -1

    def _remember(self, snapshot: Snapshot, joiner: str) -> None:
        """Who takes a state says so only when it is in place; by then the snapshot may be a thing of the past."""
        with self._changed:
            self._begun[_outer_step(snapshot), joiner] = snapshot.header
            while len(self._begun) > _REMEMBERED:
                self._begun.popitem(last=False)

    @contextmanager
    def _sending_to(self, joiner: str) -> Iterator[None]:
        with self._changed:
            self._taking[joiner] += 1
        try:
            yield
        finally:
            with self._changed:
                self._taking[joiner] -= 1
                if not self._taking[joiner]:
                    del self._taking[joiner]


def _send_over_channel(exchange: Exchange, content: list[memoryview]) -> None:
    """Send pieces over the connection's channel, and here the checksum of each once it has left.

    When the section is retired, a few may still be on their way. Their checksums are from before, and never leave.
    """
    channel = exchange.companions[_CHANNEL]
    assert isinstance(channel, Channel)
    checksums: deque[bytes] = deque()

    def checked() -> Iterator[memoryview]:
        for piece in content:
            checksums.append(xxhash.xxh3_64_digest(piece))
            yield piece

    exchange.begin(CHECKSUM_BYTES * len(content), CHECKSUMS)
    channel.send(checked(), lambda: exchange.send(memoryview(checksums.popleft())))


def _may_be_read(exchange: Exchange, snapshot: Snapshot, sections: list[str]) -> bool:
    """Whether those sections can be sent; if not, that was answered."""
    if unknown := [section for section in sections if section not in snapshot.sections]:
        exchange.refuse(HTTPStatus.NOT_FOUND, f"there is no section {', '.join(unknown)}")
        return False
    if gone := [section for section in sections if snapshot.is_retired(section)]:
        exchange.refuse(HTTPStatus.GONE, f"being written anew: {', '.join(gone)}")
        return False
    return True


def _outer_step(snapshot: Snapshot) -> int:
    outer_step = snapshot.header.get("outer_step")
    if type(outer_step) is not int or outer_step < 0:
        raise ValueError(f"a snapshot of outer step {outer_step} cannot be published")
    return outer_step


def _number(exchange: Exchange, name: str, default: int | None = None) -> int:
    """An argument that is a whole number, not below 0."""
    text = exchange.arguments.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _NUMBER.fullmatch(text):
        raise BadRequest(f"{name}={text} is no number")
    return int(text)


def _joiner(exchange: Exchange) -> str:
    """Whom it is for; "" if that is not said."""
    joiner = exchange.arguments.get("for", "")
    if joiner and not _JOINER.fullmatch(joiner):
        raise BadRequest(f"for={joiner} is no <slot>.<incarnation>")
    return joiner
