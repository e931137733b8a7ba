"""The main program of a rank's process: Monarch's, after what only a main thread may do, which is to take a signal.

Schedulers and spot machines tell a process by SIGTERM that its host is about to be taken away. A rank that trains takes
it as a notice; any other process of a rank ends, as it would without this.
"""

from __future__ import annotations

import os
import runpy
import signal
from types import FrameType

from elastic_train.replica import notice


def main() -> None:
    """Take SIGTERM, then do what Monarch does."""
    parent = os.getppid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        # Who has lost the controller is told by this signal, too, that it is not wanted any more.
        if os.getppid() == parent and notice.here().warn():
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_sigterm)
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
