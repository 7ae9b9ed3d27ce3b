"""The loop with scripted workers: mixing, capacity, failures, evaluation, the end."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pipelinerl.actor.messages import GroupFinished, StartGroup
from pipelinerl.actor.metrics import ActorMetrics, Reporter, evaluation_metrics
from pipelinerl.actor.problems import ProblemSource
from pipelinerl.actor.sampling import Pool, ProblemSampler
from pipelinerl.actor.worker_pool import Lost
from pipelinerl.errors import DomainError
from pipelinerl.observability.catalogue import ActorMetric
from pipelinerl.records import EvaluationDone, GroupDropped, ProbeMissed, RolloutGroup
from tests.actor_stage import ATTEMPTS, Stage, finished, rollout
from tests.says import says
from tests.scripted_actor import QuietStatus, ScriptedWorkers


def test_mix_of_what_is_published_meets_the_weights_although_one_domain_is_dropped() -> None:
    count = Counter[int]()

    def answer(start: StartGroup) -> GroupFinished:
        count[start.domain] += 1
        lost = start.domain == 0 and count[0] % 3 != 0
        return finished(start, failed=start.attempts if lost else (), reason="too_long")

    stage = Stage(answer, weights={"a": 3.0, "b": 1.0})
    stage.until(lambda: len(stage.records) >= 400)
    published = Counter(record.domain for record in stage.records if isinstance(record, RolloutGroup))
    assert published["a"] / published.total() == pytest.approx(0.75, abs=0.02)
    assert count[0] > 2 * published["a"]


class SeenStatus(QuietStatus):
    """Keeps what is waited for."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    @contextlib.contextmanager
    def waiting(self, what: str, on: str | None = None) -> Iterator[None]:
        self.waits.append(what)
        yield
        self.waits.remove(what)


def test_actor_waits_for_nobody_while_a_sampler_runs() -> None:
    """Else the watchdog would take what the actor waited for last for the one that holds the run up."""
    status, seen = SeenStatus(), list[list[str]]()
    stage = Stage(lambda start: None)
    stage.loop._reporter = Reporter(ActorMetrics(0.0), stage, status, 1000.0)  # type: ignore[arg-type]

    def sampler(pool: Pool) -> np.ndarray:
        seen.append(list(status.waits))
        return np.ones(7)

    drawing: dict[str, Any] = {"seed": 0, "name": "d"}
    stage.progress.sources["d"] = ProblemSource(
        num_problems=7, sampler=ProblemSampler([{}] * 7, sampler, size=7, **drawing), **drawing
    )
    waited: list[str] = []
    stage.trainer.version = None  # type: ignore[assignment]

    def starts() -> bool:
        waited.extend(status.waits)
        stage.trainer.version = 0 if waited else None  # type: ignore[assignment]
        return bool(stage.workers.started)

    stage.until(starts)
    assert waited[0] == "the first weights"
    assert seen == [[]]


def test_finished_groups_wait_for_the_domain_that_is_behind() -> None:
    """At 1:1 the fast domain may be one group ahead; the slow one's first group releases what waited for it."""
    stage = Stage(lambda start: finished(start) if start.domain == 0 else None, weights={"fast": 1.0, "slow": 1.0})
    stage.until(lambda: len(stage.workers.started) == 4 and not stage.workers.waiting)
    assert [record.domain for record in stage.records] == ["fast"]

    stage.workers.answer = finished
    stage.workers.waiting.extend(stage.workers.running.values())
    stage.until(lambda: len(stage.records) >= 4)
    assert [record.domain for record in stage.records[:4]] == ["fast", "slow", "fast", "slow"]


def test_samples_that_the_preprocessor_drops_are_made_up_for() -> None:
    stage = Stage(weights={"a": 1.0, "b": 1.0})

    def half_of_a_is_dropped() -> bool:
        published = Counter(record.domain for record in stage.records)
        stage.drops.samples["a"] = published["a"] * ATTEMPTS // 2
        return len(stage.records) >= 300

    stage.until(half_of_a_is_dropped)
    published = Counter(record.domain for record in stage.records)
    assert published["a"] / 2 == pytest.approx(published["b"], abs=4)
    assert stage.metrics[-1]["mix/a"] == pytest.approx(0.5, abs=0.02)


