"""Ctrl-C and SIGTERM: the first lets the run end in order, the second hurries it, the third ends the controller."""

from __future__ import annotations

import asyncio
import signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """What the user, or whoever owns this machine, has asked for."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    def listen(self) -> None:
        """Take the signals of this process from now on; called in its main thread, with the loop running."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.interrupt)

    def interrupt(self) -> None:
        """One more signal."""
        if not self._asked.is_set():
            self._asked.set()
            return
        self._hurried.set()
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    @property
    def is_hurried(self) -> bool:
        return self._hurried.is_set()

    async def asked(self) -> None:
        """Wait until the run is to end."""
        await self._asked.wait()

    async def hurried(self) -> None:
        """Wait until it is to end at once."""
        await self._hurried.wait()
