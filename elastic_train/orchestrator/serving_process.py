"""The main program of the processes that serve a run beside its ranks: Monarch's, which SIGTERM does not end.

Who takes a host away says so to every process on it by SIGTERM. The ranks hear it and leave at their next sync, and
what they need until then must outlive the word: the ReplicaActor that supervises them, and the Lighthouse.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
from typing import Any


def serving_command(python: str = "") -> Any:
    """How Monarch is to start such a process.

    Args:
        python: interpreter on the host; empty: the one that runs here.
    """
    from monarch.actor import default_bootstrap_cmd

    command = default_bootstrap_cmd()
    command.args = ["-m", "elastic_train.orchestrator.serving_process"]
    if python:
        command.program = python
    return command


def main() -> None:
    """Leave SIGTERM alone, unless it comes from the parent, then do what Monarch does."""
    # In the main thread and so, by inheritance, in all that are started from now on.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_take, args=(os.getppid(),), name="SIGTERM", daemon=True).start()
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)


def _take(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        # Whose parent is gone may be told so by the same signal.
        if sender == parent or os.getppid() != parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os.kill(os.getpid(), signal.SIGTERM)
            return


if __name__ == "__main__":
    main()
