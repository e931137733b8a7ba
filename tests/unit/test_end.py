import pytest

from elastic_train.orchestrator.end import RunEnd


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (RunEnd(status="succeeded"), 0),
        (RunEnd(status="failed", cause="comm_error"), 1),
        (RunEnd(status="failed"), 1),
        (RunEnd(status="failed", cause="config_error"), 2),
        (RunEnd(status="interrupted"), 130),
    ],
)
def test_exit_codes(end: RunEnd, code: int) -> None:
    assert end.exit_code == code
