import logging

import pytest

from elastic_train.clock import ManualClock
from elastic_train.peer_ckpt.outage import Outage


def test_a_line_at_first_then_one_a_minute_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    outage = Outage("it", logging.getLogger("outage"), clock)
    caplog.set_level(logging.INFO)
    outage.is_over()
    for _ in range(700):
        outage.goes_on("refused")
        clock.advance(0.2)
    outage.is_over()
    outage.is_over()
    assert caplog.messages == [
        "it does not answer and is asked again: refused",
        "it has not answered for 60 s: refused",
        "it has not answered for 120 s: refused",
        "it answers again, after 140.0 s",
    ]
