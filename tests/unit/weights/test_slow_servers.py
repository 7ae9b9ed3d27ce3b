"""The whole policy on a simulated network: one or two slow servers among 4, 8 and 16, wherever they are."""

from collections.abc import Callable, Mapping
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.simulated_network import Network, Node, Stalls

RATE = float(8 << 20)
BAR, LEARNED, PUSHES = 1.3, 2, 5
FAST = 1e12
Slow = Mapping[int, tuple[str, int]]


def constant(rate: float) -> Callable[[float], float]:
    return lambda now: rate


def network(servers: int, mb: int, slow: Slow, stalls: Stalls | None = None) -> Network:
    nodes = []
    for place in range(servers):
        kind, factor = slow.get(place, ("", 1))
        up = RATE / factor if kind in ("uplink", "both") else RATE
        down = RATE / factor if kind in ("downlink", "both") else FAST
        nodes.append(Node(constant(up), constant(down)))
    return Network(nodes, mb << 20, RATE, stalls)


@cache
def without_s(servers: int, mb: int) -> float:
    return max(network(servers, mb, {}).push().values())


def later_s(made: Network, healthy: set[str], first: int = LEARNED, last: int = PUSHES) -> float:
    """The longest time that a healthy server took, from push ``first`` on."""
    pushes = [made.push() for _ in range(last)]
    assert all(healthy <= push.keys() for push in pushes)
    return max(push[name] for push in pushes[first:] for name in healthy)


@st.composite
def slow_servers(draw: st.DrawFn) -> tuple[int, int, dict[int, tuple[str, int]]]:
    servers = draw(st.sampled_from([4, 8, 16]))
    places = draw(st.lists(st.integers(0, servers - 1), min_size=1, max_size=2, unique=True))
    what = st.tuples(st.sampled_from(["uplink", "downlink", "both"]), st.sampled_from([4, 6, 10, 30]))
    return servers, draw(st.sampled_from([16, 24, 48])), {place: draw(what) for place in places}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=slow_servers())
@example(case=(8, 16, {0: ("uplink", 10)}))
@example(case=(4, 24, {0: ("both", 4), 1: ("downlink", 6)}))
@example(case=(4, 24, {1: ("downlink", 4)}))
@example(case=(4, 16, {0: ("downlink", 6), 1: ("downlink", 4)}))
@example(case=(8, 24, {4: ("both", 6), 0: ("downlink", 4)}))
def test_healthy_servers_are_as_fast_as_without_slow_ones_from_the_third_push_on(
    case: tuple[int, int, dict[int, tuple[str, int]]],
) -> None:
    servers, mb, slow = case
    healthy = {f"s{place}" for place in range(servers) if place not in slow}
    assert later_s(network(servers, mb, slow), healthy) <= BAR * without_s(servers, mb)


def later_over_without(servers: int, mb: int, slow: Slow, pause: float, pushes: int = 8) -> float:
    """The same with versions that do not wait for slow servers. ``pause``: times the seconds without slow ones."""
    made, usual = network(servers, mb, slow), without_s(servers, mb)
    healthy = {f"s{place}" for place in range(servers) if place not in slow}
    seconds = [made.push(awaited=healthy, pause_s=pause * usual) for _ in range(pushes)]
    assert not healthy & {*made.failures}
    return max(push[name] for push in seconds[LEARNED:] for name in healthy) / usual


@pytest.mark.parametrize(
    ("servers", "slow"),
    [(8, {0: ("downlink", 4)}), (8, {4: ("downlink", 10)}), (4, {0: ("both", 6), 3: ("uplink", 4)})],
)
def test_slow_server_that_joins_a_version_under_way_takes_nothing_from_the_others(servers: int, slow: Slow) -> None:
    """It still pulled the version before when this one came. The trainer's uplink is the chain's."""
    assert later_over_without(servers, 16, slow, pause=2.0) <= BAR


def test_server_that_was_held_up_by_a_slow_one_holds_up_nobody_itself() -> None:
    """Two versions were withdrawn before the second slow one had ended a pull of its own."""
    assert later_over_without(4, 16, {1: ("downlink", 10), 2: ("downlink", 10)}, pause=0.5) <= BAR


