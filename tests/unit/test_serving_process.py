"""Processes that serve a run leave SIGTERM alone, unless their parent means them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

END_S = 60
# In the place of Monarch: answers each line.
PROGRAM = """
import runpy, sys
from elastic_train.orchestrator import serving_process

def serve(*arguments, **others):
    for line in sys.stdin:
        print(line, end="", flush=True)

runpy.run_module = serve
serving_process.main()
"""

Server = subprocess.Popen[str]


@pytest.fixture
def server() -> Iterator[Server]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert answers(process)
        yield process
        process.kill()


def answers(server: Server) -> bool:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("there?\n")
    server.stdin.flush()
    return server.stdout.readline() == "there?\n"


def test_what_everybody_on_a_host_is_told_ends_none_of_them(server: Server) -> None:
    subprocess.run(["kill", "-TERM", str(server.pid)], check=True, timeout=END_S)
    assert answers(server)
    assert answers(server)


def test_the_parent_may_end_them(server: Server) -> None:
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(END_S) == -signal.SIGTERM
