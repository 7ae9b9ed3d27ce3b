"""The limit of rollouts follows a simulated server: its cache fills as rollouts grow, and a full one costs work."""

import math

import numpy as np
import pytest

from pipelinerl.actor.messages import Servers
from pipelinerl.actor.servers import InferenceServer, ServerLoads
from pipelinerl.actor.work import WorkTable
from pipelinerl.config.servers import FIRST_ROLLOUTS, MOST_ROLLOUTS
from pipelinerl.inference.admission import Admission, Load
from tests.unit.actor.test_work import BusyWorkers

LOOK_S = 2
TOKENS_PER_S = 50


class FakeServer:
    """Rollouts grow by `TOKENS_PER_S` tokens a second. When the cache is full, the newest lose theirs and wait."""

    def __init__(self, cache_tokens: int, mean_length: float, seed: int):
        self.cache_tokens, self.mean_length = cache_tokens, mean_length
        self.rng = np.random.default_rng(seed)
        self.have = self.length = np.zeros(0)  # of those that run, the oldest first
        self.waiting = np.zeros(0)  # lengths
        self.finished = self.preempted = 0
        self.made = self.lost = 0.0
        """Tokens of finished rollouts, and tokens computed in vain."""

    @property
    def rollouts(self) -> int:
        return len(self.have) + len(self.waiting)

    def assign(self, new: int) -> None:
        lengths = self.rng.lognormal(math.log(self.mean_length) - 0.32, 0.8, new)  # of this mean
        self.waiting = np.concatenate([self.waiting, np.maximum(lengths, TOKENS_PER_S)])

    def second(self) -> None:
        if self.have.sum() < 0.95 * self.cache_tokens:
            self.length = np.concatenate([self.length, self.waiting])
            self.have = np.concatenate([self.have, np.zeros(len(self.waiting))])
            self.waiting = np.zeros(0)
        self.have = self.have + TOKENS_PER_S
        fits = np.cumsum(self.have) <= self.cache_tokens
        self.preempted += int((~fits).sum())
        self.lost += float(self.have[~fits].sum())
        self.waiting = np.concatenate([self.waiting, self.length[~fits]])
        ends = self.have >= self.length
        self.finished += int((fits & ends).sum())
        self.made += float(self.length[fits & ends].sum())
        self.have, self.length = self.have[fits & ~ends], self.length[fits & ~ends]

    def load(self, before: tuple[int, int]) -> Load:
        return Load(
            kv_use=float(self.have.sum() / self.cache_tokens),
            running=len(self.have),
            waiting=len(self.waiting),
            finished=self.finished - before[0],
            preempted=self.preempted - before[1],
        )


def simulate(server: FakeServer, seconds: int, limit: int | None = None) -> tuple[list[int], list[float]]:
    """Limits and uses of the cache over time. ``limit``: a fixed one."""
    admission, limits, uses, before = Admission(), [], [], (0, 0)
    for second in range(seconds):
        server.assign(max((admission.rollouts if limit is None else limit) - server.rollouts, 0))
        server.second()
        if second % LOOK_S == 0:
            load = server.load(before)
            before = (server.finished, server.preempted)
            admission = admission.after(load)
            limits.append(admission.rollouts)
            uses.append(load.kv_use)
    return limits, uses


@pytest.mark.parametrize(("cache_tokens", "mean_length"), [(200_000, 1000), (60_000, 2000), (1_000_000, 8000)])
def test_cache_is_used_and_little_is_computed_twice(cache_tokens: int, mean_length: float) -> None:
    server = FakeServer(cache_tokens, mean_length, seed=0)
    turn = mean_length / TOKENS_PER_S
    limits, uses = simulate(server, int(100 * turn))
    late = len(limits) // 2
    assert 0.65 < np.mean(uses[late:]) < 0.95
    assert server.lost < 0.06 * server.made
    assert max(limits[late:]) < 2.5 * min(limits[late:])


