"""Which accelerators this machine has, and which of them each replica gets, without asking torch.

torch takes what its visible-devices variable names and, when nothing usable is left, quietly trains on the CPU. So the
shares are made and checked here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from elastic_train.config import EnvironmentProblem

_NVIDIA_DEVICES = "nvidia[0-9]*"
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class Accelerators:
    """The accelerators that a run on this machine may use."""

    variable: str
    """The environment variable that says which of them a process sees."""
    ids: tuple[str, ...]

    def share(self, slot: int, procs: int) -> dict[str, str]:
        """The environment that gives a replica its own; empty on a machine without any."""
        if not self.ids:
            return {}
        return {self.variable: ",".join(self.ids[slot * procs : (slot + 1) * procs])}

    def check(self, replicas: int, procs: int) -> None:
        """
        Raises:
            EnvironmentProblem: there are some, but not enough for one per process.
        """
        if self.ids and len(self.ids) < replicas * procs:
            raise EnvironmentProblem(
                f"{replicas} replicas of {procs} processes need {replicas * procs} accelerators, and there are "
                f"{len(self.ids)} ({self.variable}): lower orchestrator.replicas or "
                f"orchestrator.procs_per_replica, or hide them with {self.variable}= to train on the CPU"
            )


def find(
    environ: Mapping[str, str],
    *,
    torch_version: str | None = None,
    devices: Path = Path("/dev"),
    nodes: Path = _AMD_NODES,
) -> Accelerators:
    """Those that the environment leaves visible, else all that the kernel shows; none for a CPU build of torch.

    Args:
        torch_version: None looks up what is installed.
    """
    amd = (devices / "kfd").exists()
    variable = "HIP_VISIBLE_DEVICES" if amd else "CUDA_VISIBLE_DEVICES"
    if (torch_version or version("torch")).endswith("+cpu"):
        return Accelerators(variable, ())
    if variable in environ:
        return Accelerators(
            variable, tuple(name for name in environ[variable].split(",") if name.strip() not in ("", "-1"))
        )
    count = sum(1 for node in nodes.glob("*") if _is_gpu(node)) if amd else len(list(devices.glob(_NVIDIA_DEVICES)))
    return Accelerators(variable, tuple(map(str, range(count))))


def _is_gpu(node: Path) -> bool:
    """A node of the AMD driver's topology that is not a CPU has SIMD units."""
    try:
        properties = (node / "properties").read_text().split()
    except OSError:
        return False
    found = dict(zip(properties[::2], properties[1::2], strict=False))
    return int(found.get("simd_count", "0")) > 0
