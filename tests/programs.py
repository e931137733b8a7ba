"""Python programs that a test runs in processes of their own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The program in a process of its own, with pipes; killed and reaped at the end, if it still runs."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(
    program: str, *arguments: object, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The program, run to its end with further environment variables; its output is captured."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    variables = {**os.environ, **(environ or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