def test_domain_of_which_everything_is_dropped_holds_up_nobody() -> None:
    stage = Stage(
        lambda start: finished(start, failed=start.attempts if start.domain == 0 else (), reason="too_long"),
        weights={"broken": 1.0, "good": 1.0},
    )
    stage.until(lambda: sum(isinstance(record, RolloutGroup) for record in stage.records) >= 100)
    shares = Counter(record.domain for record in stage.records)
    assert shares["broken"] / shares["good"] == pytest.approx(4, rel=0.1)


def test_rollouts_under_way_never_exceed_the_servers_capacity() -> None:
    stage = Stage()
    stage.until(lambda: len(stage.records) >= 20)
    assert stage.workers.most_running == 8


def test_group_that_lost_a_member_is_completed_by_that_member_alone() -> None:
    def answer(start: StartGroup) -> GroupFinished:
        return finished(start, failed=(1,) if len(start.attempts) == ATTEMPTS else ())

    stage = Stage(answer)
    stage.until(lambda: len(stage.records) >= 3)
    group = stage.records[0]
    assert isinstance(group, RolloutGroup)
    assert [member.attempt for member in group.rollouts] == [0, 1]
    assert (1,) in [start.attempts for start in stage.workers.started]


def test_group_that_stays_incomplete_is_dropped_with_its_reason() -> None:
    stage = Stage(lambda start: finished(start, failed=(0,)))
    stage.until(lambda: len(stage.records) >= 1)
    dropped = stage.records[0]
    assert isinstance(dropped, GroupDropped)
    assert (dropped.reason, dropped.attempts, dropped.dispatch_index) == ("transport", 2, 0)
    tries = [start for start in stage.workers.started if start.group_id == dropped.group_id]
    assert [start.attempts for start in tries] == [(0, 1), (0,)]


def test_member_within_the_budget_is_left_out() -> None:
    stage = Stage(lambda start: finished(start, failed=(0,), reason="too_long"), max_failed_rollouts=1)
    stage.until(lambda: len(stage.records) >= 1)
    group = stage.records[0]
    assert isinstance(group, RolloutGroup)
    assert ([member.attempt for member in group.rollouts], group.attempts) == ([1], 2)


def test_drops_make_room_so_that_no_failure_starves_the_trainer() -> None:
    """Batch of 4 at bound 0: whatever is dropped, exactly 4 samples are published."""
    count = iter(range(10_000))
    stage = Stage(lambda s: finished(s, failed=s.attempts if next(count) % 5 else (), reason="too_long"), batch=4)
    stage.until(lambda: sum(len(r.rollouts) for r in stage.records if isinstance(r, RolloutGroup)) >= 4)
    before = len(stage.records)
    polls = iter(range(50))
    stage.stop = lambda: next(polls, None) is None
    stage.loop.run(stage.stop)
    assert len(stage.records) == before


@pytest.mark.parametrize("reason", ["domain_error", "no_trained_tokens"])
def test_failures_of_the_domain_beyond_the_budget_end_the_role(reason: str) -> None:
    stage = Stage(lambda start: finished(start, failed=start.attempts, reason=reason))
    with pytest.raises(DomainError, match=says(6, "failed", "actor.max_domain_errors=5", "d")):
        stage.until(lambda: False)


class Fragile(ScriptedWorkers):
    """The worker dies whenever problem 3 is in it."""

    def poll(self, timeout_s: float) -> Sequence[GroupFinished | Lost]:
        self.waiting.clear()
        running = list(self.running.values())
        self.running.clear()
        if any(start.problem["i"] == 3 for start in running):
            return [Lost(task_ids=tuple(start.task_id for start in running), exit_code=-11)]
        return [finished(start) for start in running]


