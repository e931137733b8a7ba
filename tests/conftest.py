"""What every test gets: folders and an environment of its own, and proof that it left no process behind."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from elastic_train.name_service import be_impatient
from scripts.namespaces import HostNetwork, NoNamespaces, host_network

TESTS = Path(__file__).parent

be_impatient()

# Every process of this session carries it, also one whose parent died and that is nobody's child any more.
MARK = "ELASTIC_TRAIN_TEST_SESSION"
SESSION = uuid.uuid4().hex

# How long a process that was told to end may take to leave the process table.
LEAVE_S = 5.0

# A deadline would measure the machine; in CI the examples are the same in every run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS / "process" in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(scope="session", autouse=True)
def session_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps all tests away from the user's caches, settings and network; gives the shared cache folder.

    For the session, so that runs which several tests look at are covered too. The embedded corpus is shared
    by all tests: it is built once, in seconds, and only read from then on.
    """
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TORCHFT_")]:
            patch.delenv(name)
        patch.setenv(MARK, SESSION)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("WANDB_MODE", "disabled")
        patch.setenv("ELASTIC_TRAIN_CACHE", str(cache / "elastic_train"))
        _put_caches_under(cache, patch)
        yield cache


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest, session_surroundings: Path) -> Iterator[None]:
    """Fails a process test that leaves a process running. The first to be set up, so it looks last."""
    yield
    if request.node.get_closest_marker("process") is None:
        return
    left = _started_here()
    if left:
        _, left = psutil.wait_procs(left, timeout=LEAVE_S)
    if left:
        described = [_describe(process) for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=LEAVE_S)
        pytest.fail("processes left behind (ended now):\n" + "\n".join(described), pytrace=False)


@pytest.fixture(autouse=True)
def cache_dir(no_leftovers: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache folder as this test sees it: its own, and empty."""
    cache = tmp_path_factory.mktemp("cache")
    _put_caches_under(cache, monkeypatch)
    return cache


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where this test's run may write; not made yet."""
    return tmp_path / "run"


def _put_caches_under(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("XDG_CACHE_HOME", str(folder))
    patch.setenv("HF_HOME", str(folder / "huggingface"))


def _started_here() -> list[psutil.Process]:
    """Living processes that carry this session's mark, and all descendants of the test process."""
    found = {process.pid: process for process in psutil.process_iter() if _is_marked(process)}
    found |= {process.pid: process for process in psutil.Process().children(recursive=True)}
    found.pop(os.getpid(), None)
    return [process for process in found.values() if not _is_over(process) and not _is_python_helper(process)]


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == SESSION
    except (psutil.Error, OSError):
        return False


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_python_helper(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker and fork server live as long as the test process that uses them."""
    try:
        command = " ".join(process.cmdline())
        return process.ppid() == os.getpid() and ("resource_tracker" in command or "forkserver" in command)
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())
        return f"  pid {process.pid}, parent {process.ppid()}, {process.status()}: {command}"
    except psutil.Error:
        return f"  pid {process.pid}: ended in this moment"


@pytest.fixture
def network() -> Iterator[HostNetwork]:
    """Two hosts that are network namespaces, and one between them."""
    try:
        with host_network(2) as made:
            yield made
    except NoNamespaces as reason:
        pytest.skip(f"hosts are network namespaces here: {reason}")
