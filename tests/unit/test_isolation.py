"""A replica counts itself as heard only as far as its answers are known to have got through."""

import threading

from elastic_train.replica.isolation import Fence, Lease


def test_a_lease_that_nobody_renews_ends() -> None:
    lease = Lease(20.0, now=100.0)
    assert not lease.is_over(119.9)
    assert lease.is_over(120.0)


def test_a_question_alone_renews_nothing() -> None:
    lease = Lease(20.0, now=0.0)
    assert [lease.renew(0, now) for now in (5.0, 10.0, 15.0)] == [1, 2, 3]
    assert lease.is_over(20.0)


def test_an_answer_that_was_heard_counts_from_when_it_was_given() -> None:
    lease = Lease(20.0, now=0.0)
    answer = lease.renew(0, 5.0)
    lease.renew(answer, 19.0)
    assert not lease.is_over(24.9)
    assert lease.is_over(25.0)


def test_questions_that_were_under_way_for_long_renew_nothing() -> None:
    lease = Lease(20.0, now=0.0)
    first = lease.renew(0, 1.0)
    second = lease.renew(first, 2.0)
    lease.renew(second, 3.0)
    # Sent long ago: they speak of answers that are known to have been heard.
    lease.renew(first, 15.0)
    lease.renew(second, 15.0)
    assert lease.is_over(22.0)


def test_an_answer_that_was_never_given_renews_nothing() -> None:
    lease = Lease(20.0, now=0.0)
    lease.renew(7, 10.0)
    assert lease.is_over(20.0)


def test_the_fence_acts_by_itself() -> None:
    acted = threading.Event()
    Fence(0.2, acted.set)
    assert acted.wait(60.0)
