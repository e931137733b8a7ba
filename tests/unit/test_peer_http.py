from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from elastic_train.peer_ckpt.http import MeteredHTTPTransport

STATE: dict[str, Any] = {
    "theta": {"weight": torch.arange(6.0)},
    "inner": [{"step": 3, "exp_avg": torch.ones(2, dtype=torch.bfloat16)}],
}
TIMEOUT = timedelta(seconds=20)


class Ends:
    """The transports of a donor and a joiner, and how often the joiner began to receive."""

    def __init__(self, chunks: int) -> None:
        self.began = 0
        self.donor = self._make(chunks)
        self.joiner = self._make(chunks)

    def _make(self, chunks: int) -> MeteredHTTPTransport:
        return MeteredHTTPTransport(timeout_s=20.0, chunks=chunks, advertise_host="127.0.0.1", on_receive=self._begin)

    def _begin(self) -> None:
        self.began += 1


@pytest.fixture(params=[0, 2], ids=["whole", "in chunks"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.donor.shutdown(wait=False)
    made.joiner.shutdown(wait=False)


def test_a_state_arrives_and_is_measured(ends: Ends) -> None:
    ends.donor.send_checkpoint([1], step=7, state_dict=STATE, timeout=TIMEOUT)

    received = ends.joiner.recv_checkpoint(0, ends.donor.metadata(), step=7, timeout=TIMEOUT)

    assert torch.equal(received["theta"]["weight"], STATE["theta"]["weight"])
    assert received["inner"][0]["step"] == 3
    assert ends.began == 1
    assert ends.joiner.received is not None
    assert ends.joiner.received.bytes == 6 * 4 + 2 * 2
    assert ends.joiner.received.duration_s > 0
    assert ends.donor.received is None


def test_peers_connect_to_the_host_that_was_advertised(ends: Ends) -> None:
    assert ends.donor.metadata().startswith("http://127.0.0.1:")


def test_a_transfer_that_failed_was_not_received(ends: Ends) -> None:
    ends.donor.send_checkpoint([1], step=7, state_dict=STATE, timeout=TIMEOUT)

    with pytest.raises(OSError, match="HTTP Error 400"):
        ends.joiner.recv_checkpoint(0, ends.donor.metadata(), step=8, timeout=TIMEOUT)

    assert (ends.began, ends.joiner.received) == (1, None)
