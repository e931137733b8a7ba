import threading

import pytest
import torch

from elastic_train.device import Device, detect, side_stream


@pytest.mark.parametrize(
    ("kind", "name", "backend", "pins"),
    [("cpu", "cpu", "gloo", False), ("cuda", "cuda", "nccl", True), ("rocm", "cuda", "nccl", True)],
)
def test_what_torch_calls_it(kind: str, name: str, backend: str, pins: bool) -> None:
    device = Device(kind)  # type: ignore[arg-type]

    assert (device.type, device.backend, device.pins_memory) == (name, backend, pins)


@pytest.mark.parametrize(
    ("available", "hip", "kind"), [(False, None, "cpu"), (True, None, "cuda"), (True, "6.4", "rocm")]
)
def test_detection(monkeypatch: pytest.MonkeyPatch, available: bool, hip: str | None, kind: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.version, "hip", hip)

    assert detect() == Device(kind)  # type: ignore[arg-type]


def test_a_gpus_module_is_torchs_own() -> None:
    assert Device("cuda").module is Device("rocm").module is torch.cuda


def test_a_cpu_answers_what_a_trainer_asks_a_gpu() -> None:
    """Of ``torch.cuda``, each name that the module has, so that one which torch drops shows here."""
    module = Device("cpu").module
    names = [name for name in dir(module) if not name.startswith("_")]

    assert all(hasattr(torch.cuda, name) for name in names)
    assert (module.device_count(), module.current_device()) == (1, 0)
    assert module.get_device_properties("cpu").total_memory > 1 << 28


def test_memory_is_the_peak_of_the_process() -> None:
    module = Device("cpu").module
    before = module.memory_stats()["active_bytes.all.peak"]

    held = torch.ones(32 << 20)

    grown = module.memory_stats()
    assert grown["active_bytes.all.peak"] >= max(before, held.numel() * held.element_size())
    assert (grown["num_alloc_retries"], grown["num_ooms"]) == (0, 0)


def test_beside_the_main_thread_a_cpu_needs_nothing_special(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("there is no accelerator")

    for name in ("set_device", "Stream", "default_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, fail)
    values = torch.zeros(3)

    def work() -> None:
        with side_stream(torch.device("cpu")):
            values.add_(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert values.tolist() == [1.0] * 3
    with pytest.raises(OSError, match="no memory"), side_stream(torch.device("cpu")):
        raise OSError("no memory")
