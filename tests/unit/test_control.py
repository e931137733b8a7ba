import asyncio
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config import EnvironmentProblem
from elastic_train.orchestrator.control import ControlServer, ask
from elastic_train.orchestrator.runfolder import RunFolder


class Controller:
    """A control server on a loop of its own, as a run has it."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.server = ControlServer(self._answer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self.server.start())

    def close(self) -> None:
        self._run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, request: Any) -> dict[str, Any]:
        self.requests.append(request)
        if request["inject"] == "bad":
            raise RuntimeError("the slot is on fire")
        return {"ok": True, "text": f"{request['inject']} it is"}

    def _run(self, step: Any) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(30)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller()
    RunFolder(tmp_path).announce_controller(made.server.socket)
    try:
        yield made
    finally:
        made.close()


def send(path: Path, data: bytes) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        connection.sendall(data)
        with connection.makefile() as answers:
            return json.loads(answers.read())


def test_a_question_is_answered(controller: Controller, tmp_path: Path) -> None:
    assert ask(tmp_path, {"inject": "kill"}) == {"ok": True, "text": "kill it is"}
    assert ask(tmp_path, {"inject": "hang"}) == {"ok": True, "text": "hang it is"}
    assert controller.requests == [{"inject": "kill"}, {"inject": "hang"}]


@pytest.mark.parametrize(
    "data", [b"\n", b"garbage\n", b"[1]\n", b"{}\n", b"\xff\xfe\n", b"7\n", b"{" * 100_000 + b"\n", b'"' + b"x" * 200_000]
)
def test_garbage_is_answered_too(controller: Controller, tmp_path: Path, data: bytes) -> None:
    reply = send(controller.server.socket, data)

    assert reply["ok"] is False
    assert reply["text"].startswith("the request cannot be understood")
    assert ask(tmp_path, {"inject": "kill"})["ok"]


def test_an_error_in_the_answer_reaches_who_asked(controller: Controller, tmp_path: Path) -> None:
    reply = ask(tmp_path, {"inject": "bad"})

    assert (reply["ok"], "the slot is on fire" in reply["text"]) == (False, True)
    assert ask(tmp_path, {"inject": "kill"})["ok"]


def test_only_the_owner_reaches_the_socket(controller: Controller) -> None:
    folder = controller.server.socket.parent

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()


def test_nothing_is_left_after_the_end(controller: Controller) -> None:
    folder = controller.server.socket.parent
    assert folder.exists()

    controller.close()

    assert not folder.exists()
    controller.__init__()  # type: ignore[misc]  # something for the fixture to close


@pytest.mark.parametrize("run_name", ["run", "r" * 200])
def test_a_run_folder_with_a_long_name_has_a_socket(run_name: str, tmp_path: Path) -> None:
    made = Controller()
    try:
        (tmp_path / run_name).mkdir()
        RunFolder(tmp_path / run_name).announce_controller(made.server.socket)
        assert ask(tmp_path / run_name, {"inject": "kill"})["ok"]
    finally:
        made.close()


def dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize(
    "left_behind",
    [
        None,
        "",
        "{}",
        "[]",
        json.dumps({"pid": "dead", "socket": "/nowhere"}),
        json.dumps({"pid": os.getpid(), "socket": "/nowhere/control.sock"}),
    ],
)
def test_no_living_run(tmp_path: Path, left_behind: str | None) -> None:
    if left_behind is not None:
        text = left_behind.replace('"dead"', str(dead_pid()))
        (tmp_path / "controller.json").write_text(text)

    with pytest.raises(EnvironmentProblem, match=f"no living run in {tmp_path}"):
        ask(tmp_path, {"inject": "kill"})
