"""Which host is given next."""

from elastic_train.orchestrator.scheduler.hosts import Hosts, Place


def places(hosts: Hosts, number: int, now: float = 0.0) -> list[str]:
    taken = [hosts.take(now) for _ in range(number)]
    return [f"{place.host}{place.position}" if place else "-" for place in taken]


def test_hosts_are_shared_out_evenly_until_everything_is_taken() -> None:
    hosts = Hosts(["a", "b"], replicas_per_host=2, cool_down_s=60.0)
    assert places(hosts, 5) == ["a0", "b0", "a1", "b1", "-"]


def test_what_is_given_back_is_given_again() -> None:
    hosts = Hosts(["a", "b"], replicas_per_host=1, cool_down_s=60.0)
    assert places(hosts, 2) == ["a0", "b0"]
    hosts.give_back(Place(host="a", position=0), failed=False, now=1.0)
    assert places(hosts, 2, now=1.0) == ["a0", "-"]


def test_one_that_has_failed_comes_after_all_others() -> None:
    hosts = Hosts(["a", "b"], replicas_per_host=3, cool_down_s=60.0)
    hosts.give_back(hosts.take(0.0), failed=True, now=5.0)  # type: ignore[arg-type]
    assert places(hosts, 4, now=6.0) == ["b0", "b1", "b2", "a0"]


def test_of_those_that_have_failed_the_one_is_given_whose_failure_is_longest_ago() -> None:
    hosts = Hosts(["a", "b"], replicas_per_host=1, cool_down_s=60.0)
    first, second = hosts.take(0.0), hosts.take(0.0)
    assert first is not None
    assert second is not None
    hosts.give_back(first, failed=True, now=9.0)
    hosts.give_back(second, failed=True, now=5.0)
    assert places(hosts, 2, now=10.0) == ["b0", "a0"]


def test_a_failure_is_forgotten_in_time() -> None:
    hosts = Hosts(["a", "b"], replicas_per_host=1, cool_down_s=60.0)
    hosts.give_back(hosts.take(0.0), failed=True, now=5.0)  # type: ignore[arg-type]
    assert places(hosts, 1, now=65.0) == ["a0"]
