"""Places of the real server in the chain, and what is said about each number of servers."""

import pytest

from benchmarks.stall import STEPS, cases, placed, spread, summary_of
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.publish.dispatch import chained, in_order
from pipelinerl.weights.publish.links import LinkTable
from pipelinerl.weights.publish.servers import ServerClient
from pipelinerl.weights.publish.versions import PendingVersion
from pipelinerl.world import Job


def test_real_server_is_measured_alone_and_at_every_place() -> None:
    assert cases([1, 2, 4]) == [(1, "first"), (2, "first"), (2, "last"), *((4, p) for p in ("first", "last", "middle"))]


@pytest.mark.parametrize(("place", "before"), [("first", 0), ("middle", 7), ("last", 15)])
def test_real_server_of_sixteen_has_its_place_in_the_chain(place: str, before: int) -> None:
    real = placed(Job(name="actor_llm_0", kind="actor_llm"), 16, place)
    jobs = [real, *(Job(name=f"actor_llm_{n}", kind="actor_llm", replica_idx=n) for n in range(1, 16))]
    clients = [ServerClient(job, http=None) for job in jobs]  # type: ignore[arg-type]  # nobody is asked
    for port, client in enumerate(clients):
        client.workers = (Address("h", port),)
    pending = PendingVersion(1, Layout(()), stripes=((0, 1 << 20),))
    dispatches = chained(pending, in_order(clients, 0), LinkTable(), [Address("trainer", 0)], 1 << 20)
    order = [dispatch.client.name for dispatch in dispatches]
    assert order.index("actor_llm_0") == before


def test_numbers_of_servers_are_compared_over_all_places() -> None:
    def rows(*steps: float) -> list[dict[str, float]]:
        return [{STEPS: value} for value in steps]

    found = {(1, "first"): rows(0.4, 0.6), (4, "first"): rows(0.5, 0.7), (4, "last"): rows(0.9, 0.7)}
    one, four = summary_of(found)["servers"]
    assert (one["updates"], one["over_one"]) == (2, {"median": 1.0, "p90": 1.0})
    assert (four["updates"], four[STEPS]) == (4, {"median": 0.7, "p90": 0.7, "max": 0.9})
    assert four["over_one"] == {"median": 1.4, "p90": 1.75}


def test_spread_names_the_ninetieth_percentile() -> None:
    assert spread([float(n) for n in range(11)]) == {"median": 5.0, "p90": 9.0, "max": 10.0}
