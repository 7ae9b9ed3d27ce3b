"""How many rollouts the table lets run, and which piece of work it blames when a worker dies."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from pipelinerl.actor.messages import GroupFinished, Servers, StartGroup
from pipelinerl.actor.work import Work, WorkTable
from pipelinerl.actor.worker_pool import Lost
from tests.scripted_actor import ScriptedWorkers


class BusyWorkers:
    """Workers with this many rollouts."""

    def __init__(self, num_rollouts: int):
        self.num_rollouts = num_rollouts

    def set_servers(self, servers: Servers) -> None: ...
    def start(self, start: StartGroup) -> None: ...
    def cancel(self, task_id: int) -> None: ...
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
    assert table.share_free(math.inf) == pytest.approx(8 / 13)
    assert table.share_free(10) == pytest.approx(5 / 10)
    assert table.share_free(4) == 0
    workers.num_rollouts = 0
    assert table.has_room(64)  # a group larger than that runs alone


class Fragile(ScriptedWorkers):
    """One worker. At every poll all of its work ends, or the worker dies if one of ``killers`` runs."""

    def __init__(self, killers: set[int]):
        super().__init__(lambda start: None)
        self.killers = killers

    def poll(self, timeout_s: float) -> Sequence[GroupFinished | Lost]:
        task_ids = tuple(self.running)
        dies = any(start.problem["i"] in self.killers for start in self.running.values())
        self.running.clear()
        if dies:
            return [Lost(task_ids=task_ids, exit_code=-9)]
        return [GroupFinished(task_id=task_id, rollouts=(), failures=()) for task_id in task_ids]


def piece(number: int) -> Work:
    start = StartGroup(
        group_id=str(number), domain=0, problem={"i": number}, attempts=(0,), evaluation=False, version=0
    )
    return Work(start=start)


def rounds_until_all_ended(table: WorkTable, num: int, tries: int) -> tuple[int, Counter[str], Counter[str]]:
    """Polls until every piece has ended or has been blamed so often.

    Returns the number of polls, and how often each piece has ended and has been blamed.
    """
    ended, blamed = Counter[str](), Counter[str]()
    for rounds in range(1, 1000):
        for work, outcome in table.poll(0):
            name = work.start.group_id
            if not outcome.failures:
                ended[name] += 1
            elif (blamed.update([name]) or blamed[name]) < tries:  # type: ignore[func-returns-value]
                table.submit(work)
        if len(ended) + sum(count == tries for count in blamed.values()) == num:
            return rounds, ended, blamed
    raise AssertionError((ended, blamed))


@pytest.mark.parametrize("killers", [{index} for index in range(32)] + [{0, 31}, {7, 8, 20}])
def test_work_that_kills_is_found_among_32_without_running_them_one_by_one(killers: set[int]) -> None:
    table = WorkTable(Fragile(killers), rollouts_per_server=100)
    for number in range(32):
        table.submit(piece(number))
    rounds, ended, blamed = rounds_until_all_ended(table, 32, tries=3)
    assert ended == {str(number): 1 for number in range(32) if number not in killers}
    assert blamed == {str(number): 3 for number in killers}
    assert rounds <= 10 + 11 * len(killers), rounds  # one by one: 33 + 2 for every killer


def test_work_of_a_worker_that_died_by_accident_is_blamed_for_nothing() -> None:
    workers = Fragile({5})
    table = WorkTable(workers, rollouts_per_server=100)
    for number in range(32):
        table.submit(piece(number))
    assert table.poll(0) == []
    workers.killers.clear()
    rounds, ended, blamed = rounds_until_all_ended(table, 32, tries=1)
    assert (rounds, len(ended), blamed) == (2, 32, {})  # 16 at once, then the rest


def test_work_cancelled_while_it_is_suspect_does_not_come_back() -> None:
    table = WorkTable(workers := Fragile({5}), rollouts_per_server=100)
    for number in range(8):
        table.submit(piece(number))
    assert table.poll(0) == []
    table.cancel(Work)
    assert table.poll(0) == []
    assert workers.running == {}
    assert list(table.all_of(Work)) == []
