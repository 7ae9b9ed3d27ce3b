"""New streams go on behind a checkpoint: nothing that is resolved comes again, everything else does, in its order."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipelinerl.actor.problems import Place, ProblemSource
from pipelinerl.actor.progress import ActorProgress, load_snapshot, save_snapshot
from pipelinerl.actor.resume import earlier_evaluations, order_resumed
from pipelinerl.errors import CorruptStreamError
from pipelinerl.records import DataOrder, EvaluationDone, GroupDropped, TrainingResumed
from pipelinerl.records.order import DomainOrder, OrderFold
from pipelinerl.streams.epoch import EVALUATIONS_FILE
from tests.preprocess_kit import make_group

PROBLEMS, ATTEMPTS = 11, 4


def make_progress(actor: int, actors: int) -> ActorProgress:
    source = ProblemSource(num_problems=PROBLEMS, seed=5, name="d", actor=actor, num_actors=actors)
    return ActorProgress({"d": source}, None)


def resolved(place: Place, index: int, actor: int, size: int) -> GroupDropped:
    return GroupDropped(
        group_id=f"{place.epoch}-{place.position}",
        epoch=place.epoch,
        position=place.position,
        problem_index=place.problem_index,
        actor=actor,
        domain="d",
        dataset="train",
        attempts=ATTEMPTS,
        settled_before=0,
        dispatch_index=index,
        epoch_size=size,
        reason="test",
        detail="",
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_resolved_comes_again_and_nothing_twice(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    actors = rng.randint(1, 3)
    actor = rng.randrange(actors)
    progress, fold = make_progress(actor, actors), OrderFold()
    trained: list[tuple[int, int]] = []
    under_way: list[Place] = []
    for index in range(rng.randrange(60)):
        under_way.append(progress.sources["d"].next_problem())
        if len(under_way) > rng.randrange(6):
            place = under_way.pop(rng.randrange(len(under_way)))
            size = progress.sources["d"].size_of(place.epoch)
            progress.apply(resolved(place, index, actor, size))
            if index < 40:  # the checkpoint is older than the end of the old stream
                fold.mark_resolved("d", place.epoch, place.position // actors, size)
                trained.append((place.epoch, place.position))
    save_snapshot(tmp_path / "actor_0", progress.snapshot(offset=7))
    step = 6
    message = TrainingResumed(step=step, repeated=2, orders={actor: fold.to_record()})
    record = order_resumed(message, tmp_path, job="actor_0", actor=actor, num_actors=actors, batch_size=8)
    again = make_progress(actor, actors)
    again.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record)))
    again.forget_in_flight()
    assert again.published == again.dispatched == 8 * len(range(actor, step, actors))
    last = max((epoch for epoch, _ in trained), default=0) + 1
    made: list[tuple[int, int]] = []
    while (place := again.sources["d"].next_problem()).epoch <= last:
        made.append((place.epoch, place.position))
        again.apply(resolved(place, len(made), actor, again.sources["d"].size_of(place.epoch)))
    everything = [(epoch, position) for epoch in range(last + 1) for position in range(actor, PROBLEMS, actors)]
    assert sorted(trained + made) == everything


def test_a_batch_of_texts_is_paced_by_published_texts_and_the_mean_of_those_under_way(tmp_path: Path) -> None:
    """Two groups of two dispatched, one published with 3 and 5 texts: 8 + 2 · (8 / 2) = 16 are to be expected."""
    progress = ActorProgress({"d": ProblemSource(num_problems=3, seed=0, name="d")}, None, "texts")
    progress.dispatch(2)
    progress.dispatch(2)
    assert progress.expected_units == 4  # nothing is known: a text each
    group = make_group(np.random.default_rng(0), 0, version=0)
    rollouts = zip(group.rollouts, (3, 5), strict=False)
    played = tuple(msgspec.structs.replace(rollout, sequences=rollout.sequences * n) for rollout, n in rollouts)
    progress.apply(msgspec.structs.replace(group, rollouts=played, attempts=2))
    assert (progress.published, progress.units, progress.expected_units) == (2, 8, 16)
    save_snapshot(tmp_path, progress.snapshot(offset=1))
    again = ActorProgress({"d": ProblemSource(num_problems=3, seed=0, name="d")}, None, "texts")
    snapshot = load_snapshot(tmp_path)
    assert snapshot is not None
    again.restore(snapshot)
    again.forget_in_flight()
    assert (again.published, again.units, again.expected_units) == (2, 8, 8)

    order = DataOrder(domains={"d": DomainOrder(samples=20)})
    message = TrainingResumed(step=6, repeated=0, orders={0: order})
    again.apply(order_resumed(message, tmp_path, job="actor_0", actor=0, num_actors=1, batch_size=16))
    again.forget_in_flight()
    assert (again.published, again.units, again.expected_units) == (20, 96, 96)


def test_problems_that_left_the_pool_stay_away(tmp_path: Path) -> None:
    progress = make_progress(0, 1)
    first = progress.sources["d"].next_problem()
    progress.sources["d"].remove(first.problem_index)
    save_snapshot(tmp_path / "actor_0", progress.snapshot(offset=0))
    message = TrainingResumed(step=1, repeated=0, orders={0: DataOrder()})
    record = order_resumed(message, tmp_path, job="actor_0", actor=0, num_actors=1, batch_size=8)
    again = make_progress(0, 1)
    again.apply(record)
    assert first.problem_index not in [again.sources["d"].next_problem().problem_index for _ in range(PROBLEMS - 1)]


def test_evaluations_of_steps_that_are_taken_back_are_not_taken_over(tmp_path: Path) -> None:
    assert earlier_evaluations(tmp_path, 4) == []
    results = [EvaluationDone(version=v, success=0.1 * v, reward=0, num_rollouts=4, metrics={}) for v in (0, 4, 8)]
    (tmp_path / EVALUATIONS_FILE).write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in results))
    assert earlier_evaluations(tmp_path, 4) == results[:2]
    path = tmp_path / EVALUATIONS_FILE
    for content in (path.read_bytes()[:-9], path.read_bytes().replace(b"metrics", b"metr\xffcs")):
        path.write_bytes(content)
        with pytest.raises(CorruptStreamError, match=r"evaluations\.jsonl is damaged"):
            earlier_evaluations(tmp_path, 4)
