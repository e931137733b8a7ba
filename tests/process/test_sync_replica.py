"""The replicas of the benchmark of outer syncs, as it starts them."""

from tests.programs import finished

# In a program of its own, because the server that forks the replicas lives as long as who started it.
_PROGRAM = """
from scripts.sync_replica import ReplicaFailed, Replicas

with Replicas(2, 3000, 4096) as replicas:
    assert replicas.check("none") < 1e-6
    assert 0.01 < replicas.check("int4") < 0.3
    exact, coarse = replicas.sync("none"), replicas.sync("int4")
    assert coarse[0].bytes < 0.2 * exact[0].bytes
    processes = list(replicas.processes)
    processes[1].kill()
    try:
        replicas.sync("none")
    except ReplicaFailed as error:
        print("lost:", error)
assert not any(process.is_alive() for process in processes)
"""


def test_replicas_compute_the_same_and_end_when_one_is_lost() -> None:
    done = finished(_PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lost:")