def test_guilty_problem_is_found_although_others_die_with_it() -> None:
    """Only the problem that kills is dropped, the others are published."""
    stage = Stage()
    stage.workers.__class__ = Fragile
    stage.until(lambda: len({record.problem_index for record in stage.records}) == 7)
    dropped = {record.problem_index for record in stage.records if isinstance(record, GroupDropped)}
    assert dropped == {3}
    assert all(record.reason == "poisonous" for record in stage.records if isinstance(record, GroupDropped))


def test_evaluation_leaves_out_the_problem_that_kills_and_no_other() -> None:
    stage = Stage(tests=8, at_start=True)
    stage.workers.__class__ = Fragile
    stage.until(lambda: any(isinstance(message, EvaluationDone) for message in stage.announced))
    assert (stage.announced[-1].num_rollouts, stage.announced[-1].metrics["complete"]) == (7, 7 / 8)


def test_evaluation_counts_only_tokens_of_the_announced_version() -> None:
    stale = iter([7])

    def answer(start: StartGroup) -> GroupFinished:
        version = next(stale, start.version) if start.evaluation else start.version
        return GroupFinished(
            task_id=start.task_id, rollouts=tuple(rollout(i, version) for i in start.attempts), failures=()
        )

    stage = Stage(answer, tests=3, at_start=True)
    stage.until(lambda: any(isinstance(message, EvaluationDone) for message in stage.announced))
    done = stage.announced[-1]
    assert (done.version, done.num_rollouts, done.metrics["complete"]) == (0, 3, 1.0)
    assert len([start for start in stage.workers.started if start.evaluation]) == 4


def test_evaluation_failure_is_left_out_and_never_scored() -> None:
    def answer(start: StartGroup) -> GroupFinished:
        return finished(start, failed=start.attempts if start.evaluation and start.problem["i"] == 0 else ())

    stage = Stage(answer, tests=4, at_start=True)
    stage.until(lambda: any(isinstance(message, EvaluationDone) for message in stage.announced))
    done = stage.announced[-1]
    assert (done.success, done.num_rollouts, done.metrics["complete"]) == (1.0, 3, 0.75)


def test_evaluation_without_any_rollout_has_no_result() -> None:
    stage = Stage(
        lambda start: finished(start, failed=start.attempts if start.evaluation else ()), tests=3, at_start=True
    )
    stage.until(lambda: any(isinstance(message, EvaluationDone) for message in stage.announced))
    done = stage.announced[-1]
    assert (done.success, done.reward, done.num_rollouts) == (None, None, 0)
    assert evaluation_metrics(done) == {ActorMetric.EVAL_COMPLETE: 0.0}


def test_evaluation_every_n_versions_while_training_goes_on() -> None:
    stage = Stage(tests=2, every_n_versions=3, batch=4)

    def condition() -> bool:
        if len(stage.records) >= 2 * (stage.trainer.version + 1) and stage.trainer.version < 7:
            stage.trainer.version += 1
        return stage.trainer.version == 7 and len(stage.records) >= 16

    stage.until(condition)
    assert [m.version for m in stage.announced if isinstance(m, EvaluationDone)] == [3, 6]


def test_training_done_gives_up_groups_and_evaluates_the_last_version() -> None:
    stage = Stage(lambda start: finished(start) if start.evaluation else None, tests=2, at_end=True)
    polls = iter(range(200))

    def condition() -> bool:
        stage.trainer.training_done = True
        stage.trainer.version = 9
        return next(polls, None) is None

    stage.stop = condition
    stage.loop.run(stage.stop)
    assert [type(m).__name__ for m in stage.announced] == ["EvaluationStarted", "EvaluationDone"]
    assert stage.announced[-1].version == 9
    assert stage.records == []
    assert stage.workers.running == {}


def test_server_that_missed_its_probe_is_withdrawn_before_it_comes_back() -> None:
    stage = Stage()
    stage.loop._refresh()
    stage.trainer.misses = [ProbeMissed(server="s", version=3, since=2, is_final=False, reason="0.9 nats")]
    stage.loop._refresh()
    told = [(list(servers.urls), servers.probes_missed) for servers in stage.workers.servers]
    assert told == [(["s"], {}), ([], {"s": 1}), (["s"], {"s": 1})]
