"""The checks of an accelerator, which on the CPU compare it with itself."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from elastic_train.device import Device
from scripts import device_checks
from scripts.check_device import CHECKS, check_device, run_check
from scripts.device_checks import CheckFailed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_codecs_are_compared_bit_by_bit() -> None:
    assert device_checks.check_codecs(CPU) == {"encoded_alike": {"bf16": True, "int8": True, "int4": True}}


def test_two_ranks_average_their_parameters() -> None:
    errors = device_checks.check_reduce_gloo(CPU)["relative_errors"]
    assert list(errors) == list(device_checks.METHODS)
    assert errors["none"] < errors["bf16"] < errors["int4"]


def test_a_group_of_one_rank_gives_back_what_it_got() -> None:
    assert device_checks.check_reduce_nccl(CPU) == {"group": "ProcessGroupGloo"}


def test_what_is_shown_is_what_was_computed_before() -> None:
    assert device_checks.check_publication(CPU) == {"anchors_on": ["cpu"]}


def test_a_joiner_has_its_donors_state() -> None:
    figures = device_checks.check_transfer(CPU, 1 << 20)
    assert figures["bytes"] == (1 << 20) + 4


def test_a_state_comes_over_a_channel() -> None:
    figures = device_checks.check_channel(CPU, 1 << 20)
    assert (figures["library"], figures["accelerators"]) == ("gloo", 1)
    assert figures["fetched_gb_s"] > 0


def test_a_bit_that_differs_is_found() -> None:
    one = torch.zeros(3)
    other = torch.tensor([0.0, -0.0, 0.0])
    assert torch.equal(one, other)
    with pytest.raises(CheckFailed, match="here: 1 of 12 bytes"):
        device_checks._same(one, other, "here")


def test_a_number_is_as_coarse_as_its_block() -> None:
    values = torch.zeros(200)
    values[0], values[150] = 127.0, 7.0
    assert device_checks._coarseness("int8", values)[[0, 127, 128]].tolist() == pytest.approx(
        [1.01, 1.01, 1.01 * 7 / 127]
    )
    assert float(device_checks._coarseness("int4", values)[199]) == pytest.approx(1.01)
    with pytest.raises(CheckFailed, match="off by"):
        device_checks._close(values, values + torch.nan, values, "here")


def test_a_check_that_fails_says_so_and_others_go_on() -> None:
    def broken() -> dict[str, Any]:
        raise CheckFailed("3 of 4 bytes differ")

    result = run_check(broken, CPU)
    assert (result["ok"], result["error"]) == (False, "CheckFailed: 3 of 4 bytes differ")
    assert run_check(lambda: {"bytes": 4}, CPU)["ok"]


def test_without_an_accelerator_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.device.detect", lambda: Device("cpu"))
    done = CliRunner().invoke(check_device, ["--json"], standalone_mode=False)
    assert (done.return_value, done.stdout) == (2, "")
    assert "no accelerator" in done.stderr


def test_the_last_line_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str) -> Callable[..., dict[str, Any]]:
        def result(*arguments: object) -> dict[str, Any]:
            if name == "publication":
                raise CheckFailed("it shows 0.0")
            return {"what": name}

        return result

    for name in CHECKS:
        monkeypatch.setattr(device_checks, f"check_{name}", check(name))
    monkeypatch.setattr("elastic_train.device.detect", lambda: Device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    done = CliRunner().invoke(check_device, ["--json"], standalone_mode=False)

    figures = json.loads(done.stdout.splitlines()[-1])
    assert (done.return_value, figures["failed"], figures["device"]) == (1, ["publication"], "a card")
    assert list(figures["checks"]) == list(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_this_machines_accelerator_passes() -> None:
    done = CliRunner().invoke(check_device, ["--mib", "64", "--json"], standalone_mode=False)
    assert done.return_value == 0, done.output
