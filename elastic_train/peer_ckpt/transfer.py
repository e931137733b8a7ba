"""One state fetched from several donors at once, of which any may die, stall or send what is damaged.

Sections that are the same on all donors are fetched from all of them, part by part; the others come from one donor,
the primary. Who fails is left out from then on: its unfinished parts go to the others, and only if it was the primary,
what it alone has begins anew with the next one. Every part goes straight to its place in the new tensors, and counts
once it has the checksum that its donor sent behind it.

One thread, the caller's, decides: it takes layouts up, allots the work and looks for other donors. The threads of a
donor read, check and report; they let go of the new tensors before their work is given to anybody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlencode

import torch

from elastic_train.peer_ckpt.layout import Layout, LayoutError
from elastic_train.peer_ckpt.manifest import read_manifest
from elastic_train.peer_ckpt.parts import Part
from elastic_train.peer_ckpt.request import Connection, RequestFailed
from elastic_train.peer_ckpt.snapshot import Snapshot
from elastic_train.peer_ckpt.stream import Stream

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
"""How long the caller's thread waits at most before it looks around again."""
_PATIENCE = 0.8
"""Of the allowed silence: how long a donor may wait for a state that it is just about to publish."""


@dataclass(frozen=True, kw_only=True)
class Donor:
    """One rank of a replica that holds what is wanted."""

    slot: int
    incarnation: int
    address: str
    """``http://host:port`` of that rank's server."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A state that arrived whole."""

    snapshot: Snapshot
    primary: Donor
    """Whose header it has, and whose are the sections that are not shared."""
    donors: Mapping[Donor, int]
    """The bytes that came from each; donors that gave none are not listed."""
    refetched: int
    """Bytes that arrived in vain and were fetched once more."""
    by_channel: int = 0
    """Bytes that came over channels, also in vain."""


class TransferFailed(Exception):
    """A state did not arrive whole; its text says why, of every donor. Nothing of it may be used."""


class Unwanted(TransferFailed):
    """Every donor has gone past the outer step that was asked for, up to ``outer_step``."""

    def __init__(self, text: str, outer_step: int) -> None:
        super().__init__(text)
        self.outer_step = outer_step


Replace = Callable[[Collection[Donor]], Sequence[Donor]]
"""Given the donors that are lost: others, as far as there are any. Those that are known already are ignored."""

OnProgress = Callable[[int, int, Mapping[Donor, int]], None]
"""Given the bytes that are in place, those of everything (0: not known yet), and what each donor gave of them."""

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""A contiguous host tensor of that shape, whose content does not matter."""


class _Work:
    """Sections that are fetched together, and how far they are. Who uses it holds the transfer's lock."""

    def __init__(self, sections: Sequence[str]) -> None:
        self.sections = tuple(sections)
        self.layout: Layout | None = None
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.settled: Counter[_Link] = Counter()
        """Bytes whose checksums were right, by who sent them."""
        self.missing: deque[Part] = deque()
        self.in_flight = 0

    @property
    def finished(self) -> bool:
        """Whether everything is in place."""
        return not self.sections or (self.layout is not None and not self.missing and not self.in_flight)

    def begin(self, layout: Layout, allocate: Allocate) -> None:
        """Let parts be taken, into new tensors or into those of an earlier beginning."""
        if self.layout is None or self.layout.places != layout.places:
            # The old ones go first: there is never room for two.
            self.tensors = {section: {} for section in self.sections}
            for place in layout.places:
                tensor = allocate(place.shape, place.dtype)
                if (tuple(tensor.shape), tensor.dtype) != (place.shape, place.dtype):
                    raise ValueError(
                        f"{place.section}/{place.name} cannot be received into {tensor.dtype}{list(tensor.shape)}"
                    )
                self.tensors[place.section][place.name] = tensor
        self.layout = layout
        self.missing = deque(layout.parts())
        self.settled.clear()


