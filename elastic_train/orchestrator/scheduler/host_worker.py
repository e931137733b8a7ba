"""The program that a remote shell starts on a host: gives the controller processes there, as long as it is wanted.

It stays between the shell and Monarch's worker, so that everything on the host ends when the shell's input does,
whether the controller is done with the host or has died, and whatever Monarch is busy with. The input also brings a
line a second; without them the host is cut off, and ends too. On its output it says where the worker listens, and in
the end that nothing is left.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

import psutil

from elastic_train.config import EnvironmentProblem
from elastic_train.orchestrator.accelerators import find
from elastic_train.orchestrator.addresses import bracketed, family_of
from elastic_train.orchestrator.monarch_env import configure, trainer_environment

logger = logging.getLogger(__name__)

LISTENING = "listening"
"""Begins the line that tells the worker's port."""
ENDED = "ended"
"""The line that says that nothing is left on the host."""
STRIKE = "strike"
"""The line of input that ends everything at once, without a word, as a host ends that loses its power."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the input ends, or the worker does; 0 in the first case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="at which the controller and other hosts reach this one")
    parser.add_argument("--folder", help="to work in, if it is there")
    parser.add_argument("--position", type=int, default=0, help="among the replicas on this host, from 0")
    parser.add_argument("--replicas", type=int, default=1, help="that share this host")
    parser.add_argument("--procs", type=int, default=1, help="of each replica")
    parser.add_argument("--isolation", type=float, default=60.0, help="seconds without input after which it ends")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    if given.folder and os.path.isdir(given.folder):
        os.chdir(given.folder)
    configure()
    accelerators = find(os.environ)
    try:
        accelerators.check(given.replicas, given.procs)
    except EnvironmentProblem as problem:
        logger.error("%s", problem)
        return 1
    for name, value in host_environment(given.address, given.replicas, given.procs).items():
        os.environ.setdefault(name, value)
    os.environ.update(accelerators.share(given.position, given.procs))
    # Who takes the host away says so to every process by SIGTERM. The ranks hear it; until they leave, the others stay.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # What loses its parent becomes a child of this process, so that nothing on the host can get lost.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    port = _free_port(given.address)
    worker = os.fork()
    if worker == 0:
        _work(f"tcp://{bracketed(given.address)}:{port}")
    _say(f"{LISTENING} {port}")
    wanted = _wait(worker, given.isolation)
    _end_all_below()
    _say(ENDED)
    return 0 if wanted else 1


def host_environment(address: str, replicas: int, procs: int) -> dict[str, str]:
    """What the processes of a replica on this host need to know of it, unless somebody has told them already."""
    interface = interface_of(address)
    if not interface:
        logger.warning("no interface of this host has the address %s; gloo chooses one by itself", address)
    cores = len(os.sched_getaffinity(0))
    return {
        **trainer_environment(replicas=replicas, procs=procs, cores=cores, interface=interface),
        **({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}),
    }


def interface_of(address: str) -> str:
    """Name of the interface of this host that has an address; "" if none has."""
    return next(
        (name for name, found in psutil.net_if_addrs().items() if any(each.address == address for each in found)), ""
    )


def _work(address: str) -> None:
    """Monarch's worker, in a process that does not outlive its parent."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # The output is for what the controller waits for, and so is the input.
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        from monarch.actor import run_worker_loop_forever

        run_worker_loop_forever(address=address, ca="trust_all_connections")
    finally:
        os._exit(1)


def _wait(worker: int, isolation_s: float) -> bool:
    """Returns when the input has ended, or brings nothing any more, or (False) the worker has ended."""
    ended = os.pidfd_open(worker)
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    waiting.register(ended, select.POLLIN)
    while True:
        found = waiting.poll(isolation_s * 1000)
        if not found:
            logger.error("nothing was heard of the controller for %g s: everything here ends", isolation_s)
            return True
        for descriptor, _ in found:
            if descriptor == ended:
                return False
            try:
                said = os.read(0, 1 << 10)
            except OSError as error:
                logger.error("the input broke off: %s", error)
                return True
            if not said:
                return True
            if STRIKE.encode() in said:
                _kill_all_below()
                os.kill(os.getpid(), signal.SIGKILL)


def _end_all_below() -> None:
    """Kill whatever this process has started, and see it gone."""
    while True:
        _kill_all_below()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill_all_below() -> None:
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _say(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())
    except OSError:
        # Nobody is left who would hear it.
        return


def _free_port(address: str) -> int:
    # A new one for each worker: one client that comes again to a port that it has used before waits in vain.
    with socket.create_server((address, 0), family=family_of(address)) as server:
        return int(server.getsockname()[1])


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit(main())
