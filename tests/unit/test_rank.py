from pathlib import Path

from elastic_train.config import RunConfig
from elastic_train.replica.rank import Incarnation


def test_an_incarnation_can_be_logged_without_its_token() -> None:
    incarnation = Incarnation(
        config=RunConfig(),
        run_dir=Path("run"),
        slot=0,
        number=0,
        joining=False,
        lighthouse="http://127.0.0.1:1",
        host="127.0.0.1",
        fired=frozenset(),
        registry="http://127.0.0.1:2",
        token="0123456789abcdef",
    )
    assert "http://127.0.0.1:2" in repr(incarnation)
    assert incarnation.token not in repr(incarnation)
