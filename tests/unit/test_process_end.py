import signal

import pytest

from elastic_train.replica.watch.process_end import ProcessEnd, crashed_ranks, of_process, of_status

# As Monarch 0.7 reports the end of a process.
REPORT = (
    "MeshFailure(mesh_name=trainer-cxsWxA5SnN9, crashed_ranks=[1, 3], event=Supervision event: actor "
    "replica_2_0-0<pwbG>@replica_2_0-0<pwbG>.ipc://@ZQ9XYi,proc_agent failed:\n  {})"
)


def exited(code: int) -> ProcessEnd:
    return ProcessEnd(cause="proc_exit", error=f"exited with code {code} before it had trained to the end")


def killed(name: str) -> ProcessEnd:
    return ProcessEnd(cause="signal", signal=name, error=f"killed by {name}")


@pytest.mark.parametrize(
    ("status", "end"),
    [
        (signal.SIGKILL, killed("SIGKILL")),
        (signal.SIGSEGV | 0x80, killed("SIGSEGV")),  # with a core dump
        (40, killed("signal 40")),  # a real-time signal has no name
        (0, exited(0)),
        (3 << 8, exited(3)),
        (255 << 8, exited(255)),
    ],
)
def test_wait_statuses(status: int, end: ProcessEnd) -> None:
    assert of_status(status) == end


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("process status: Killed(sig=9)", killed("SIGKILL")),
        ("process status: Killed(sig=11)", killed("SIGSEGV")),
        ("the process this actor was running on exited with non-zero code 3", exited(3)),
        ("the process this actor was running on exited with non-zero code -1", exited(-1)),
        ("process exited cleanly", exited(0)),
        ('timeout waiting for message from proc mesh agent while querying for "trainer". It likely crashed', None),
        ("RuntimeError: Loss is not finite", None),
    ],
)
def test_reports_of_supervision(text: str, end: ProcessEnd | None) -> None:
    assert of_process(REPORT.format(text)) == end


@pytest.mark.parametrize(
    ("report", "ranks"),
    [(REPORT, [1, 3]), ("crashed_ranks=[0]", [0]), ("crashed_ranks=[]", []), ("process exited cleanly", [])],
)
def test_ranks_that_a_report_speaks_of(report: str, ranks: list[int]) -> None:
    assert crashed_ranks(report) == ranks
