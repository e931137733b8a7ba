"""What is asked of a Lighthouse from outside, and how it is loaded: with a real one, in a process of its own."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic_train.lighthouse.probe import answers
from tests.programs import finished
from tests.waiting import wait_until

LIGHTHOUSE = """
import sys
from elastic_train.lighthouse.native import load_native
server = load_native().LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
print(server.address().rpartition(":")[2], "torch" in sys.modules, flush=True)
sys.stdin.readline()
"""
PATIENCE_S = 30.0


@pytest.fixture
def lighthouse() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Its process, and where it listens."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", LIGHTHOUSE], text=True, **pipes) as process:  # type: ignore[call-overload]
        port, has_torch = next(line for line in process.stdout if "torchft" not in line).split()
        assert has_torch == "False"
        yield process, f"http://127.0.0.1:{port}"
        process.kill()


def test_one_that_serves_answers_and_one_that_is_stopped_does_not(
    lighthouse: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = lighthouse
    assert answers(address, PATIENCE_S)
    process.send_signal(signal.SIGSTOP)
    # One thread after the other stops, and the one that answers may not be the first.
    wait_until(lambda: not answers(address, 0.5))
    assert not answers(address, 0.5)
    process.send_signal(signal.SIGCONT)
    assert answers(address, PATIENCE_S)


def test_nobody_and_somebody_else_do_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert not answers(address, 0.2)
    assert not answers(address, PATIENCE_S)


def test_what_is_loaded_is_what_the_rest_of_torchft_uses() -> None:
    program = """
from elastic_train.lighthouse.native import load_native
native = load_native()
from torchft.coordination import LighthouseServer
print(native.LighthouseServer is LighthouseServer, load_native() is native)
"""
    done = finished(program)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr
