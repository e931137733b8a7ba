"""Work that is in no hurry: it gets the processors that nobody else wants."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_LOWEST = 19


def behind_others(work: Callable[[], object]) -> None:
    """Do it in a thread of the lowest priority, and wait for it. Raises what it raises.

    A thread of its own, since without privileges nobody gets back the priority that it has given up. Where priorities
    belong to whole processes, as elsewhere than on Linux, it has the process's.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="background", initializer=_step_back) as executor:
        executor.submit(work).result()


def _step_back() -> None:
    if sys.platform == "linux":
        # Of the calling thread.
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
