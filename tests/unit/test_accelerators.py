from pathlib import Path

import pytest

from elastic_train.config import EnvironmentProblem
from elastic_train.orchestrator.accelerators import find

CUDA = "2.13.0"


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (folder / name).touch()
    return folder


def test_without_accelerators_no_variable_is_set(tmp_path: Path) -> None:
    found = find({}, devices=tmp_path, nodes=tmp_path, torch_version=CUDA)
    found.check(8, 8)
    assert found.share(0, 2) == {}


def test_each_replica_gets_its_own(devices: Path) -> None:
    found = find({}, devices=devices, nodes=devices, torch_version=CUDA)
    found.check(2, 2)
    assert [found.share(slot, 2) for slot in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]


@pytest.mark.parametrize(
    ("visible", "shares"), [("7,6,5,4", ["7,6", "5,4"]), ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"])]
)
def test_what_the_user_made_visible_is_shared(devices: Path, visible: str, shares: list[str]) -> None:
    found = find({"CUDA_VISIBLE_DEVICES": visible}, devices=devices, nodes=devices, torch_version=CUDA)
    assert [found.share(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == shares


def test_accelerators_that_the_user_hid_stay_hidden(devices: Path) -> None:
    found = find({"CUDA_VISIBLE_DEVICES": ""}, devices=devices, nodes=devices, torch_version=CUDA)
    found.check(2, 2)
    assert found.share(0, 2) == {}


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}])
def test_too_few_are_an_error_that_says_what_to_do(devices: Path, environ: dict[str, str]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"need 6 accelerators, and there are 4 .*orchestrator\.replicas"):
        find(environ, devices=devices, nodes=devices, torch_version=CUDA).check(3, 2)


def test_an_amd_machine_counts_its_gpus_and_not_its_cpus(devices: Path, tmp_path: Path) -> None:
    (devices / "kfd").touch()
    for node, simds in enumerate((0, 304, 304)):
        folder = tmp_path / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count {0 if simds else 96}\nsimd_count {simds}\n")
    found = find({}, devices=devices, nodes=tmp_path / "nodes", torch_version="2.13.0+rocm7.0")
    assert [found.share(slot, 1) for slot in range(2)] == [{"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}]


def test_a_cpu_build_of_torch_needs_none(devices: Path) -> None:
    found = find({"CUDA_VISIBLE_DEVICES": "0"}, devices=devices, nodes=devices, torch_version="2.13.0+cpu")
    found.check(3, 2)
    assert found.share(0, 2) == {}
