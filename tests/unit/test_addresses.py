"""At which addresses this machine is reached."""

import pytest

from elastic_train.config import EnvironmentProblem, RunConfig
from elastic_train.config.schema import LighthouseConfig, OrchestratorConfig, SchedulerConfig
from elastic_train.orchestrator.addresses import bracketed, with_addresses
from elastic_train.orchestrator.scheduler.host_worker import host_environment, interface_of


def config(*hosts: str, advertise_host: str = "", lighthouse: str = "") -> RunConfig:
    return RunConfig(
        orchestrator=OrchestratorConfig(advertise_host=advertise_host),
        lighthouse=LighthouseConfig(host=lighthouse),
        scheduler=SchedulerConfig(kind="ssh", hosts=hosts),
    )


def addresses(config: RunConfig) -> tuple[str, str]:
    found = with_addresses(config)
    return found.orchestrator.advertise_host, found.lighthouse.host


def test_everything_stays_on_this_machine_with_the_local_scheduler() -> None:
    assert addresses(RunConfig()) == ("127.0.0.1", "127.0.0.1")


def test_other_hosts_reach_the_address_on_the_way_to_the_first() -> None:
    assert addresses(config("me@127.0.0.9")) == ("127.0.0.1", "127.0.0.1")


def test_of_several_hosts_this_machine_itself_tells_nothing_of_the_way_to_the_others() -> None:
    with pytest.raises(EnvironmentProblem, match=r"does not know the way to nowhere\.invalid"):
        with_addresses(config("127.0.0.1", "nowhere.invalid"))


def test_a_host_has_one_name() -> None:
    with pytest.raises(EnvironmentProblem, match=r"me@127\.0\.0\.9 and 127\.0\.0\.9 are the same host"):
        with_addresses(config("me@127.0.0.9", "127.0.0.9"))


def test_what_is_set_stays() -> None:
    assert addresses(config("nowhere.invalid", advertise_host="10.0.0.1")) == ("10.0.0.1", "10.0.0.1")
    assert addresses(config("nowhere.invalid", advertise_host="10.0.0.1", lighthouse="10.0.0.2")) == (
        "10.0.0.1",
        "10.0.0.2",
    )


def test_a_host_that_nobody_knows_is_a_problem_of_this_machine() -> None:
    with pytest.raises(EnvironmentProblem, match=r"does not know the way to nowhere\.invalid"):
        with_addresses(config("nowhere.invalid"))


def test_a_host_knows_its_interface_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.7") == ""
    assert host_environment("127.0.0.1", 2, 1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in host_environment("192.0.2.7", 2, 1)


def test_addresses_in_urls() -> None:
    assert (bracketed("10.0.0.1"), bracketed("fe80::1")) == ("10.0.0.1", "[fe80::1]")
