"""How a person reaches a living run: JSON requests over a Unix socket that only the run's owner can open."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from elastic_train.config import EnvironmentProblem

logger = logging.getLogger(__name__)

Request = dict[str, Any]
Reply = dict[str, Any]
_ANSWER_S = 30.0


class ControlServer:
    """Answers one JSON line per connection."""

    def __init__(self, answer: Callable[[Request], Awaitable[Reply]]) -> None:
        self._answer = answer
        # A Unix socket's path may have about 100 characters, a run folder's more; mkdtemp makes it private.
        self._folder = Path(tempfile.mkdtemp(prefix="elastic_train-"))
        self.socket = self._folder / "control.sock"
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = await self._reply(reader)
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def _reply(self, reader: asyncio.StreamReader) -> Reply:
        try:
            return await self._answer(json.loads(await asyncio.wait_for(reader.readline(), _ANSWER_S)))
        except (ValueError, KeyError, TypeError, TimeoutError) as error:
            return {"ok": False, "text": f"the request cannot be understood: {error}"}
        except Exception as error:
            logger.exception("a request failed")
            return {"ok": False, "text": f"the request failed: {error}"}


def ask(run_dir: Path, request: Request) -> Reply:
    """Send a request to the controller of the run in ``run_dir``.

    Returns:
        ``ok`` and a ``text`` for people.

    Raises:
        EnvironmentProblem: no run lives there.
    """
    try:
        address = json.loads((run_dir / "controller.json").read_text())
        os.kill(address["pid"], 0)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(address["socket"])
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile() as answers:
                reply: Reply = json.loads(answers.readline())
                return reply
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentProblem(
            f"no living run in {run_dir}: start one with `elastic-train run`, or name its folder"
        ) from error
