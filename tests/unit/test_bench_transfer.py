"""What the benchmark of transfers makes of its measurements, and the parts that it measures with."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from scripts import bench_transfer
from scripts.bench_transfer import COLD, ONE_DONOR, TWO_DONORS, WARM, donor_figures, durations, in_turn, wire_figures
from scripts.namespaces import NoNamespaces, star
from scripts.transfer_peers import (
    INNER,
    OUTER,
    PARAMETERS,
    RAW,
    PeerFailed,
    Peers,
    Place,
    RawServer,
    TimedTransfer,
    Way,
    make_state,
    needed_bytes,
    receive_raw,
    state_hash,
)

HOST = "127.0.0.1"
GB = 10**9


def took(*seconds: float, size: int = GB, shares: tuple[int, ...] = ()) -> list[TimedTransfer]:
    return [TimedTransfer(seconds=one, bytes=size, hash=1, shares=shares) for one in seconds]


def measured() -> dict[str, list[TimedTransfer]]:
    return {
        "raw": took(0.5, 0.25, 9.0),
        "ours": took(1.0, 1.0, 0.1),
        "process_group": took(0.8, 0.9, 0.8),
        "http": took(4.0, 2.0, 1.0),
        "warm_raw": took(0.2),
        "warm_ours": took(0.25),
    }


def test_speeds_come_from_the_median_time() -> None:
    assert wire_figures(measured()) == {
        "gb_s": 1.0,
        "raw_gb_s": 2.0,
        "ratio": 0.5,
        "process_group_gb_s": 1.25,
        "process_group_ratio": 0.625,
        "http_gb_s": 0.5,
        "http_ratio": 2.0,
        "warm_gb_s": 4.0,
        "warm_raw_gb_s": 5.0,
        "warm_ratio": 0.8,
    }


def test_what_was_not_measured_has_no_figure() -> None:
    assert set(wire_figures({}).values()) == {None}
    assert set(donor_figures({}).values()) == {None}
    assert wire_figures({"raw": took(1.0)})["ratio"] is None


def test_two_donors_are_compared_with_one() -> None:
    two = took(1.0, size=100, shares=(40, 60)) + took(1.0, 1.0, size=100, shares=(50, 50))
    figures = donor_figures({ONE_DONOR: took(2.0, size=10**8), TWO_DONORS: two})
    assert figures["donors_shares"] == [0.5, 0.5]
    assert figures["donors_gb_s"]["1"] == 0.05
    figures = donor_figures({ONE_DONOR: took(2.0, 2.0), TWO_DONORS: took(1.0, 1.25, 1.1, shares=(GB // 2, GB // 2))})
    assert figures["donors_ratio"] == pytest.approx(2 / 1.1, abs=1e-3)


def test_the_worst_time_is_told_too() -> None:
    assert durations({"raw": took(0.5, 0.25, 9.0)}) == {"raw": {"median_s": 0.5, "worst_s": 9.0}}


def test_every_way_is_in_every_round_and_first_in_some() -> None:
    ways = [*COLD, *WARM]
    rounds = [in_turn(ways, turn) for turn in range(len(ways))]
    assert all(sorted(one) == sorted(ways) for one in rounds)
    assert {one[0] for one in rounds} == set(ways)


def test_memory_grows_with_the_state_and_the_donors() -> None:
    assert needed_bytes(2 * GB, 1) - needed_bytes(GB, 1) == 3 * GB
    assert needed_bytes(GB, 2) - needed_bytes(GB, 1) > GB


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(bench_transfer.bench_transfer, [*arguments, "--json"], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, json.loads(done.stdout.splitlines()[-1])


def give(transfers: dict[str, list[TimedTransfer]]) -> Callable[..., dict[str, list[TimedTransfer]]]:
    return lambda *arguments: transfers


def fail(error: Exception) -> Callable[..., Any]:
    def measure(*arguments: object) -> None:
        raise error

    return measure


def test_the_last_line_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = {ONE_DONOR: took(2.0), TWO_DONORS: took(1.0, shares=(GB // 4, 3 * GB // 4))}
    monkeypatch.setattr(bench_transfer, "measure_wires", give(measured()))
    monkeypatch.setattr(bench_transfer, "measure_donors", give(donors))

    code, figures = run("--mib", "7", "--rounds", "3")

    assert code == 0
    assert (figures["gb_s"], figures["raw_gb_s"], figures["ratio"]) == (1.0, 2.0, 0.5)
    assert figures["donors_gb_s"] == {"1": 0.5, "2": 1.0}
    assert (figures["donors_ratio"], figures["donors_shares"]) == (2.0, [0.25, 0.75])
    assert (figures["mib"], figures["rounds"], figures["failed"], figures["donors_note"]) == (7, 3, [], "")
    assert figures["seconds"].keys() == {*COLD, *WARM, ONE_DONOR, TWO_DONORS}


def test_without_namespaces_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_transfer, "measure_wires", give(measured()))
    monkeypatch.setattr(bench_transfer, "measure_donors", fail(NoNamespaces("only root can")))

    code, figures = run()

    assert (code, figures["failed"], figures["gb_s"]) == (0, [], 1.0)
    assert (figures["donors_gb_s"], figures["donors_note"]) == (None, "only root can")


@pytest.mark.parametrize("error", [PeerFailed("donor 0 is gone"), MemoryError("not measured")])
def test_a_failed_transfer_fails_the_benchmark_and_says_why(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(bench_transfer, "measure_wires", fail(error))

    code, figures = run("--link_mib", "0")

    assert (code, figures["gb_s"], figures["donors_note"]) == (1, None, "left out")
    assert figures["failed"] == [f"over loopback: {error}"]


@pytest.mark.parametrize("streams", [1, 3])
def test_raw_sockets_bring_every_tensor(streams: int) -> None:
    sent = [torch.full((100,), float(index)) for index in range(7)]
    received = [torch.empty(100) for _ in sent]
    server = RawServer(HOST, sent, streams)

    receive_raw(server.address, received, streams)
    server.close()

    assert all(torch.equal(one, other) for one, other in zip(sent, received, strict=True))


def test_a_state_is_half_outer_and_half_inner() -> None:
    state = make_state(3, torch.zeros)
    assert {section: len(tensors) for section, tensors in state.items()} == {
        OUTER: 2 * PARAMETERS,
        INNER: 2 * PARAMETERS,
    }


def test_the_hash_is_of_every_number() -> None:
    state = make_state(3, torch.zeros)
    before = state_hash(state)
    state[INNER]["5.exp_avg"][2] = 1.0
    assert state_hash(state) != before


def test_only_our_own_wire_takes_a_state_from_several() -> None:
    with Peers(1, [], streams=1) as peers, pytest.raises(ValueError, match="from one donor"):
        peers.transfer(Way(wire=RAW), 2)


def test_only_root_makes_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNamespaces, match="root"), star(1, 10):
        pass


def test_a_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoNamespaces, match="no command ip"), star(1, 10):
        pass


def test_a_place_is_on_this_machine_unless_told_otherwise() -> None:
    assert Place() == Place(host=HOST, namespace="")
