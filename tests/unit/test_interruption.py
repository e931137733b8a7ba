"""One signal asks, a second one hurries, a third one is not ours any more."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from elastic_train.orchestrator.interruption import Interruption

END_S = 20


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of the test's own process, put back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("first", "second"), [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGTERM)])
def test_signals_in_a_row(first: signal.Signals, second: signal.Signals) -> None:
    async def play() -> None:
        interruption = Interruption()
        interruption.listen()
        os.kill(os.getpid(), first)
        await asyncio.wait_for(interruption.asked(), END_S)
        found = [interruption.is_hurried]
        os.kill(os.getpid(), second)
        await asyncio.wait_for(interruption.hurried(), END_S)
        assert [*found, interruption.is_hurried] == [False, True]
        assert {signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} == {signal.SIG_DFL}

    asyncio.run(play())
