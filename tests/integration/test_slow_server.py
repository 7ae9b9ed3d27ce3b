"""One slow server among real receivers on limited links: the others are not slowed for ever, and stay in service."""

from collections.abc import Iterator

import pytest

from benchmarks.receivers import ReceiverProcess, forkserver, receivers
from benchmarks.slow_server import MIB, Case, push_all, slowed

RATE = 4.0 * MIB


@pytest.fixture(scope="module")
def running() -> Iterator[list[ReceiverProcess]]:
    with forkserver(), receivers(4, rate=RATE) as made:
        yield made


@pytest.mark.slow  # it needs healthy rates: tests/unit/weights/test_slow_servers.py simulates it at any speed
@pytest.mark.parametrize("kind", ["uplink", "downlink"])
def test_slow_server_is_named_and_no_healthy_one_leaves_service(running: list[ReceiverProcess], kind: str) -> None:
    """Of 16 MB at 4 MB/s. A slow one of a tenth needs 40 s, more than the time-out."""
    case = Case(4, 16, {0: (kind, 1 / 10)})
    with slowed(running, case, RATE):
        rows = push_all(running, case, RATE, 3, timeout_s=30.0)
    assert [row["expelled"] for row in rows] == [[], [], []]
    assert rows[-1]["all_slow_are_known"], rows
