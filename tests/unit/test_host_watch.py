"""How it shows that another host is lost."""

import asyncio
from collections.abc import Awaitable, Callable

from elastic_train.clock import ManualClock, SystemClock
from elastic_train.orchestrator.host_watch import HostWatch

Hold = Callable[[int], Awaitable[int]]


async def never() -> str:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def watch(hold: Hold, broken: Callable[[], Awaitable[str]] = never) -> HostWatch:
    return HostWatch(hold, broken, timeout_s=0.5, start_s=0.5, clock=SystemClock())


def test_each_question_names_the_last_answer() -> None:
    heard: list[int] = []

    async def hold(last: int) -> int:
        heard.append(last)
        if len(heard) > 3:
            await never()
        return len(heard)

    clock = ManualClock()

    async def scene() -> float:
        watching = HostWatch(hold, never, timeout_s=0.5, start_s=0.5, clock=clock)
        assert "has not answered for" in await watching.lost()
        clock.advance(5.0)
        return watching.heard_at

    assert asyncio.run(scene()) == 0.0
    assert heard == [0, 1, 2, 3]


def test_one_that_never_answers_is_lost() -> None:
    async def hold(last: int) -> int:
        await never()
        return last

    clock = ManualClock()
    watching = HostWatch(hold, never, timeout_s=0.5, start_s=0.5, clock=clock)
    assert "has not answered for" in asyncio.run(watching.lost())
    clock.advance(5.0)
    # It may have been started in this moment, and goes on from then.
    assert watching.heard_at == 5.0


def test_a_broken_connection_is_a_loss_at_once() -> None:
    async def hold(last: int) -> int:
        return last + 1

    async def broken() -> str:
        return "its remote shell ended with code 255"

    assert asyncio.run(watch(hold, broken).lost()) == "its remote shell ended with code 255"


def test_an_actor_that_has_failed_is_no_loss_of_its_host() -> None:
    async def hold(last: int) -> int:
        raise RuntimeError("the actor is gone")

    async def scene() -> bool:
        lost = asyncio.ensure_future(watch(hold).lost())
        done, _ = await asyncio.wait({lost}, timeout=1.5)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        return bool(done)

    assert not asyncio.run(scene())
