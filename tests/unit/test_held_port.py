import socket

import pytest

from elastic_train.orchestrator.held_port import HeldPort

HOST = "127.0.0.1"


def test_its_server_can_come_and_go() -> None:
    held = HeldPort(HOST, 0)
    try:
        for _ in range(2):
            address = (HOST, held.number)
            with socket.create_server(address) as server, socket.create_connection(address) as client:
                accepted, _ = server.accept()
                accepted.close()
                client.recv(1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, held.number))
    finally:
        held.close()


def test_nobody_else_gets_it() -> None:
    held = HeldPort(HOST, 0)
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, held.number))
    finally:
        held.close()
    held.close()
    with socket.create_server((HOST, held.number)):
        pass


def test_a_port_at_which_somebody_listens_is_refused() -> None:
    with socket.create_server((HOST, 0)) as server, pytest.raises(OSError, match="in use"):
        HeldPort(HOST, server.getsockname()[1])
    with pytest.raises(OSError, match="assign requested address"):
        HeldPort("192.0.2.1", 0)
