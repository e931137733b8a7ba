"""Waits in tests: for what is meant to happen, with a bound."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_EVERY_S = 0.02


def wait_until(condition: Callable[[], T | None], *, within_s: float = 60.0) -> T:
    """Look at ``condition`` until it gives something true, and return that; fails when the time is up."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {condition}"
        pause.wait(_LOOK_EVERY_S)
    return value
