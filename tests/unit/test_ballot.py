import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.diloco.ballot import WIDTH, Choice, Result, Vote, count, minority
from elastic_train.diloco.metadata import Standing

OK = Standing.OK
NO = Vote(choice=Choice.NO)
ABSTAIN = Vote(choice=Choice.ABSTAIN)

VOTES = st.builds(Vote, choice=st.sampled_from(Choice), candidate=st.integers(0, 2))


def yes(candidate: int = -7) -> Vote:
    return Vote(choice=Choice.YES, candidate=candidate)


@given(st.builds(Vote, choice=st.sampled_from(Choice), candidate=st.integers(-(2**63), 2**63 - 1)))
def test_a_vote_survives_its_journey(vote: Vote) -> None:
    ints = vote.to_ints()

    assert len(ints) == WIDTH
    assert all(type(value) is int for value in ints)
    assert Vote.from_ints(ints) == vote


@pytest.mark.parametrize(("values", "message"), [([1], "has 2 integers, not 1"), ([3, 0], "3 is not a valid Choice")])
def test_what_is_no_vote(values: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vote.from_ints(values)


def test_a_vote_passes_if_all_that_count_say_yes_to_one_candidate() -> None:
    assert count([yes(), yes()], [OK, OK]) is Result.PASSED
    assert count([yes()], [OK]) is Result.PASSED


@pytest.mark.parametrize("other", [NO, ABSTAIN])
def test_one_that_counts_and_does_not_say_yes_refuses(other: Vote) -> None:
    assert count([yes(1), yes(2), other], [OK, OK, OK]) is Result.REFUSED


def test_other_candidates_are_a_mismatch() -> None:
    assert count([yes(1), yes(1), yes(2)], [OK, OK, OK]) is Result.MISMATCH


@pytest.mark.parametrize("standing", [standing for standing in Standing if standing is not OK])
@pytest.mark.parametrize("vote", [NO, ABSTAIN, yes(9)])
def test_the_vote_of_who_is_not_ok_does_not_count(vote: Vote, standing: Standing) -> None:
    assert count([vote, yes(), yes()], [standing, OK, OK]) is Result.PASSED


def test_a_vote_in_which_nobody_counts_is_refused() -> None:
    assert count([yes(), yes()], [Standing.NON_FINITE, Standing.BEHIND]) is Result.REFUSED
    assert count([], []) is Result.REFUSED


@given(st.lists(st.tuples(VOTES, st.sampled_from(Standing)), max_size=6), st.randoms())
def test_everybody_counts_alike_in_whatever_order(votes: list[tuple[Vote, Standing]], rng) -> None:
    shuffled = list(votes)
    rng.shuffle(shuffled)

    assert count(*_columns(votes)) is count(*_columns(shuffled))


def _columns(votes: list[tuple[Vote, Standing]]) -> tuple[list[Vote], list[Standing]]:
    return [vote for vote, _ in votes], [standing for _, standing in votes]


def test_a_minority_is_who_has_another_candidate_than_most() -> None:
    assert minority([yes(1), yes(2), yes(2)], [0, 1, 2]) == {0}
    assert minority([yes(1), yes(2), yes(3), yes(2)], [0, 1, 2, 3]) == {0, 2}
    assert minority([yes(), yes()], [0, 1]) == frozenset()
    assert minority([], []) == frozenset()


def test_on_a_tie_the_higher_slots_restart() -> None:
    assert minority([yes(1), yes(2)], [5, 4]) == {5}
    assert minority([yes(1), yes(2), yes(3)], [2, 0, 1]) == {1, 2}


@pytest.mark.parametrize("other", [NO, ABSTAIN])
def test_who_has_no_candidate_is_in_no_minority(other: Vote) -> None:
    assert minority([other, other, yes(1), yes(2)], [0, 1, 2, 3]) == {3}


@given(st.lists(VOTES, max_size=7))
def test_who_stays_has_one_candidate_and_is_no_smaller_group(votes: list[Vote]) -> None:
    slots = list(range(len(votes)))

    restart = minority(votes, slots)

    voted = {slot: vote.candidate for slot, vote in zip(slots, votes, strict=True) if vote.choice is Choice.YES}
    stay = {slot: candidate for slot, candidate in voted.items() if slot not in restart}
    assert restart <= voted.keys()
    assert len(set(stay.values())) == min(len(voted), 1)
    for candidate in set(voted.values()):
        assert sum(c == candidate for c in voted.values()) <= len(stay)
