"""For how long a link was the limit, by what its source said between two buckets."""

from pipelinerl.weights.transfer.puller import AHEAD_BUCKETS, LinkClock

BUCKET = 10


def clock() -> LinkClock:
    return LinkClock(first=0, upto=0, end=100, ahead_bytes=AHEAD_BUCKETS * BUCKET, began=0.0, at=0.0)


def see(measured: LinkClock, upto: int, source_end: int, now: float) -> None:
    measured.upto = upto
    measured.see(source_end, now)


def test_link_is_the_limit_while_its_source_has_two_buckets_more() -> None:
    measured = clock()
    see(measured, 0, 20, 1.0)
    see(measured, 10, 30, 3.0)  # it was ahead for two seconds
    assert measured.is_ahead
    see(measured, 30, 49, 4.0)  # and is no more
    see(measured, 40, 60, 5.0)
    see(measured, 50, 70, 6.5)
    assert measured.ahead_s == 2.0 + 1.5


def test_source_that_has_the_end_is_ahead_until_the_last_byte() -> None:
    measured = clock()
    see(measured, 85, 100, 1.0)
    measured.upto = 100
    measured.stop(4.0)
    assert measured.ahead_s == 3.0


def test_source_that_waits_itself_is_no_limit_of_the_link() -> None:
    measured = clock()
    for now in (1.0, 2.0, 3.0):
        see(measured, 10, 10, now)
    measured.stop(9.0)
    assert measured.ahead_s == 0.0
