"""When a standby may be made."""

import asyncio

from elastic_train.orchestrator.turns import StandbyTurns

ROUNDS = 20
"""Of the event loop: more than anything here needs to go on."""


async def settle() -> None:
    """Let everything go as far as it can."""
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


def test_one_at_a_time() -> None:
    async def check() -> None:
        turns, log, ends = StandbyTurns(), list[str](), {name: asyncio.Event() for name in "ab"}

        async def make(name: str) -> None:
            async with turns.turn():
                log.append(f"{name} begins")
                await ends[name].wait()
                log.append(f"{name} ends")

        tasks = [asyncio.ensure_future(make(name)) for name in "ab"]
        ends["b"].set()
        await settle()
        assert log == ["a begins"]
        ends["a"].set()
        await asyncio.gather(*tasks)
        assert log == ["a begins", "a ends", "b begins", "b ends"]

    asyncio.run(check())


def test_not_while_any_replica_starts() -> None:
    async def check() -> None:
        turns, had = StandbyTurns(), asyncio.Event()

        async def make() -> None:
            async with turns.turn():
                had.set()

        turns.starts(0)
        turns.starts(1)
        turns.starts(1)
        task = asyncio.ensure_future(make())
        await settle()
        turns.started(1)
        await settle()
        assert not had.is_set()
        turns.started(7)
        turns.started(0)
        await task
        assert had.is_set()

    asyncio.run(check())


def test_who_gives_up_or_fails_leaves_the_turn_to_the_next() -> None:
    async def check() -> None:
        turns, had = StandbyTurns(), list[str]()

        async def make(name: str) -> None:
            async with turns.turn():
                had.append(name)
                if name == "fails":
                    raise RuntimeError(name)

        turns.starts(0)
        tasks = {name: asyncio.ensure_future(make(name)) for name in ("gives up", "fails", "next")}
        await settle()
        tasks["gives up"].cancel()
        turns.started(0)
        await asyncio.wait(tasks.values())
        assert had == ["fails", "next"]

    asyncio.run(check())
