"""Problems that a sampler draws: what it is told, how its weights are followed, and what restarts make of it."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.actor import sampling
from pipelinerl.actor.problems import Place, ProblemSource
from pipelinerl.actor.progress import ActorProgress, load_snapshot, save_snapshot
from pipelinerl.actor.resume import order_resumed
from pipelinerl.actor.sampling import Pool, ProblemSampler, try_sampler
from pipelinerl.config.load import compose, parse
from pipelinerl.errors import DomainError
from pipelinerl.records import GroupOutcome, TrainingResumed, outcome_of
from pipelinerl.records.order import OrderFold
from tests.actor_stage import ended_group
from tests.says import says

PROBLEMS: list[dict[str, Any]] = [{"i": i} for i in range(7)]
ROUND = 3


def unsolved(pool: Pool, *, rest: float = 0.25) -> np.ndarray:
    return np.where(pool.success_N == 1.0, rest, 1.0)


def fixed(*weights: float) -> Callable[[Pool], list[float]]:
    return lambda pool: list(weights)


def sampler_of(function: Callable[..., Any], num_problems: int = 7, size: int = ROUND, **kwargs: int) -> ProblemSampler:
    return ProblemSampler(PROBLEMS[:num_problems], function, size=size, seed=1, name="d", **kwargs)


def progress_of(function: Callable[..., Any] = unsolved, actor: int = 0, num_actors: int = 1) -> ActorProgress:
    sampler = sampler_of(function, actor=actor, num_actors=num_actors)
    source = ProblemSource(num_problems=7, seed=1, name="d", actor=actor, num_actors=num_actors, sampler=sampler)
    return ActorProgress({"d": source})


def group(place: Place, index: int, rewards: tuple[float, ...], *, size: int = ROUND, version: int = 0) -> Any:
    return ended_group(place, index, rewards, epoch_size=size, dispatched_version=version)


def test_sampler_is_told_means_in_which_the_newest_group_counts_half() -> None:
    told: list[Pool] = []
    progress = progress_of(lambda pool: told.append(pool) or np.ones(7))
    place = Place(epoch=0, position=0, problem_index=2)
    progress.apply(group(place, 0, (1.0, 0.0), version=3))  # success ½, spread ½
    progress.apply(group(place, 1, (2.0, -1.0, 2.0, 1.0), version=5))  # ¾, mean 1: (1 + 2 + 1 + 0)/4 = 1
    progress.apply(group(Place(epoch=0, position=1, problem_index=4), 2, ()))
    progress.apply(group(Place(epoch=0, position=2, problem_index=4), 3, (1.0, float("nan")), version=9))
    progress.sources["d"].next_problem()
    (pool,) = told
    assert pool.problems == PROBLEMS
    assert pool.groups_N.tolist() == [0, 0, 2, 0, 2, 0, 0]
    assert (pool.success_N[2], pool.spread_N[2]) == (0.625, 0.75)
    assert pool.version_N.tolist() == [-1, -1, 5, -1, -1, -1, -1]
    assert pool.version == 5
    assert np.isnan(pool.success_N[[0, 1, 3, 4, 5, 6]]).all()
    assert np.isnan(pool.spread_N[[0, 1, 3, 4, 5, 6]]).all()


def test_draws_follow_the_weights() -> None:
    """One of three per round, weights 1 : 3 : 0. The standard deviation of the share is √(¾·¼/2000) = 0.0097."""
    sampler = sampler_of(fixed(1, 3, 0), num_problems=3, size=1)
    drawn = Counter(sampler.draw(number)[0] for number in range(2000))
    assert drawn[2] == 0
    assert drawn[1] / 2000 == pytest.approx(0.75, abs=0.04)
    assert sampler.pool_size == pytest.approx(16 / 10)


def test_round_repeats_no_problem_while_one_with_a_weight_is_left() -> None:
    assert all(len(set(sampler_of(fixed(*[1] * 7)).draw(number))) == ROUND for number in range(50))
    assert sorted(sampler_of(fixed(0, 1, 0, 0, 5, 0, 0)).draw(0)) in ([1, 1, 4], [1, 4, 4])
    assert sorted(sampler_of(fixed(*[1] * 7), size=100).draw(0)) == list(range(7)), "no more than there are"
    assert sorted(sampler_of(fixed(*[0] * 7), size=7).draw(0)) == list(range(7)), "no weight at all: all alike"


def test_weights_that_differ_beyond_what_their_sum_can_hold_are_followed() -> None:
    assert sampler_of(fixed(*[1e308] * 7), size=7).pool_size == pytest.approx(7)
    assert sorted(sampler_of(fixed(*[1e308] * 7), size=7).draw(0)) == list(range(7))
    assert sampler_of(fixed(1e300, *[1e-300] * 6)).draw(0) == (0, 0, 0), "the others have no share"


def test_problems_that_left_the_pool_are_not_drawn_until_all_have() -> None:
    sampler = sampler_of(fixed(*[1] * 7), size=5)
    assert {index for number in range(20) for index in sampler.draw(number, removed={0, 3})} == {1, 2, 4, 5, 6}
    assert sampler.draw(0, removed=set(range(7))) == ()
    progress = progress_of()
    source = progress.sources["d"]
    for index in range(7):
        source.remove(index)
    assert source.next_problem().epoch == 0
    assert not source.removed


@pytest.mark.parametrize("actor", [0, 1])
def test_actors_draw_their_own_problems_at_their_own_places(actor: int) -> None:
    source = progress_of(actor=actor, num_actors=2).sources["d"]
    places = [source.next_problem() for _ in range(40)]
    assert {place.problem_index for place in places} == set(range(actor, 7, 2))
    assert [(place.epoch, place.position) for place in places[:4]] == [
        (0, actor),
        (0, actor + 2),
        (0, actor + 4),
        (1, actor),
    ]


def test_two_domains_keep_their_histories_apart() -> None:
    sources = {
        name: ProblemSource(
            num_problems=7,
            seed=1,
            name=name,
            sampler=ProblemSampler(PROBLEMS, unsolved, {"rest": 0.0}, size=ROUND, seed=1, name=name),
        )
        for name in ("d", "e")
    }
    progress = ActorProgress(sources)
    for index in range(6):
        progress.apply(group(Place(epoch=0, position=index, problem_index=index), index, (1.0, 1.0), size=7))
    assert {sources["d"].next_problem().problem_index for _ in range(9)} == {6}
    assert len({sources["e"].next_problem().problem_index for _ in range(9)}) > 3


def rewards_of(index: int) -> tuple[float, ...]:
    return ((1.0, 1.0), (1.0, 0.0), (0.0, 0.0), ())[index % 4]


@pytest.mark.parametrize("cut", range(12))
def test_restart_draws_what_an_undisturbed_actor_would_have_drawn(cut: int, tmp_path: Path) -> None:
    """The process ends after ``cut`` groups, with two under way. Its snapshot is newer than their round."""

    def often(pool: Pool) -> np.ndarray:
        return 1.0 + 20 * (pool.groups_N % 2)

    def play(progress: ActorProgress, records: list[Any], until: int, folder: Path) -> None:
        under_way: list[Place] = []
        while len(records) < until:
            while len(under_way) < 3:
                under_way.append(progress.sources["d"].next_problem())
                if progress.epoch_began:
                    save_snapshot(folder, progress.snapshot(offset=len(records)))
            place = under_way.pop(0)
            record = group(place, len(records), rewards_of(place.problem_index + place.epoch))
            records.append(record)
            progress.apply(record)
            if len(records) % 2:
                save_snapshot(folder, progress.snapshot(offset=len(records)))

    undisturbed: list[Any] = []
    play(progress_of(often), undisturbed, 30, tmp_path / "undisturbed")
    records: list[Any] = []
    play(progress_of(often), records, cut, tmp_path)
    restarted, snapshot = progress_of(often), load_snapshot(tmp_path)
    if snapshot is not None:
        restarted.restore(snapshot)
    for record in records[snapshot.offset if snapshot else 0 :]:
        restarted.apply(record)
    restarted.forget_in_flight()
    play(restarted, records, 30, tmp_path)
    assert records == undisturbed


def test_round_of_a_data_set_that_has_shrunk_is_drawn_again() -> None:
    """The last of seven problems was to be next, of which three are left."""
    before = progress_of(fixed(0, 0, 0, 0, 0, 0, 1)).sources["d"]
    assert before.next_problem().problem_index == 6
    after = ProblemSource(num_problems=3, seed=1, name="d", sampler=sampler_of(fixed(0, 0, 1), num_problems=3))
    after.restore(next_epoch=before.next_epoch, progress=before.progress(), removed=())
    assert [after.next_problem().problem_index for _ in range(4)] == [2] * 4


@pytest.mark.parametrize("seed", range(10))
def test_resume_from_a_checkpoint_knows_what_was_trained_and_repeats_no_place(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    progress, fold = progress_of(), OrderFold()
    trained: list[tuple[int, int]] = []
    under_way: list[Place] = []
    at_checkpoint = rng.randrange(1, 40)
    for index in range(at_checkpoint + rng.randrange(20)):
        under_way += [progress.sources["d"].next_problem() for _ in range(rng.randrange(1, 3))]
        place = under_way.pop(rng.randrange(len(under_way)))
        record = group(place, index, rewards_of(rng.randrange(4)), version=index)
        progress.apply(record)
        if index < at_checkpoint:
            fold.mark_resolved("d", place.epoch, place.position, ROUND)
            fold.observe("d", outcome_of(record))
            trained.append((place.epoch, place.position))
            expected = progress.snapshot(offset=0).domains["d"].history
    save_snapshot(tmp_path / "actor_0", progress.snapshot(offset=7))
    message = TrainingResumed(step=6, repeated=0, orders={0: fold.to_record()})
    opening = order_resumed(message, tmp_path, job="actor_0", actor=0, num_actors=1, batch_size=8)
    again = progress_of()
    again.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(opening), type=type(opening)))
    again.forget_in_flight()
    source = again.sources["d"]
    assert source.sampler is not None
    assert source.sampler.history() == expected
    last = max(epoch for epoch, _ in trained) + 1
    made: list[tuple[int, int]] = []
    while (place := source.next_problem()).epoch <= last:
        assert source.size_of(place.epoch) == ROUND
        made.append((place.epoch, place.position))
        again.apply(group(place, len(made), (1.0, 0.0)))
    assert sorted(trained + made) == [(epoch, turn) for epoch in range(last + 1) for turn in range(ROUND)]


def test_history_of_a_checkpoint_is_json() -> None:
    fold = OrderFold()
    fold.observe("d", GroupOutcome(problem_index=5))
    fold.observe("d", GroupOutcome(problem_index=2, success=0.5, spread=0.25, version=3))
    fold.count(["d"])
    record = fold.to_record()
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record
    assert b'"history":{"5":[1,null,null,-1],"2":[1,0.5,0.25,3]}' in msgspec.json.encode(record)


def test_sampler_that_does_not_return_is_logged_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logged = threading.Event()

    def warning(text: str) -> None:
        said.append(text)
        logged.set()

    monkeypatch.setattr(sampling, "SLOW_S", 0.01)
    monkeypatch.setattr(sampling.log, "warning", warning)
    sampler_of(lambda pool: [float(logged.wait(60.0))] * 7).draw(0)
    assert said == ["event=sampler_slow domain=d no group starts while it runs"]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda pool: 1 / 0, ["ZeroDivisionError", "test_sampling.py"]),
        (lambda pool: pool.success_N, ["finite", 7, "nan"]),
        (lambda pool: np.ones(6), [7, "(6,)"]),
        (lambda pool: -np.ones(7), [7, "-1.0"]),
    ],
)
def test_sampler_without_weights_is_an_error_that_names_the_key(function: Callable[..., Any], told: list[Any]) -> None:
    with pytest.raises(DomainError, match=says("`actor.sampler`", *told)):
        progress_of(function).sources["d"].next_problem()


def config(*overrides: str) -> Any:
    return parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", *overrides]))


def blind(pool: Pool) -> np.ndarray:
    """Works until a problem was solved."""
    return np.where(np.nan_to_num(pool.success_N) == 1.0, -1.0, 1.0)


def test_sampler_is_tried_before_the_start() -> None:
    mine = "actor.sampler=tests.unit.actor.test_sampling"
    try_sampler(config(f"{mine}.unsolved", "+actor.sampler_kwargs.rest=0.5"), "d", PROBLEMS)
    try_sampler(config(), "d", PROBLEMS)
    for overrides, told in (
        ([f"{mine}.missing"], ["`actor.sampler`", "'missing'"]),
        ([f"{mine}.unsolved", "+actor.sampler_kwargs.rust=1"], ["(pool, **actor.sampler_kwargs)", "'rust'"]),
        ([f"{mine}.blind"], ["finite", "-1.0"]),
    ):
        with pytest.raises(DomainError, match=says(*told)):
            try_sampler(config(*overrides), "d", PROBLEMS)
