import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from elastic_train.orchestrator.barrier import ColdStart

LONG_S = 3600.0

Scenario = Callable[[ColdStart], Coroutine[Any, Any, None]]


def play(slots: int, scenario: Scenario) -> None:
    asyncio.run(scenario(ColdStart(slots)))


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_all_are_released_together_once_the_last_is_ready() -> None:
    async def scenario(start: ColdStart) -> None:
        release = asyncio.ensure_future(start.release_when_ready(LONG_S, least=1))
        arrivals = [asyncio.ensure_future(start.arrive(slot)) for slot in (2, 0)]
        await settle()
        assert not start.released
        assert not any(arrival.done() for arrival in arrivals)

        await start.arrive(1)
        await settle()

        assert all(arrival.done() for arrival in arrivals)
        assert await release == start.released_slots == {0, 1, 2}

    play(3, scenario)


def test_when_the_time_is_up_those_that_are_ready_go() -> None:
    async def scenario(start: ColdStart) -> None:
        arrivals = [asyncio.ensure_future(start.arrive(slot)) for slot in (0, 2)]

        assert await start.release_when_ready(0.01, least=2) == {0, 2}

        await asyncio.gather(*arrivals)
        await start.wait()

    play(3, scenario)


def test_too_few_are_not_released() -> None:
    async def scenario(start: ColdStart) -> None:
        arrival = asyncio.ensure_future(start.arrive(0))

        with pytest.raises(TimeoutError):
            await start.release_when_ready(0.01, least=2)

        assert not start.released
        assert start.released_slots == frozenset()
        arrival.cancel()

    play(3, scenario)


def test_nobody_waits_for_one_that_was_given_up() -> None:
    async def scenario(start: ColdStart) -> None:
        release = asyncio.ensure_future(start.release_when_ready(LONG_S, least=1))
        arrival = asyncio.ensure_future(start.arrive(0))
        await settle()
        before = start.released

        start.give_up(1)
        await settle()

        assert (before, start.released) == (False, True)
        await arrival
        assert await release == {0}

    play(2, scenario)


def test_without_anybody_there_is_no_release() -> None:
    async def scenario(start: ColdStart) -> None:
        start.give_up(0)

        with pytest.raises(TimeoutError):
            await start.release_when_ready(0.01, least=1)

    play(1, scenario)


def test_who_comes_after_the_release_does_not_wait_and_was_not_released() -> None:
    async def scenario(start: ColdStart) -> None:
        arrival = asyncio.ensure_future(start.arrive(0))
        await start.release_when_ready(0.01, least=1)

        await start.arrive(1)

        await arrival
        assert start.released_slots == {0}

    play(2, scenario)
