"""What a rank says to its peers: how it stands, and the state that it publishes for those that are behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from elastic_train.peer_ckpt.layout import Layout
from elastic_train.peer_ckpt.service import BadRequest, Exchange, TokenServer
from elastic_train.peer_ckpt.shards import raw_bytes
from elastic_train.peer_ckpt.snapshot import Retired, Snapshot

Status = Callable[[str, frozenset[int]], Mapping[str, Any]]
"""Given an attempt ("" if none is meant) and the slots that the asker knows to be dead in it: how this rank stands."""

Served = Callable[[Snapshot, tuple[str, ...]], None]
"""A peer has taken those sections of that snapshot."""


class PeerServer:
    """``GET /status?attempt=&dead=1,2`` and ``GET /state?sections=a,b``, in threads beside the training."""

    def __init__(
        self, host: str, token: str, status: Status, on_served: Served = lambda snapshot, sections: None
    ) -> None:
        """
        Args:
            host: name or address to listen at, and under which peers connect.
            status: called in a thread of the server; what it returns is sent as JSON.
            on_served: called in a thread of the server, after the last byte was sent.

        Raises:
            OSError: it cannot listen there.
            ValueError: the token is empty.
        """
        self._status = status
        self._on_served = on_served
        self._snapshot: Snapshot | None = None
        self._server = TokenServer(host, 0, token, self._respond)

    @property
    def address(self) -> str:
        """``http://host:port``."""
        return self._server.address

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this from now on; transfers of the one before go on until its sections are retired."""
        self._snapshot = snapshot

    def close(self) -> None:
        """Stop serving and cut off every transfer; a second call does nothing."""
        self._server.close()

    def _respond(self, exchange: Exchange) -> None:
        match exchange.place:
            case "/status":
                self._say_status(exchange)
            case "/state":
                self._send_state(exchange)
            case other:
                exchange.refuse(HTTPStatus.NOT_FOUND, f"there is no {other}")

    def _say_status(self, exchange: Exchange) -> None:
        listed = exchange.arguments.get("dead", "")
        try:
            dead = frozenset(int(slot) for slot in listed.split(",") if slot)
        except ValueError as error:
            raise BadRequest(f"dead={listed} is no list of slots") from error
        exchange.answer(dict(self._status(exchange.arguments.get("attempt", ""), dead)))

    def _send_state(self, exchange: Exchange) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            exchange.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "nothing is published yet")
            return
        sections = [section for section in exchange.arguments.get("sections", "").split(",") if section]
        if unknown := [section for section in sections if section not in snapshot.sections]:
            exchange.refuse(HTTPStatus.NOT_FOUND, f"there is no section {', '.join(unknown)}")
            return
        if gone := [section for section in sections if snapshot.is_retired(section)]:
            exchange.refuse(HTTPStatus.GONE, f"being written anew: {', '.join(gone)}")
            return
        layout = Layout.of(snapshot, sections)
        head = layout.encode()
        exchange.begin(len(head) + layout.size, "application/octet-stream")
        exchange.send(memoryview(head))
        for section in layout.sections:
            try:
                with snapshot.reading(section, exchange.cut_off) as tensors:
                    for tensor in tensors.values():
                        exchange.send(raw_bytes(tensor))
            except Retired:
                # The connection ends with the answer too short, which is how the peer learns of it.
                return
        self._on_served(snapshot, layout.sections)
