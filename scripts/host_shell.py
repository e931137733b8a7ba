"""A remote shell for hosts that are network namespaces of this machine; what it carries goes over the network.

    python -m scripts.host_shell HOST COMMAND     runs a command on a host, as ssh does
    python -m scripts.host_shell --serve HOST     serves such commands, in the namespace of the host

It asks for no password, so it is for namespaces alone. What a command prints as errors, the server prints.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

PORT = 2222

_CONNECT_S = 5.0
_PIECE = 1 << 16


def serve(host: str) -> None:
    """Run the commands of all who connect, each until it ends."""
    with socket.create_server((host, PORT)) as server:
        print(f"serves {host}", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def call(host: str, command: str) -> int:
    """Pass input and output on until the command has ended."""
    try:
        connection = socket.create_connection((host.rpartition("@")[2], PORT), timeout=_CONNECT_S)
    except OSError as error:
        print(f"no connection to {host}: {error}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    with connection:
        connection.sendall(command.encode() + b"\0")
        threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
        try:
            while piece := connection.recv(_PIECE):
                os.write(1, piece)
        except OSError as error:
            print(f"the connection to {host} broke: {error}", file=sys.stderr)
            return 255
    return 0


def _send_input(connection: socket.socket) -> None:
    while piece := os.read(0, _PIECE):
        connection.sendall(piece)
    connection.shutdown(socket.SHUT_WR)


def _run(connection: socket.socket) -> None:
    with connection:
        command = b""
        # Byte by byte: what follows is the command's own input.
        while (byte := connection.recv(1)) not in (b"", b"\0"):
            command += byte
        subprocess.run(
            ["sh", "-c", command.decode()], stdin=connection.fileno(), stdout=connection.fileno(), check=False
        )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve", host]:
            serve(host)
        case [host, *command]:
            sys.exit(call(host, " ".join(command)))
        case _:
            sys.exit(__doc__)
