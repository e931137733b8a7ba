import pytest
import torch
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from elastic_train.config import ConfigError
from elastic_train.device import Device, detect
from elastic_train.replica.membership import make_group, slot_of, wire_device


@pytest.mark.parametrize(("replica_id", "slot"), [("replica_0:6f1c", 0), ("replica_12:a:b", 12), ("replica_3", 3)])
def test_the_slot_in_a_replica_id(replica_id: str, slot: int) -> None:
    assert slot_of(replica_id) == slot


@pytest.mark.parametrize(("backend", "kind"), [("auto", "cpu"), ("gloo", "cpu"), ("gloo", "cuda"), ("gloo", "rocm")])
def test_gloo_works_on_every_device(backend: str, kind: str) -> None:
    assert type(make_group(backend, Device(kind), 5.0)) is ProcessGroupGloo  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_an_accelerator_has_its_own_library(backend: str) -> None:
    assert type(make_group(backend, detect(), 5.0)) is ProcessGroupNCCL


def test_nccl_needs_an_accelerator() -> None:
    with pytest.raises(ConfigError, match=r'diloco\.backend = "nccl" needs an accelerator; use "gloo" or "auto"'):
        make_group("nccl", Device("cpu"), 5.0)


@pytest.mark.parametrize(
    ("backend", "kind", "device"),
    [
        ("auto", "cpu", "cpu"),
        ("gloo", "cpu", "cpu"),
        ("gloo", "cuda", "cpu"),
        ("auto", "cuda", "cuda:1"),
        ("nccl", "cuda", "cuda:1"),
        ("auto", "rocm", "cuda:1"),
    ],
)
def test_tensors_go_where_the_group_takes_them_from(backend: str, kind: str, device: str) -> None:
    assert wire_device(backend, Device(kind), torch.device("cuda", 1)) == torch.device(device)  # type: ignore[arg-type]