def test_it_makes_as_much_as_the_best_fixed_number_and_follows_a_change() -> None:
    def made(limit: int | None) -> float:
        server = FakeServer(100_000, 1000, seed=1)
        simulate(server, 3000, limit)
        return server.made

    best = max(made(limit) for limit in (32, 64, 128, 160, 192, 256, 512))
    assert made(None) > 0.8 * best
    server = FakeServer(400_000, 1000, seed=2)
    limits, _ = simulate(server, 2000)
    server.mean_length = 4000
    lower, _ = simulate(server, 6000)
    assert np.mean(lower[len(lower) // 2 :]) < 0.5 * np.mean(limits[len(limits) // 2 :])


async def test_64_servers_of_three_sizes_each_get_what_their_cache_holds() -> None:
    attempts, seconds = 8, 400
    sizes = [50_000, 100_000, 200_000]
    fakes = {f"actor_llm_{index}": FakeServer(sizes[index % 3], 1000, seed=index) for index in range(64)}
    admissions, before = dict.fromkeys(fakes, Admission()), dict.fromkeys(fakes, (0, 0))
    uses: dict[str, list[float]] = {name: [] for name in fakes}
    seen: dict[str, InferenceServer] = {}
    pool, table = ServerLoads(), WorkTable(workers := BusyWorkers(0), FIRST_ROLLOUTS)
    urls, serving = {name: f"http://{name}" for name in fakes}, dict.fromkeys(fakes, 0)
    for second in range(seconds):
        capacities = {name: admission.rollouts for name, admission in admissions.items()}
        table.set_servers(Servers(version=0, urls=urls, serving=serving, capacities=capacities))
        pool.update(urls, serving, capacities=capacities)
        for server in seen.values():
            server.load = fakes[server.name].rollouts
        workers.num_rollouts = sum(fake.rollouts for fake in fakes.values())
        while table.has_room(attempts):
            chosen = await pool.choose(0)
            seen[chosen.name] = chosen
            chosen.load += attempts
            workers.num_rollouts += attempts
            fakes[chosen.name].assign(attempts)
        for name, fake in fakes.items():
            fake.second()
            if second % LOOK_S == 0:
                load, before[name] = fake.load(before[name]), (fake.finished, fake.preempted)
                admissions[name] = admissions[name].after(load)
                uses[name].append(load.kv_use)
    late = seconds // LOOK_S // 2
    mean_use = {name: np.mean(use[late:]) for name, use in uses.items()}
    assert min(mean_use.values()) > 0.55
    assert max(mean_use.values()) < 0.97
    assert sum(fake.lost for fake in fakes.values()) < 0.06 * sum(fake.made for fake in fakes.values())
    made = [sum(fake.made for fake in fakes.values() if fake.cache_tokens == size) for size in sizes]
    assert 1.6 < made[1] / made[0] * 22 / 21 < 2.4  # work in proportion to the cache (22 of the smallest)
    assert 1.6 < made[2] / made[1] < 2.4


def test_a_finished_rollout_lets_a_used_limit_grow() -> None:
    first = Admission()
    assert first.after(Load(kv_use=0.2, running=FIRST_ROLLOUTS, finished=8)).limit == FIRST_ROLLOUTS + 8
    later = Admission(limit=100.0, is_first_climb=False)
    assert later.after(Load(kv_use=0.2, running=100, finished=100)).limit == pytest.approx(110)
    assert later.after(Load(kv_use=0.2, running=49, finished=100)).limit == 100  # unused
    assert later.after(Load(kv_use=0.84, running=50, waiting=10, finished=100)).limit == pytest.approx(110)
    assert later.after(Load(kv_use=0.9, running=100, finished=100)).limit == 100  # nearly full
    assert (
        later.after(Load(kv_use=0.2, running=80, waiting=20, finished=100)).limit == 100
    )  # they wait for something else
    assert Admission(limit=MOST_ROLLOUTS).after(Load(running=MOST_ROLLOUTS, finished=99)).limit == MOST_ROLLOUTS


def test_a_full_cache_lowers_the_limit_once_a_turn() -> None:
    full = Load(kv_use=0.97, running=90, waiting=10)
    lowered = Admission(limit=100.0).after(full)
    assert (lowered.limit, lowered.is_first_climb) == (80, False)
    assert lowered.after(full).limit == lowered.limit
    waited = lowered.after(Load(kv_use=0.9, running=80, finished=80))
    assert waited.after(full).limit == pytest.approx(64)
    assert Admission(limit=1.0).after(Load(kv_use=1.0, running=1, preempted=3)).rollouts == 1


def test_turns_that_passed_unseen_do_not_grow_the_limit_beyond_twofold() -> None:
    short = Load(kv_use=0.3, running=32, finished=800)  # 25 turns of 32 between two looks
    assert Admission(limit=32.0).after(short).rollouts == 64
    assert Admission(limit=32.0, is_first_climb=False).after(short).rollouts == 64
