"""The processes that a script has started, and its connections to them."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_LEAVE_S = 10.0


def end(processes: Sequence[BaseProcess], connections: Sequence[Connection]) -> None:
    """End all processes, whatever they do, and close the connections."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_LEAVE_S)
    for connection in connections:
        connection.close()
