"""When a replica is to leave, and who heeds a warning."""

from elastic_train.replica.notice import Notice

LONG_S = 3600.0


def test_nobody_leaves_unasked() -> None:
    notice = Notice()
    assert not notice.given
    assert not notice.forbids(LONG_S)


def test_what_fits_into_the_time_is_still_done() -> None:
    notice = Notice()
    notice.give(LONG_S)
    assert notice.given
    assert not notice.forbids(LONG_S / 2)
    assert notice.forbids(2 * LONG_S)


def test_a_later_word_counts_only_if_it_is_shorter() -> None:
    notice = Notice()
    notice.give(LONG_S)
    notice.give(2 * LONG_S)
    assert notice.forbids(1.5 * LONG_S)
    notice.give(0.0)
    assert notice.forbids(0.0)


def test_a_warning_is_taken_only_where_somebody_heeds_it() -> None:
    notice = Notice()
    assert (notice.warn(), notice.warned) == (False, False)
    notice.heed(True)
    assert (notice.warn(), notice.warned) == (True, True)
    notice.heed(False)
    assert not notice.warn()
