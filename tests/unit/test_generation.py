"""What belongs to one generation ends with it, and joiners wait for somebody to join."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from elastic_train.orchestrator.barrier import ColdStart
from elastic_train.orchestrator.generation import Generation, GenerationOver, Plea


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_what_is_waited_for_ends_with_the_generation() -> None:
    async def scenario() -> None:
        generation, ended = Generation(barrier=ColdStart(1)), asyncio.Event()

        async def training() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        waiting = asyncio.ensure_future(generation.unless_over(training()))
        await settle()
        assert not waiting.done()
        generation.end()
        with pytest.raises(GenerationOver):
            await waiting
        assert ended.is_set()

    play(scenario())


def test_what_is_done_counts_even_at_the_end() -> None:
    async def scenario() -> None:
        generation = Generation(barrier=ColdStart(1))
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        done.set_result(7)
        generation.end()
        assert await generation.unless_over(done) == 7

    play(scenario())


def test_the_first_plea_counts() -> None:
    async def scenario() -> None:
        generation = Generation(barrier=ColdStart(1))
        asked = asyncio.ensure_future(generation.asked())
        await settle()
        assert not asked.done()
        first = Plea(cause="signal", reason="first")
        generation.ask_to_restore(first)
        generation.ask_to_restore(Plea(cause="hang", reason="second"))
        assert await asked is first

    play(scenario())


def test_a_joiner_waits_until_somebody_holds_the_state() -> None:
    async def scenario() -> None:
        generation = Generation(barrier=ColdStart(1))
        # Before the release nobody is a joiner.
        await asyncio.wait_for(generation.worth_joining(), 1)
        generation.barrier.give_up(0)
        with pytest.raises(TimeoutError):
            await generation.barrier.release_when_ready(0.0, least=1)
        await generation.barrier.release_when_ready(0.0, least=0)
        joiner = asyncio.ensure_future(generation.worth_joining())
        await settle()
        assert not joiner.done()
        generation.holders.add(1)
        await asyncio.wait_for(joiner, 10)

    play(scenario())
