"""One worker by a remote shell: here a shell of this machine, which takes the host's name and the command."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from elastic_train.orchestrator.scheduler.remote_worker import HostFailed, RemoteWorker

SHELL = """sh -c 'eval "exec $1"'"""
"""The host's name is its $0, the command its $1."""
TIMEOUT_S = 60.0


def worker_of(script: str, log: Path, shell: str = SHELL) -> RemoteWorker:
    return RemoteWorker("a", shell, ["sh", "-c", script], log)


def test_it_tells_where_it_listens_and_ends_with_its_input(tmp_path: Path) -> None:
    async def scene() -> tuple[int, bool]:
        worker = worker_of("echo listening 4711; cat > /dev/null; echo ended", tmp_path / "a.log")
        return await worker.start(TIMEOUT_S), await worker.end()

    assert asyncio.run(scene()) == (4711, True)


def test_it_is_told_all_the_time_that_it_is_wanted(tmp_path: Path) -> None:
    async def scene() -> str:
        worker = worker_of("echo listening 1; read first; read second; exit 7", tmp_path / "a.log")
        await worker.start(TIMEOUT_S)
        how = await asyncio.wait_for(worker.lost(), TIMEOUT_S)
        assert not await worker.end()
        return how

    assert asyncio.run(scene()) == "its remote shell ended with code 7"


def test_a_host_that_was_struck_says_nothing(tmp_path: Path) -> None:
    script = 'echo listening 1; while read line; do [ "$line" = strike ] && kill -9 $$; done'

    async def scene() -> tuple[str, bool]:
        worker = worker_of(script, tmp_path / "a.log")
        await worker.start(TIMEOUT_S)
        worker.strike()
        return await asyncio.wait_for(worker.lost(), TIMEOUT_S), await worker.end()

    assert asyncio.run(scene()) == ("its remote shell ended by signal 9", False)


@pytest.mark.parametrize(
    ("script", "shell", "text"),
    [
        ("echo no such user >&2; exit 255", SHELL, "its remote shell ended with code 255: no such user"),
        ("true", "/no/such/shell", "the remote shell /no/such/shell cannot be started (No such file or directory)"),
    ],
)
def test_one_that_does_not_start_says_why(tmp_path: Path, script: str, shell: str, text: str) -> None:
    async def scene() -> str:
        worker = worker_of(script, tmp_path / "a.log", shell)
        with pytest.raises(HostFailed) as failed:
            await worker.start(TIMEOUT_S)
        await worker.end()
        return str(failed.value)

    assert asyncio.run(scene()) == text


def test_one_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async def scene() -> str:
        worker = worker_of("cat > /dev/null", tmp_path / "a.log")
        with pytest.raises(HostFailed) as failed:
            await worker.start(0.2)
        await worker.end()
        return str(failed.value)

    assert "scheduler.start_timeout_s = 0.2" in asyncio.run(scene())


@pytest.mark.parametrize("way", ["input", "silence"])
def test_the_program_on_the_host_ends_all_that_it_has_started(tmp_path: Path, way: str) -> None:
    isolation_s = "600" if way == "input" else "1"
    module = "elastic_train.orchestrator.scheduler.host_worker"
    command = [sys.executable, "-m", module, "127.0.0.1", "--isolation", isolation_s]

    async def scene() -> tuple[bool, list[psutil.Process]]:
        worker = RemoteWorker("a", SHELL, command, tmp_path / "a.log")
        await worker.start(TIMEOUT_S)
        assert worker._shell is not None
        below = psutil.Process(worker._shell.pid).children(recursive=True)
        assert below
        if way == "silence":
            worker._tasks[1].cancel()
            await asyncio.wait_for(worker.lost(), TIMEOUT_S)
        return await worker.end(), below

    has_ended, below = asyncio.run(scene())
    assert has_ended
    assert psutil.wait_procs(below, timeout=TIMEOUT_S)[1] == []
