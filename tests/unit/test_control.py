import asyncio
import json
import os
import socket
import stat
import subprocess
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


GARBAGE = {
    "nothing": b"\n",
    "no JSON": b"inject kill\n",
    "no object": b"[1]\n",
    "no fields": b"{}\n",
    "no text": b"\xff\xfe\n",
    "no end": b"{" * 200_000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
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


def test_nothing_is_left_after_the_end() -> None:
    controller = Controller()
    folder = controller.server.socket.parent
    there = folder.exists()

    controller.close()

    assert (there, folder.exists()) == (True, False)


def test_a_run_folder_may_have_a_longer_path_than_a_socket(controller: Controller, tmp_path: Path) -> None:
    run_dir = tmp_path / ("r" * 200)
    run_dir.mkdir()
    RunFolder(run_dir).announce_controller(controller.server.socket)

    assert ask(run_dir, {"inject": "kill"})["ok"]


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


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
    ids=["nothing", "empty", "object", "list", "no_pid", "no_socket"],
)
def test_no_living_run(tmp_path: Path, left_behind: str | None) -> None:
    if left_behind is not None:
        text = left_behind.replace('"dead"', str(dead_pid()))
        (tmp_path / "controller.json").write_text(text)

    with pytest.raises(EnvironmentProblem, match=f"no living run in {tmp_path}"):
        ask(tmp_path, {"inject": "kill"})
