import asyncio
import logging
from collections.abc import Generator

import pytest

from elastic_train.futures import result, within


class Future:
    """Can be awaited and is no coroutine, like Monarch's."""

    def __init__(self, outcome: object) -> None:
        self.outcome = outcome

    def __await__(self) -> Generator[None, None, object]:
        yield from asyncio.sleep(0).__await__()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Never:
    def __await__(self) -> Generator[None, None, object]:
        yield from asyncio.sleep(3600).__await__()
        return None


def test_a_future_becomes_a_task() -> None:
    async def main() -> object:
        return await asyncio.create_task(result(Future(7)))

    assert asyncio.run(main()) == 7


@pytest.mark.parametrize(
    ("future", "logged"),
    [
        (Future(None), []),
        (Never(), ["a mesh does not stop: TimeoutError"]),
        (Future(RuntimeError("host lost")), ["a mesh does not stop: host lost"]),
    ],
)
def test_an_ending_holds_nobody_up(caplog: pytest.LogCaptureFixture, future: object, logged: list[str]) -> None:
    with caplog.at_level(logging.WARNING, logger="elastic_train.futures"):
        asyncio.run(within(0.01, future, "a mesh does not stop"))

    assert caplog.messages == logged