class _Link:
    """One donor, as long as it is of use."""

    def __init__(self, donor: Donor) -> None:
        self.donor = donor
        self.lost: str | None = None
        """Why it is of no use any more."""
        self.newer: int | None = None
        """The outer step that it has instead, if that is the reason."""
        self.offers: dict[_Work, Layout] = {}
        """How it says that they are laid out."""
        self.serves: set[_Work] = set()
        """Those of which it may be asked for parts."""
        self.connections: list[Connection] = []
        self.threads: list[threading.Thread] = []
        self.running = 0
        """Threads that may still touch the new tensors."""
        self.streams: list[Stream] = []
        self.takes_channels = True
        """Whether there is no reason yet to think that it has none to give."""


class Transfer:
    """One fetch. It is used once, by :meth:`run`."""

    def __init__(
        self,
        connect: Callable[[str], Connection],
        sections: Sequence[str],
        *,
        want: int,
        shared: Collection[str],
        joiner: str,
        timeout_s: float,
        idle_s: float,
        streams: int,
        into: Allocate,
        channel_device: torch.device | None = None,
    ) -> None:
        """
        Args:
            connect: a connection to an address, not connected yet, that gives up after a silence of ``idle_s``.
            channel_device: where the tensors of channels are; None: parts come over the connections.

        The others are those of ``PeerClient.fetch``.
        """
        if not sections or len(set(sections)) < len(sections):
            raise ValueError(f"the sections {list(sections)} cannot be fetched")
        if streams < 1:
            raise ValueError(f"nothing can be fetched over {streams} connections")
        self._connect = connect
        self._sections = tuple(sections)
        self._want = want
        self._joiner = joiner
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._wait_ms = int(idle_s * 1000 * _PATIENCE)
        self._streams = streams
        self._into = into
        self._channel_device = channel_device
        self._deadline = time.monotonic() + timeout_s
        self._shared = _Work([section for section in sections if section in shared])
        self._own = _Work([section for section in sections if section not in shared])
        self._primary: _Link | None = None
        self._reference: _Link | None = None
        self._links: dict[Donor, _Link] = {}
        self._changed = threading.Condition()
        self._replaced: set[Donor] = set()
        self._news = False
        self._over = False

    def run(
        self, donors: Sequence[Donor], replace: Replace, on_progress: OnProgress, alive: Callable[[], None]
    ) -> Fetched:
        """Everything, in this thread and in some that end before it returns or raises.

        Raises:
            TransferFailed: it did not arrive whole.
        """
        try:
            self._add(donors)
            while True:
                self._look_around(replace)
                finished = self._finished()
                alive()
                on_progress(*self._progress())
                if finished:
                    break
                with self._changed:
                    self._changed.wait_for(lambda: self._news, _LOOK_S)
                    self._news = False
                if time.monotonic() > self._deadline:
                    raise TransferFailed(f"it did not arrive within {self._timeout_s:g} s{self._reasons()}")
        finally:
            self._end()
        return self._fetched()

    # What the caller's thread decides.

    def _add(self, donors: Iterable[Donor]) -> None:
        for donor in donors:
            if donor not in self._links:
                link = self._links[donor] = _Link(donor)
                if self._shared.sections:
                    self._ask_for(link, self._shared)

    def _look_around(self, replace: Replace) -> None:
        """Take up what the donors say, and see that there are donors."""
        for link in self._living():
            with self._changed:
                offers = [(work, layout) for work, layout in link.offers.items() if work not in link.serves]
            for work, layout in offers:
                self._take_up(link, work, layout)
        lost = {link.donor for link in self._links.values() if link.lost is not None}
        if lost != self._replaced and not self._finished():
            self._replaced = lost
            self._add(replace(lost))
        self._find_primary()
        # Who is lost only since then comes first to be replaced.
        if len(self._replaced) == len(self._links) and not self._finished():
            text = f"no donor is left{self._reasons()}"
            newer = [link.newer for link in self._links.values() if link.newer is not None]
            if newer and len(newer) == len(self._links):
                raise Unwanted(text, max(newer))
            raise TransferFailed(text)

    def _take_up(self, link: _Link, work: _Work, layout: Layout) -> None:
        """Let parts be fetched as a donor describes them, if that is how the others do."""
        if work is self._shared and self._reference is not None:
            reference = self._reference.offers[work]
            if (layout.places, layout.part_bytes) != (reference.places, reference.part_bytes):
                self._lose(link, f"it has other tensors than replica {self._reference.donor.slot}")
                return
        else:
            # Nobody else looks at the work as long as no donor serves it.
            try:
                work.begin(layout, self._into)
            except (RuntimeError, MemoryError, OverflowError) as error:
                raise TransferFailed(f"there is no memory for {layout.size} bytes: {error}") from error
            if work is self._shared:
                self._reference = link
        with self._changed:
            hauls = bool(link.serves)
            link.serves.add(work)
            self._changed.notify_all()
        if not hauls:
            for number in range(self._streams):
                self._start(link, f"parts {number}", self._haul)

    def _find_primary(self) -> None:
        """See that some donor is asked for what only one can give."""
        primary = self._primary
        if self._own.finished or (primary is not None and (primary.lost is None or primary.running)):
            return
        for link in self._living():
            self._primary = link
            self._ask_for(link, self._own)
            return

    def _ask_for(self, link: _Link, work: _Work) -> None:
        self._start(link, "manifest", lambda link, connection: self._describe(link, work, connection))

    def _start(self, link: _Link, name: str, run: Callable[[_Link, Connection], None]) -> None:
        """A thread with a connection of its own, both of which end with the link."""
        connection = self._connect(link.donor.address)

        def body() -> None:
            try:
                with connection:
                    run(link, connection)
            except (RequestFailed, OSError, ValueError) as error:
                self._lose(link, str(error))
            except Exception as error:
                logger.exception("fetching from replica %d broke", link.donor.slot)
                self._lose(link, repr(error))
            finally:
                with self._changed:
                    link.running -= 1
                    self._tell()

        thread = threading.Thread(target=body, name=f"{name} of replica {link.donor.slot}", daemon=True)
        with self._changed:
            if link.lost is not None:
                return
            link.connections.append(connection)
            link.running += 1
        try:
            thread.start()
        except RuntimeError as error:
            with self._changed:
                link.running -= 1
            self._lose(link, str(error))
        else:
            link.threads.append(thread)

    def _living(self) -> list[_Link]:
        return [link for link in self._links.values() if link.lost is None]

    def _finished(self) -> bool:
        with self._changed:
            return self._shared.finished and self._own.finished

    def _progress(self) -> tuple[int, int, Mapping[Donor, int]]:
        with self._changed:
            settled = self._shared.settled + self._own.settled
            total = sum(work.layout.size for work in (self._shared, self._own) if work.layout is not None)
        return settled.total(), total, {link.donor: size for link, size in settled.items()}

    def _reasons(self) -> str:
        lost = [f"replica {link.donor.slot}: {link.lost}" for link in self._links.values() if link.lost is not None]
        return f": {'; '.join(lost)}" if lost else ""

    def _fetched(self) -> Fetched:
        described = self._primary if self._own.sections else self._reference
        assert described is not None, "nothing is finished before it was described"
        header = described.offers[self._own if self._own.sections else self._shared].header
        tensors = self._own.tensors | self._shared.tensors
        received, _, donors = self._progress()
        streams = [stream for link in self._links.values() for stream in link.streams]
        by_channel = sum(stream.by_channel for stream in streams)
        if self._channel_device is not None:
            logger.info("%d bytes of outer step %d came over channels", by_channel, self._want)
        return Fetched(
            snapshot=Snapshot(header, {section: tensors[section] for section in self._sections}),
            primary=described.donor,
            donors=donors,
            refetched=sum(stream.arrived for stream in streams) - received,
            by_channel=by_channel,
        )

    def _end(self) -> None:
        """No thread is left, and nobody touches the tensors."""
        with self._changed:
            self._over = True
            for link in self._links.values():
                for connection in link.connections:
                    connection.close()
            self._changed.notify_all()
        for link in self._links.values():
            for thread in link.threads:
                thread.join()

    # What the threads of the donors do.

    def _describe(self, link: _Link, work: _Work, connection: Connection) -> None:
        """Read a manifest."""
        target = self._target("manifest", sections=",".join(work.sections), wait_ms=self._wait_ms)
        with connection.request(target, deadline=self._deadline) as answer:
            layout = read_manifest(answer)
            outer_step = layout.header.get("outer_step")
            if outer_step != self._want:
                if type(outer_step) is int and outer_step > self._want:
                    link.newer = outer_step
                raise LayoutError(f"it has outer step {outer_step}, not {self._want}")
            if layout.sections != work.sections:
                raise LayoutError(f"it has the sections {', '.join(map(str, layout.sections))}")
        with self._changed:
            link.offers[work] = layout
            self._tell()

    def _haul(self, link: _Link, connection: Connection) -> None:
        """Fetch parts, as long as there are any that this donor can give."""
        stream = Stream(connection, self._deadline, f"replica {link.donor.slot}")
        with self._changed:
            link.streams.append(stream)
        with closing(stream):
            self._open_channel(link, stream)
            while (taken := self._take(link)) is not None:
                work, part = taken
                is_right = False
                try:
                    target = self._target("part", section=part.section, start=part.start, stop=part.stop)
                    stream.fetch(target, list(work.tensors[part.section].values()), part)
                    is_right = True
                finally:
                    with self._changed:
                        work.in_flight -= 1
                        if is_right and not self._is_over(link):
                            work.settled[link] += part.size
                        else:
                            work.missing.appendleft(part)
                        self._tell()

    def _open_channel(self, link: _Link, stream: Stream) -> None:
        """If there are to be channels; a donor that has none to give is as good without."""
        if self._channel_device is None or not link.takes_channels:
            return
        try:
            stream.open_channel(self._target("channel"), self._channel_device, self._idle_s)
        except RequestFailed as error:
            self._do_without_channels(link, str(error))

    def _do_without_channels(self, link: _Link, reason: str) -> None:
        with self._changed:
            is_known = not link.takes_channels or self._is_over(link)
            link.takes_channels = False
        if not is_known:
            logger.info("parts of replica %d come over connections, not channels: %s", link.donor.slot, reason)

    def _take(self, link: _Link) -> tuple[_Work, Part] | None:
        """What this donor is to give next; waits for it. None: nothing any more."""
        with self._changed:
            while not self._is_over(link):
                # What only the primary can give goes first, also while it still says what that is: others can give
                # the rest meanwhile.
                waits = link is self._primary and self._own not in link.serves and not self._own.finished
                for work in (self._own,) if waits else (self._own, self._shared):
                    if work in link.serves and work.missing:
                        work.in_flight += 1
                        return work, work.missing.popleft()
                self._changed.wait()
        return None

    def _lose(self, link: _Link, reason: str) -> None:
        """Leave a donor out from now on, and cut off what its threads are doing."""
        with self._changed:
            if self._is_over(link):
                return
            link.lost = reason
            for connection in link.connections:
                connection.close()
            self._tell()
        logger.info("replica %d is no donor any more: %s", link.donor.slot, reason)

    def _is_over(self, link: _Link) -> bool:
        return self._over or link.lost is not None

    def _tell(self) -> None:
        """Wake everybody, the caller's thread too."""
        self._news = True
        self._changed.notify_all()

    def _target(self, place: str, **arguments: object) -> str:
        whom = {"for": self._joiner} if self._joiner else {}
        return f"/{place}?{urlencode({'outer_step': self._want, **arguments, **whom})}"
