"""Who pulls from whom, and what that costs."""

import pytest

from benchmarks.fan_out import LinkSpeed, chain_s, star_s
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.transfer.chain import bucket_bytes, chain, join, stripes

ORIGIN = Address("trainer", 1)


def worker(server: int, index: int = 0) -> Address:
    return Address(f"s{server}", 1 + index)


def sources(route: tuple, worker_index: int = 0, part: int = 0) -> list[str]:
    return [str(source) for source in route[worker_index][part].sources]


def test_each_worker_pulls_from_the_one_before_it_with_three_backups_and_the_trainer() -> None:
    routes = chain([[worker(i)] for i in range(6)], [((0, 100), ORIGIN)])
    assert sources(routes[0]) == ["trainer:1"]
    assert sources(routes[1]) == ["s0:1", "trainer:1"]
    assert sources(routes[5]) == ["s4:1", "s3:1", "s2:1", "s1:1", "trainer:1"]
    assert all((part.start, part.end) == (0, 100) for route in routes for parts in route for part in parts)


def test_chain_enters_a_server_once_and_goes_through_its_workers() -> None:
    first, second = chain([[worker(i, 0), worker(i, 1)] for i in range(2)], [((0, 100), ORIGIN)])
    assert [sources(first, 1)[0], sources(second, 0)[0], sources(second, 1)[0]] == ["s0:1", "s0:1", "s1:1"]


def test_worker_asks_the_32_before_it_in_its_server_first() -> None:
    (route,) = chain([[worker(0, index) for index in range(40)]], [((0, 100), ORIGIN)])
    assert sources(route, 39) == [*(f"s0:{1 + index}" for index in range(38, 6, -1)), "trainer:1"]


def test_stripes_begin_at_different_servers() -> None:
    routes = chain([[worker(i)] for i in range(4)], [((0, 50), ORIGIN), ((50, 100), Address("rank1", 1))])
    assert [sources(route, part=0)[0] for route in routes] == ["trainer:1", "s0:1", "s1:1", "s2:1"]
    assert [sources(route, part=1)[0] for route in routes] == ["s3:1", "s0:1", "rank1:1", "s2:1"]


def test_server_that_comes_late_pulls_from_a_holder_and_its_other_workers_from_each_other() -> None:
    route = join([worker(9, 0), worker(9, 1)], [[worker(1, 0), worker(1, 1)]], [((0, 100), ORIGIN)])
    assert sources(route, 0) == ["s1:1", "trainer:1"]
    assert sources(route, 1) == ["s9:1", "s1:2", "trainer:1"]


def test_stripes_cover_every_byte_once_in_whole_units() -> None:
    assert stripes(1000, 3, 64) == [(0, 320), (320, 640), (640, 1000)]
    assert stripes(100, 4, 64) == [(0, 64), (64, 100)]


@pytest.mark.parametrize(
    ("num_bytes", "workers", "expected"),
    [(64 << 20, 1, 1 << 20), (64 << 20, 16, 256 << 10), (1 << 20, 64, 128 << 10), (14 << 30, 512, 1 << 20)],
)
def test_bucket_is_small_in_a_long_chain(num_bytes: int, workers: int, expected: int) -> None:
    assert bucket_bytes(1 << 20, num_bytes, workers) == expected


def test_cost_of_chain_and_star_by_hand() -> None:
    """64 MB at 8 MB/s: 8 s, and for each further server the time of a bucket of 0.25 MB and a hop."""
    wire = LinkSpeed(bytes_per_s=8e6, hop_s=0.01)
    assert chain_s(64e6, 16, wire, bucket=0.25e6) == pytest.approx(8 + 15 * (0.25 / 8 + 0.01))
    assert star_s(64e6, 16, wire) == pytest.approx(128)
    assert chain_s(64e6, 1, wire, bucket=0.25e6, stripes=4) == pytest.approx(2)


def test_last_servers_are_the_end_of_every_stripes_chain() -> None:
    origins = [((0, 50), ORIGIN), ((50, 100), Address("rank1", 1))]
    routes = chain([[worker(i)] for i in range(3)], origins, num_last=1)
    assert [sources(route, part=0)[0] for route in routes] == ["trainer:1", "s0:1", "s1:1"]
    assert [sources(route, part=1)[0] for route in routes] == ["s1:1", "rank1:1", "s0:1"]


def test_chains_of_stripes_go_node_by_node_wherever_they_begin() -> None:
    servers = [[Address(node, number)] for number in (1, 2, 3) for node in "ab"]
    origins = [((10 * stripe, 10 * stripe + 10), Address("trainer", stripe)) for stripe in range(3)]
    routes = chain(servers, origins)
    for stripe, head in enumerate(["a:1", "a:3", "b:2"]):  # in the order of nodes: a:1, a:2, a:3, b:1, b:2, b:3
        before = {str(server[0]): sources(route, part=stripe)[0] for server, route in zip(servers, routes, strict=True)}
        assert before[head] == f"trainer:{stripe}"
        assert sum(source[0] not in (server[0], "t") for server, source in before.items()) == 1
