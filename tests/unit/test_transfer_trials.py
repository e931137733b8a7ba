"""What trials of transfers are drawn, judged and written down; and two of them for real."""

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from scripts import transfer_trials
from scripts.command_line import FAILED, PASSED
from scripts.meddler import Act, Meddler
from scripts.stress import stress
from scripts.transfer_plan import INNER, OUTER, TROUBLES, Ending, Held, Plan, draw, judge
from scripts.transfer_scene import Scene, make_section
from scripts.trials import Trial, Trials, repeat, sum_up
from tests.liar import Liar

PLAN = Plan(trouble="kill", seed=0, donors=2, orders=((0, 1), (1,)), mib=8, fraction=0.5, struck=(0,))
HELD = [
    Held(address=f"http://127.0.0.1:{slot}", header={"slot": slot}, hashes={INNER: slot, OUTER: 9}) for slot in (0, 1)
]


def whole(primary: int, **changes: Any) -> Ending:
    """How the transfer of a state from a primary ends when all is well."""
    there = Ending(primary=primary, header=HELD[primary].header, hashes=HELD[primary].hashes, told=True)
    return replace(there, **changes)


FAILURE = Ending(error="no donor is left", failed=True)


def test_a_seed_decides_everything() -> None:
    for trouble in TROUBLES:
        plans = [draw(trouble, seed) for seed in range(40)]
        assert plans == [draw(trouble, seed) for seed in range(40)]
        assert len({str(plan) for plan in plans}) > 10
        assert {plan.fraction for plan in plans} == {0.1, 0.5, 0.9}
        for plan in plans:
            assert all(order and set(order) <= set(range(plan.donors)) for order in plan.orders)
            assert set(plan.struck) <= set(range(plan.donors))


def test_the_trouble_decides_who_is_struck() -> None:
    for seed in range(20):
        assert len(draw("kill", seed).struck) == 1
        assert draw("primary", seed).struck == draw("primary", seed).orders[0][:1]
        assert len(draw("most", seed).struck) == draw("most", seed).donors - 1 > 0
        assert draw("retire", seed).section in (INNER, OUTER)
        assert draw("strangers", seed).struck == draw("flip", seed).struck == ()


def test_a_plan_says_what_it_is() -> None:
    assert str(PLAN) == "2 joiners, 2 donors, 8 MiB, at 50%, on 0"
    assert "of the manifests" in str(draw("mislead", 0))


def test_all_is_well_if_every_joiner_has_a_donors_state() -> None:
    assert judge(PLAN, HELD, {0: whole(0), 1: whole(1)}) == []
    assert judge(PLAN, HELD, {0: whole(1, lost=(0,), refetched=5), 1: whole(1)}) == []


def test_without_a_donor_a_joiner_may_fail() -> None:
    plan = replace(PLAN, donors=1, orders=((0,), (0,)))
    assert judge(plan, HELD[:1], {0: FAILURE, 1: whole(0)}) == []
    assert judge(PLAN, HELD, {0: FAILURE, 1: whole(1)}) == [
        "joiner 0 failed with a sound donor at hand: no donor is left"
    ]


@pytest.mark.parametrize(
    ("ending", "complaint"),
    [
        (whole(0, hashes=HELD[1].hashes), "joiner 0 has another state than replica 0"),
        (whole(0, header={}), "joiner 0 has another header than replica 0"),
        (replace(whole(0), primary=2), "joiner 0 has the state of 2, which was no donor"),
        (whole(1, told=False), "joiner 0 could not tell replica 1 that the state arrived"),
        (whole(0, lost=(0, 1)), r"joiner 0 gave up [1], which nothing had struck"),
        (whole(0, threads=("parts 0 of replica 1",)), "joiner 0 has left threads behind: parts 0 of replica 1"),
    ],
)
def test_what_is_wrong_is_said(ending: Ending, complaint: str) -> None:
    assert judge(PLAN, HELD, {0: ending, 1: whole(1)}) == [complaint]


def test_anything_else_than_a_failed_transfer_is_wrong() -> None:
    broken = Ending(error="KeyError('a')")
    assert "joiner 0 ended in something else: KeyError('a')" in judge(PLAN, HELD, {0: broken, 1: whole(1)})
    assert judge(PLAN, HELD, {1: whole(1)}) == ["joiner 0 did not end"]


def test_a_flipped_bit_costs_one_joiner_one_donor() -> None:
    plan = replace(PLAN, trouble="flip", struck=())
    assert judge(plan, HELD, {0: whole(1, lost=(0,), refetched=1), 1: whole(1)}) == []
    assert judge(plan, HELD, {0: whole(0), 1: whole(1)}) == ["nobody noticed the flipped bit"]
    assert judge(plan, HELD, {0: FAILURE, 1: whole(1)}) == [
        "one bit was flipped, and 1 joiners failed: no donor is left"
    ]
    alone = replace(plan, donors=1, orders=((0,), (0,)))
    assert judge(alone, HELD[:1], {0: FAILURE, 1: whole(0)}) == []


