"""How many rollouts the table lets run: as many as the servers say that they take."""

from collections.abc import Sequence

from pipelinerl.actor.messages import GroupFinished, Servers, StartGroup
from pipelinerl.actor.work import WorkTable
from pipelinerl.actor.workers import Lost


class BusyWorkers:
    """Workers with this many rollouts."""

    def __init__(self, num_rollouts: int):
        self.num_rollouts = num_rollouts

    def set_servers(self, servers: Servers) -> None: ...
    def start(self, start: StartGroup) -> None: ...
    def cancel(self, ticket: int) -> None: ...
    def poll(self, timeout_s: float) -> Sequence[GroupFinished | Lost]:
        return ()


def test_room_is_the_sum_of_what_each_server_takes() -> None:
    workers = BusyWorkers(5)
    table = WorkTable(workers, rollouts_per_server=10)
    urls = {"adapts": "http://a", "silent": "http://b", "leaves": "http://c"}
    serving = dict.fromkeys(urls, 0)
    told = {"adapts": 3, "leaves": 100}
    table.set_servers(Servers(version=0, urls=urls, serving=serving, draining=("leaves",), capacities=told))
    assert table.has_room(8)  # 5 run, and 3 + 10 fit
    assert not table.has_room(9)
    workers.num_rollouts = 0
    assert table.has_room(64)  # a group larger than that runs alone
