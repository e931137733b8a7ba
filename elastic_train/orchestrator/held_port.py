"""A port that stays its server's while the server is away.

Replicas find the Lighthouse and the registry at an address that they were told once. Between two servers nobody else
may get it: no program that asks for any free port, and none of the many connections that are tried meanwhile.
"""

from __future__ import annotations

import socket


class HeldPort:
    """Bound here, without listening: whoever is to listen there can, if it reuses the address as servers do, and nobody
    else gets the port by chance. That is how Linux does it."""

    def __init__(self, host: str, port: int) -> None:
        """
        Args:
            port: 0: any that is free.

        Raises:
            OSError: the host is not one of this machine's, or somebody listens there.
        """
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.socket(family)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        self._socket.close()
