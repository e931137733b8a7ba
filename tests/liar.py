"""A server that answers whatever it likes."""

import socket

from scripts.meddler import Middle, shut


class Liar(Middle):
    """Gives this answer, whatever is asked."""

    def __init__(self, answer: bytes, *, then_silent: bool = False) -> None:
        self._answer = answer
        self._then_silent = then_silent
        super().__init__()

    def take(self, near: socket.socket, index: int) -> None:
        try:
            near.recv(65536)
            near.sendall(self._answer)
            while self._then_silent and near.recv(65536):
                continue
        except OSError:
            pass
        shut(near)
