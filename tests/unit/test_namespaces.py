"""Hosts that are network namespaces: what gets through their links."""

import socket
from concurrent.futures import ThreadPoolExecutor

from scripts.namespaces import HostNetwork, enter

PACKETS = 1000
SOON_S = 2.0


def socket_in(name: str, host: str) -> socket.socket:
    """A socket that belongs to the namespace of that name, bound there."""

    def make() -> socket.socket:
        enter(name)
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        made.bind((host, 0))
        made.settimeout(SOON_S)
        return made

    # A thread of its own, which ends and takes its namespace with it.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(make).result()


def arrived(sender: socket.socket, receiver: socket.socket, packets: int) -> int:
    """How many of so many packets arrive; the last ones are waited for until none comes any more."""
    for _ in range(packets):
        sender.sendto(b"x", receiver.getsockname())
    count = 0
    try:
        while count < packets:
            receiver.recv(16)
            count += 1
    except TimeoutError:
        pass
    return count


def test_hosts_reach_each_other_and_the_middle_unless_a_link_is_cut(network: HostNetwork) -> None:
    first, second = (socket_in(host.name, host.host) for host in network.hosts)
    middle = socket_in(network.middle.name, network.middle.host)
    with first, second, middle:
        assert [arrived(first, second, 1), arrived(middle, first, 1), arrived(second, middle, 1)] == [1, 1, 1]
        network.cut(0)
        assert [arrived(first, second, 1), arrived(middle, first, 1), arrived(second, middle, 1)] == [0, 0, 1]
        network.mend(0)
        assert [arrived(first, second, 1), arrived(middle, first, 1), arrived(second, middle, 1)] == [1, 1, 1]


def test_a_part_of_the_packets_is_lost(network: HostNetwork) -> None:
    middle, host = socket_in(network.middle.name, network.middle.host), socket_in(network.hosts[0].name, "10.77.0.2")
    with middle, host:
        assert arrived(middle, host, PACKETS) == PACKETS
        network.lose(0, 0.1)
        for sender, receiver in ((middle, host), (host, middle)):
            # Ten standard deviations to either side.
            assert 805 < arrived(sender, receiver, PACKETS) < 995