COUNTS = {"joiners": 2, "without_donor": 0, "refetched_bytes": 4}
TRIAL = Trial(kind="kill", seed=0, fault=str(PLAN), wall_s=1.0, counts=COUNTS, reasons=())


def test_trials_are_gone_on_with(tmp_path: Path) -> None:
    failed = replace(TRIAL, seed=1, reasons=("joiner 0 did not end",))
    path = tmp_path / transfer_trials.RESULTS
    trials = Trials(path)
    trials.add(TRIAL)
    trials.add(failed)
    trials.close()
    told: list[Trial] = []

    def make(kind: str, seed: int) -> Trial:
        return replace(TRIAL, kind=kind, seed=seed)

    made, interrupted = repeat(["kill", "stop"], range(2), path, make=make, tell=told.append)

    assert not interrupted
    assert made == told == [TRIAL, replace(TRIAL, kind="stop"), failed, replace(TRIAL, kind="stop", seed=1)]
    again = Trials(path)
    assert (again.get("stop", 1), again.get("flip", 0)) == (made[3], None)
    again.close()
    summary = sum_up(made, "troubles")
    assert (summary["runs"], summary["passed"]) == (4, 3)
    assert summary["failed"] == {"kill 1": [str(PLAN), "joiner 0 did not end"]}
    assert summary["troubles"]["stop"]["joiners"] == 4


@pytest.mark.parametrize(("reasons", "code"), [((), PASSED), (("joiner 0 did not end",), FAILED)])
def test_the_command_tells_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reasons: tuple[str, ...], code: int
) -> None:
    def make(trouble: str, seed: int) -> Trial:
        return replace(TRIAL, kind=trouble, seed=seed, reasons=reasons)

    monkeypatch.setattr(transfer_trials, "make", make)

    done = CliRunner().invoke(
        stress, ["--transfers", "all", "--repeat", "2", "--out", str(tmp_path)], standalone_mode=False
    )

    assert done.return_value == code
    assert f"kill: {0 if reasons else 2} of 2 trials passed" in done.stdout
    assert done.stderr.count(" 1.0 s") == 2 * len(TROUBLES)
    assert ("joiner 0 did not end" in done.stderr) == bool(reasons)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--transfers", "rain"], "no troubles are called rain"),
        (["--transfers", "kill", "--worlds", "plain"], "ask for one"),
    ],
)
def test_wrong_use_of_the_command(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(stress, arguments)
    assert done.exit_code == 2
    assert complaint in done.stderr


def test_sections_have_the_same_shapes_for_all_and_what_the_content_says() -> None:
    one, other = (make_section(INNER, 100_000, 3, slot) for slot in (0, 1))
    assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in other.items()}
    assert any(not tensor.equal(other[name]) for name, tensor in one.items())
    assert 90_000 < sum(tensor.nbytes for tensor in one.values()) <= 100_000
    assert any(not tensor.numel() for tensor in one.values())


@pytest.fixture
def answers() -> Iterator[Liar]:
    with closing(Liar(b"x" * 20_000)) as liar:
        yield liar


def passed_on(answers: Liar, act: Act, after: int, request: bytes) -> bytes:
    with closing(Meddler([answers.address] * 2, act, after)) as meddler:
        port = int(meddler.addresses[1].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 30.0) as connection:
            connection.sendall(request)
            received = b""
            while data := connection.recv(65536):
                received += data
    return received


@pytest.mark.parametrize(
    ("act", "request_line", "wrong"),
    [
        (Act.FLIP, b"GET /part", 1),
        (Act.FLIP, b"GET /manifest", 0),
        (Act.MISLEAD, b"GET /manifest", 1),
        (Act.MISLEAD, b"GET /part", 0),
    ],
)
def test_a_bit_is_flipped_where_it_should_be(answers: Liar, act: Act, request_line: bytes, wrong: int) -> None:
    received = passed_on(answers, act, 100, request_line)
    assert len(received) == 20_000
    assert len(received) - received.count(b"x") == wrong
    assert act is Act.FLIP or received.find(b"|") == (100 if wrong else -1)


def test_a_cut_comes_after_as_many_bytes_as_it_should(answers: Liar) -> None:
    assert passed_on(answers, Act.CUT, 12_345, b"GET /part") == b"x" * 12_345


@pytest.mark.parametrize("trouble", ["primary", "retire"])
def test_a_trial_in_real_processes(trouble: str) -> None:
    plan = replace(PLAN, trouble=trouble, mib=1, section=INNER if trouble == "retire" else "")

    account = Scene(plan).run()

    assert account.reasons == ()
    assert account.endings.keys() == {0, 1}
    assert account.endings[1].primary == 1
