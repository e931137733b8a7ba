import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config import ConfigError, FaultSpec
from elastic_train.config.faults import KINDS, POINTS

numbers = st.integers(min_value=0, max_value=10**6)


@given(
    st.builds(
        FaultSpec,
        replica=numbers,
        rank=numbers,
        step=numbers,
        point=st.sampled_from(POINTS),
        kind=st.sampled_from(KINDS),
    )
)
def test_a_fault_reads_back_from_its_text(fault):
    assert FaultSpec.parse(str(fault)) == fault


@pytest.mark.parametrize("text", ["0.1@25:kill", "1.0@40/reduce:stop", "3.7@0/snapshot:replica_actor"])
def test_text_comes_back_as_written(text):
    assert str(FaultSpec.parse(text)) == text


def test_the_point_is_the_step_unless_said():
    assert FaultSpec.parse("0.1@25:kill") == FaultSpec(replica=0, rank=1, step=25, point="step", kind="kill")
    assert str(FaultSpec.parse("0.1@25/step:kill")) == "0.1@25:kill"


@pytest.mark.parametrize(
    "text", ["", "kill", "0@25:kill", "0.0@:kill", "0.0@-1:kill", "0.0@5/:kill", "0.0@5:", "0.٣@5:kill"]
)
def test_what_is_no_fault(text):
    with pytest.raises(ConfigError, match=r"is no fault: write replica.rank@step"):
        FaultSpec.parse(text)


def test_an_unknown_point_names_the_nearest():
    with pytest.raises(ConfigError, match=r'names no point \(did you mean "reduce"\?\): use one of step, quorum'):
        FaultSpec.parse("0.0@5/reduc:kill")


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(ConfigError, match=r'fault kind "segfalt" is unknown \(did you mean "segfault"\?\)'):
        FaultSpec.parse("0.0@5:segfalt")
