"""Problem order, pools, mixing, and what a restart makes of them."""

from collections import Counter
from pathlib import Path

import pytest

from pipelinerl.actor.problems import Place, ProblemSource, epoch_places
from pipelinerl.actor.progress import SNAPSHOT_FILE, ActorProgress, load_snapshot, save_snapshot
from pipelinerl.errors import CorruptStreamError, DomainError
from pipelinerl.records import GroupDropped, RolloutGroup
from tests.actor_stage import ended_group
from tests.says import says


def source(num_problems: int = 10, **kwargs: int) -> ProblemSource:
    return ProblemSource(num_problems=num_problems, seed=kwargs.pop("seed", 0), name="d", **kwargs)


def test_epoch_holds_every_problem_once_and_the_next_is_ordered_differently() -> None:
    places = source()
    first, second = [[places.next_problem() for _ in range(10)] for _ in range(2)]
    assert sorted(place.problem_index for place in first) == list(range(10))
    assert sorted(place.problem_index for place in second) == list(range(10))
    assert [place.problem_index for place in first] != [place.problem_index for place in second]
    assert [(place.epoch, place.position) for place in second] == [(1, i) for i in range(10)]


def test_order_depends_on_the_seed_and_on_nothing_else() -> None:
    firsts = [[source(seed=seed).next_problem() for _ in range(1)] for seed in (3, 3)]
    assert firsts[0] == firsts[1]
    orders = {
        tuple(
            p.problem_index for p in epoch_places(num_problems=20, seed=seed, name="d", epoch=0, actor=0, num_actors=1)
        )
        for seed in range(5)
    }
    assert len(orders) == 5


@pytest.mark.parametrize("actors", [2, 3])
def test_actors_split_an_epoch_without_overlap(actors: int) -> None:
    parts = [
        epoch_places(num_problems=11, seed=1, name="d", epoch=4, actor=i, num_actors=actors) for i in range(actors)
    ]
    assert sorted(place.problem_index for part in parts for place in part) == list(range(11))
    assert sorted(place.position for part in parts for place in part) == list(range(11))


def test_fewer_problems_than_actors_is_refused() -> None:
    with pytest.raises(DomainError, match=says(1, "world.replicas=2")):
        source(1, num_actors=2)


def test_removed_problem_leaves_from_the_next_epoch_on() -> None:
    places = source(4)
    first = places.next_problem()
    places.remove(2)
    rest = [places.next_problem() for _ in range(3)]
    assert sorted(place.problem_index for place in [first, *rest]) == [0, 1, 2, 3]
    assert sorted(places.next_problem().problem_index for _ in range(3)) == [0, 1, 3]
    assert places.next_problem().epoch == 2


def test_empty_pool_begins_anew_with_all_problems() -> None:
    places = source(2)
    for _ in range(2):
        places.remove(places.next_problem().problem_index)
    assert sorted(places.next_problem().problem_index for _ in range(2)) == [0, 1]


def record(place: Place, index: int, *, success: float | None = 0.0) -> RolloutGroup | GroupDropped:
    return ended_group(place, index, () if success is None else (success,) * 2)


def test_restart_takes_what_was_not_resolved_and_then_goes_on(tmp_path: Path) -> None:
    progress = ActorProgress({"d": source(5)})
    places = [progress.sources["d"].next_problem() for _ in range(7)]  # two of them of the second epoch
    numbers = [progress.dispatch(2) for _ in places]
    assert numbers == list(range(7))
    save_snapshot(tmp_path, progress.snapshot(offset=0))
    resolved = [0, 2, 3, 6]
    records = [record(places[i], i, success=None if i == 3 else 0.0) for i in resolved]

    restarted = ActorProgress({"d": source(5)})
    snapshot = load_snapshot(tmp_path)
    assert snapshot is not None
    restarted.restore(snapshot)
    for item in records:
        restarted.apply(item)
    restarted.forget_in_flight()

    assert (restarted.before, restarted.published, restarted.dropped, restarted.dispatched) == (1, 6, 2, 8)
    again = [restarted.sources["d"].next_problem() for _ in range(3)]
    assert again == [places[1], places[4], places[5]]
    assert [restarted.dispatch(2) for _ in range(4)] == [1, 4, 5, 7]
    taken = Counter(
        place.problem_index for place in [*again, *(restarted.sources["d"].next_problem() for _ in range(3))]
    )
    assert sum(taken.values()) == 6


def test_snapshot_in_the_middle_gives_the_same_state_as_replaying_everything() -> None:
    def played(cut: int) -> ActorProgress:
        progress = ActorProgress({"d": source(3)}, no_positive_resampling=0.9)
        places = [progress.sources["d"].next_problem() for _ in range(8)]
        records = [record(places[i], i, success=float(places[i].problem_index == 0)) for i in (1, 0, 3, 2, 5, 7)]
        start = progress.snapshot(0)
        for item in records[:cut]:
            progress.apply(item)
        middle = progress.snapshot(cut) if cut else start
        again = ActorProgress({"d": source(3)}, no_positive_resampling=0.9)
        again.restore(middle)
        for item in records[cut:]:
            again.apply(item)
        again.forget_in_flight()
        return again

    states = [played(cut).snapshot(offset=6) for cut in range(7)]
    assert all(state == states[0] for state in states)
    assert states[0].domains["d"].removed == (0,)


def test_damaged_snapshot_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    save_snapshot(tmp_path, ActorProgress({"math": source(3)}).snapshot(offset=0))
    path = tmp_path / SNAPSHOT_FILE
    whole = path.read_bytes()
    flipped = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for content in (b"", b"\x81\xa1", whole[:-1], *flipped):
        path.write_bytes(content)
        with pytest.raises(CorruptStreamError, match="is damaged"):
            load_snapshot(tmp_path)