def test_slow_server_that_ends_a_version_late_has_nobody_judged_by_that_version_again() -> None:
    """Its report comes after the next version showed that server 5, behind the slow uplink, is healthy."""
    assert later_over_without(8, 24, {4: ("uplink", 4), 0: ("both", 10)}, pause=2.0) <= BAR


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(case=slow_servers(), pause=st.sampled_from([0.0, 0.5, 2.0]))
def test_versions_that_do_not_wait_for_slow_servers_are_as_fast_as_without_them_in_hundreds_of_networks(
    case: tuple[int, int, dict[int, tuple[str, int]]], pause: float
) -> None:
    assert later_over_without(*case, pause) <= BAR


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(case=slow_servers())
def test_healthy_servers_are_as_fast_as_without_slow_ones_in_hundreds_of_networks(
    case: tuple[int, int, dict[int, tuple[str, int]]],
) -> None:
    servers, mb, slow = case
    healthy = {f"s{place}" for place in range(servers) if place not in slow}
    assert later_s(network(servers, mb, slow), healthy) <= BAR * without_s(servers, mb)


def test_without_slow_servers_nobody_is_taken_for_slow() -> None:
    made = network(16, 16, {})
    assert [made.push()["s15"] for _ in range(3)] == pytest.approx([without_s(16, 16)] * 3)
    assert not any(client.standing.is_slow for client in made.clients)


def left_in_noise(servers: int, mb: int, seed: int) -> int:
    """How often a source was left in three updates. If it never was, the trainer sent each of them once.

    Processes stand still every three seconds on average, for up to half a second. In the update before it is not known
    yet how long one takes, so the first pullers may try the trainer.
    """
    made = network(servers, mb, {}, Stalls(seed, gap_s=3.0))
    made.push()
    made.left.clear()
    for _ in range(3):
        made.push()
        assert made.left or made.trainer_bytes == made.num_bytes
    return len(made.left)


@pytest.mark.parametrize(("servers", "mb", "seed"), [(4, 48, 1), (8, 16, 2), (16, 24, 3)])
def test_processes_that_stand_still_for_half_a_second_are_not_left(servers: int, mb: int, seed: int) -> None:
    assert left_in_noise(servers, mb, seed) == 0


@pytest.mark.slow
def test_processes_that_stand_still_are_left_once_in_a_thousand_pulls_of_two_hundred_networks() -> None:
    """Several of a path may stand still at once for longer than a puller is patient."""
    networks = [([4, 8, 16][seed % 3], [16, 24, 48][seed // 3 % 3], seed) for seed in range(200)]
    left = sum(left_in_noise(*network) for network in networks)
    assert left <= 1e-3 * sum(3 * servers for servers, _, _ in networks)


@pytest.mark.parametrize("slow", [{0: ("uplink", 4)}, {7: ("both", 10), 8: ("both", 4)}])
@pytest.mark.parametrize("mistaken", [(1, 3), (1, 3, 5, 6, 9, 10, 12, 15)])
def test_healthy_servers_that_were_taken_for_slow_are_back_soon(slow: Slow, mistaken: tuple[int, ...]) -> None:
    """As happens on a busy machine, which may have made some of them look slower than the slow ones."""
    made = network(16, 48, slow)
    for place in {*slow, *mistaken}:
        standing, (kind, factor) = made.clients[place].standing, slow.get(place, ("downlink", 2 + place))
        standing.gives_slowly, standing.takes_slowly = kind != "downlink", kind != "uplink"
        standing.limit = float(factor) if standing.takes_slowly else 0.0
    healthy = {f"s{place}" for place in range(16) if place not in slow}
    assert later_s(made, healthy, 2, 4) <= BAR * without_s(16, 48)


@pytest.mark.parametrize("kind", ["up", "down"])
def test_server_that_becomes_slow_within_a_push_is_last_and_later_well_again(kind: str) -> None:
    """Its link falls to a tenth after a second of the third push, and is repaired before the seventh."""
    made = network(8, 16, {})
    fast = made.nodes[2]
    usual = RATE if kind == "up" else FAST
    healthy = {f"s{place}" for place in range(8) if place != 2}
    for _ in range(2):
        made.push()
    setattr(fast, kind, lambda now: usual if now < 1 else RATE / 10)
    made.push()
    setattr(fast, kind, constant(RATE / 10))
    assert later_s(made, healthy, 1, 3) <= BAR * without_s(8, 16)
    assert made.clients[2].standing.is_slow
    setattr(fast, kind, constant(usual))
    for _ in range(2):
        made.push()
    assert not made.clients[2].standing.is_slow
    assert max(made.push().values()) <= BAR * without_s(8, 16)
