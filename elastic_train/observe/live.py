"""The console of a living run: a view that stands still on a terminal, plain lines anywhere else.

It only looks. Whatever goes wrong in here is logged once and never reaches the run.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from elastic_train.clock import Clock, SystemClock
from elastic_train.events import Record
from elastic_train.metrics import RunFold
from elastic_train.observe import table, words

logger = logging.getLogger(__name__)

_REFRESHES_PER_S = 4
_HAPPENINGS_SHOWN = 8
# What the view shows beside the rows of the replicas: heading, bar, header of the table, blank lines.
_OTHER_LINES = _HAPPENINGS_SHOWN + 7


class LiveView:
    """Shows a run from its events and metrics records, which may come from any thread."""

    def __init__(
        self, *, notes: Sequence[str] = (), console: Console | None = None, clock: Clock | None = None
    ) -> None:
        """`notes` are shown first, a line each: what the config loader wants the user to know."""
        self.console = console or Console()
        self.fold = RunFold()
        self._notes = tuple(notes)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._happenings: deque[str] = deque(maxlen=_HAPPENINGS_SHOWN)
        self._live: Live | None = None
        self._complained = False

    def __enter__(self) -> LiveView:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Shows the notes and, on a terminal, takes the lower part of the screen."""
        self._guarded(self._start)

    def stop(self) -> None:
        """Gives the terminal back with the last view on it; a second call does nothing."""
        self._guarded(self._stop)

    def on_event(self, event: Record) -> None:
        """Takes one event of the merged log."""
        self._guarded(lambda: self._take_event(event))

    def on_metrics(self, record: Record) -> None:
        """Takes one record of metrics.jsonl."""
        self._guarded(lambda: self._take_metrics(record))

    def render(self) -> RenderableType:
        """The view as it is now; rich asks for it on its refresh thread."""
        try:
            return self._view()
        except Exception as error:
            self._complain(error)
            return Text("the view failed; the run goes on")

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        # rich ends the program when the reader of its output is gone (`... | head`); the run outlives that.
        except (Exception, SystemExit) as error:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        if not self._complained:
            self._complained = True
            logger.error("the live view failed; the run goes on, and its log stays complete", exc_info=error)

    def _start(self) -> None:
        for note in self._notes:
            self._line(f"note: {note}")
        if self.console.is_interactive:
            self._live = Live(console=self.console, get_renderable=self.render, refresh_per_second=_REFRESHES_PER_S)
            self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _take_event(self, event: Record) -> None:
        with self._lock:
            quorum = self.fold.quorum
            self.fold.apply(event)
            if event["event"] == "quorum_changed" and self.fold.quorum is quorum:
                return  # every member reports it
            told = words.happening(event, self.fold)
            line = None if told is None else f"{event['t'] - (self.fold.started_t or 0.0):7.1f} s  {told}"
            if line is not None:
                self._happenings.append(line)
        if event["event"] == "sync_committed":
            line = sync_line(event)
        if line is not None and not self.console.is_interactive:
            self._line(line)

    def _take_metrics(self, record: Record) -> None:
        with self._lock:
            self.fold.apply_metrics(record)
        if not self.console.is_interactive:
            self._line(step_line(record))

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _view(self) -> RenderableType:
        room = max(1, self.console.size.height - _OTHER_LINES)
        with self._lock:
            now = self._clock.now()
            return Group(
                table.heading(self.fold, now),
                table.progress(self.fold),
                Text(),
                table.replicas(self.fold, now, room),
                Text(),
                Text("\n".join(self._happenings), no_wrap=True, overflow="ellipsis"),
            )


def step_line(record: Record) -> str:
    """A record of metrics.jsonl as torchtitan's console shows a step."""
    figures = [f"step: {record['step']:2}"]
    for name, form in (("loss", "8.5f"), ("grad_norm", "7.4f"), ("tps", ",.0f")):
        if name in record:
            value = math.nan if record[name] is None else record[name]
            figures.append(f"{name}: {value:{form}}")
    return f"replica {record['replica']}  " + "  ".join(figures)


def sync_line(event: Record) -> str:
    """What one replica had of an outer step."""
    line = f"replica {event['replica']}  outer step: {event['outer_step']:2}"
    line += f"  with {words.slots(event['participants'])}"
    for name, verb in (("wait_s", "waited"), ("reduce_s", "reduced")):
        if name in event:
            line += f"  {verb}: {event[name]:.2f} s"
    return line
