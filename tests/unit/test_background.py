"""Work in the background steps back, and nothing else does."""

import os
import sys

import pytest

from elastic_train.replica.background import behind_others


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_only_its_own_thread_steps_back() -> None:
    before, found = priority(), []
    behind_others(lambda: found.append(priority()))
    assert found == [19]
    assert priority() == before


def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        behind_others(lambda: 1 / 0)
