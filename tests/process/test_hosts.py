"""Replicas on hosts of their own, which are network namespaces: a host dies, a link is cut, loses packets or is slow.

The controller is in the namespace in the middle, through which the hosts reach each other.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from elastic_train.replica.watch.process_watch import is_alive
from scripts.launched_run import LaunchedRun
from scripts.marked_process import MarkedProcess
from scripts.namespaces import HostNetwork, command_in
from tests.process.logs import check_the_states, named

END_S = 300
LEAVE_S = 30.0
SOON = ("--recovery.host_timeout_s", "6", "--recovery.isolation_timeout_s", "13", "--scheduler.cool_down_s", "5")

OnHosts = Callable[..., LaunchedRun]


@pytest.fixture
def shells(network: HostNetwork, tmp_path: Path) -> Iterator[list[MarkedProcess]]:
    """What lets the remote shell in, on each host."""
    with contextlib.ExitStack() as stack:
        serving: list[MarkedProcess] = []
        for index, host in enumerate(network.hosts):
            command = [*command_in(host.name), sys.executable, "-m", "scripts.host_shell", "--serve", host.host]
            shell = stack.enter_context(MarkedProcess(command, tmp_path / f"shell_{index}.console"))
            shell.wait_until(lambda shell=shell: "serves" in shell.tail(), 60)  # type: ignore[misc]
            serving.append(shell)
        yield serving


@pytest.fixture
def launch(network: HostNetwork, shells: list[MarkedProcess], tmp_path: Path) -> Iterator[OnHosts]:
    """Starts a run of two replicas; at the end it may have left no process on any host."""
    runs: list[LaunchedRun] = []

    def start(*flags: str) -> LaunchedRun:
        shell = f"{sys.executable} -m scripts.host_shell"
        hosts = ", ".join(f'"{host.host}"' for host in network.hosts)
        scheduler = ("--scheduler.kind", "ssh", "--scheduler.hosts", f"[{hosts}]", "--scheduler.ssh_command", shell)
        replicas = ("--orchestrator.replicas", "2", "--training.steps", "100000", "--recovery.standby", "false")
        words = [*scheduler, *replicas, *flags]
        run = LaunchedRun("llama3_tiny.toml", tmp_path / "run", words, prefix=command_in(network.middle.name))
        runs.append(run)
        return run

    yield start
    leaks = [process for run in runs for process in run.end()]
    assert not leaks, f"runs that had ended left processes: {leaks}"
    own = {shell.process.pid for shell in shells}
    on_hosts = []
    for pid in (pid for index in range(len(network.hosts)) for pid in network.pids(index) if pid not in own):
        with contextlib.suppress(psutil.NoSuchProcess):
            on_hosts.append(psutil.Process(pid))
    left = psutil.wait_procs(on_hosts, timeout=LEAVE_S)[1]
    assert not left, f"processes were left on the hosts: {left}"


def wait_for_both(run: LaunchedRun, after: int = 0) -> None:
    """Until both replicas have committed a sync together."""
    for slot in (0, 1):
        run.wait_for_event(
            "sync_committed",
            END_S,
            lambda e, slot=slot: e["replica"] == slot and e["participants"] == [0, 1] and e["seq"] > after,  # type: ignore[misc]
        )


def check_one_loss(run: LaunchedRun, replica: int) -> list[list[str]]:
    """One replica failed with its host, and came back when the old one could not count any more; its hosts in turn."""
    joined = run.wait_for_event("joined", END_S)
    assert (joined["replica"], joined["incarnation"]) == (replica, 1)
    wait_for_both(run, joined["seq"])
    (failure,) = named(run, "failure_detected")
    assert (failure["replica"], failure["cause"]) == (replica, "host_lost")
    (lost,) = named(run, "allocation_lost")
    assert lost["replica"] == replica
    granted = [event["hosts"] for event in named(run, "allocation_granted") if event["replica"] == replica]
    assert len(granted) == 2
    assert granted[0] == lost["hosts"]
    assert not named(run, "fenced", "replica_retired")
    check_the_states(run)
    return granted


def leave(run: LaunchedRun) -> None:
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(END_S) == 130, run.tail()
    check_the_states(run)


def host_of(run: LaunchedRun, network: HostNetwork, replica: int) -> int:
    granted = run.wait_for_event("allocation_granted", END_S, lambda e: e["replica"] == replica)
    return [host.host for host in network.hosts].index(granted["hosts"][0])


@pytest.mark.timeout(2 * END_S)
def test_a_host_that_dies_is_replaced_by_another_and_nothing_outlives_the_controller(launch: OnHosts) -> None:
    # The other host has room for both.
    run = launch(*SOON, "--scheduler.replicas_per_host", "2")
    wait_for_both(run)
    reply = run.command("inject", "--replica", "1", "--rank", "0", "--kind", "host")
    assert reply.returncode == 0, reply.stdout + reply.stderr
    first, second = check_one_loss(run, 1)
    assert first != second
    assert [event["kind"] for event in named(run, "fault_injected")] == ["host"]

    # The end of the test sees to it that nothing is left on any host.
    run.process.kill()


@pytest.mark.timeout(2 * END_S)
def test_a_replica_that_is_cut_off_ends_itself_and_comes_back_with_its_link(
    network: HostNetwork, launch: OnHosts
) -> None:
    run = launch(*SOON)
    wait_for_both(run)
    index = host_of(run, network, 1)
    (before,) = [event for event in named(run, "procs_started") if event["replica"] == 1]
    network.cut(index)
    run.wait_for_event("failure_detected", END_S, lambda event: event["cause"] == "host_lost")
    # It cannot be told to end, and ends all the same.
    ranks = list(zip(before["pids"], before["created"], strict=True))
    run.wait_until(lambda: not any(map(is_alive, ranks)), END_S)
    lost = run.wait_for_event("allocation_lost", END_S)
    # The other one goes on alone.
    run.wait_for_event(
        "sync_committed", END_S, lambda e: e["replica"] == 0 and e["participants"] == [0] and e["seq"] > lost["seq"]
    )
    network.mend(index)
    first, second = check_one_loss(run, 1)
    assert first == second
    leave(run)


@pytest.mark.timeout(2 * END_S)
def test_packets_that_are_lost_and_a_slow_link_only_cost_time(network: HostNetwork, launch: OnHosts) -> None:
    network.lose(0, 0.1)
    network.slow_down(1, 20)
    run = launch("--diloco.sync_every", "10")
    run.wait_until(lambda: sum(event["replica"] == 0 for event in named(run, "sync_committed")) >= 3, END_S)
    leave(run)
    assert named(run, "failure_detected", "allocation_lost", "fenced") == []
    for replica in (0, 1):
        steps = [e["outer_step"] for e in named(run, "sync_committed") if e["replica"] == replica]
        (left,) = [e for e in named(run, "replica_left") if e["replica"] == replica]
        assert steps == list(range(1, left["outer_step"] + 1))
