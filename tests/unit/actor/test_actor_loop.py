"""The loop with scripted workers: mixing, capacity, failures, evaluation, the end."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from pipelinerl.actor.evaluation import TestProblem
from pipelinerl.actor.evaluator import EvaluationRules, EvaluationTopics, Evaluator
from pipelinerl.actor.failures import DomainErrors
from pipelinerl.actor.lag import Pacing
from pipelinerl.actor.loop import ActorLoop
from pipelinerl.actor.messages import Failure, GroupFinished, Servers, StartGroup
from pipelinerl.actor.metrics import ActorMetrics
from pipelinerl.actor.problems import ProblemSource
from pipelinerl.actor.progress import ActorProgress
from pipelinerl.actor.reporting import Reporter, evaluation_metrics
from pipelinerl.actor.training import GroupRules, TrainDomain, TrainingGroups
from pipelinerl.actor.work import WorkTable
from pipelinerl.actor.workers import Lost
from pipelinerl.errors import DomainError
from pipelinerl.membership.lease import LiveServer
from pipelinerl.observability.catalogue import ActorMetric, undeclared
from pipelinerl.records import EvaluationDone, GroupDropped, ProbeMissed, Rollout, RolloutGroup, TrainingSequence
from pipelinerl.world import Job
from tests.scripted_actor import QuietStatus, ScriptedDrops, ScriptedTrainer, ScriptedWorkers

ATTEMPTS = 2


def rollout(attempt: int, version: int, success: float = 1.0) -> Rollout:
    sequence = TrainingSequence(
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(1, np.float32),
        spans=np.array([[2, 3, version]], np.int32),
        finish_reason="stop",
    )
    metrics = {"success": success, "reward": success}
    return Rollout(
        attempt=attempt, reward=success, sequences=(sequence,), metrics=metrics, latency_s=0.1, num_llm_calls=1
    )


def finished(start: StartGroup, *, failed: Sequence[int] = (), reason: str = "transport") -> GroupFinished:
    return GroupFinished(
        ticket=start.ticket,
        rollouts=tuple(rollout(i, start.version) for i in start.attempts if i not in failed),
        failures=tuple(Failure(attempt=i, reason=reason, detail="d") for i in start.attempts if i in failed),
    )


def declared(values: dict[str, float]) -> dict[str, float]:
    """The values, all of them declared metrics of the actor."""
    assert undeclared("actor", values, domain_metrics=("reward", "success")) == []
    return values


def evaluator_of(
    tests: int, rules: EvaluationRules, domains: list[str], table: WorkTable, news: list[Any]
) -> Evaluator:
    """An evaluator of that many problems, which announces to ``news``."""
    return Evaluator(
        problems=[TestProblem(domain=0, dataset="test", index=i, problem={"i": i}) for i in range(tests)],
        rules=rules,
        domains=domains,
        actor=0,
        topics=EvaluationTopics(announce=lambda m: news.append(m) or 0, publish=lambda record: 0),  # type: ignore[func-returns-value]
        table=table,
    )


class Stage:
    """A loop with everything around it scripted; ``until`` runs it to a condition."""

    def __init__(
        self,
        answer: Callable[[StartGroup], GroupFinished | Lost | None] = finished,
        *,
        weights: dict[str, float] | None = None,
        tests: int = 0,
        batch: int = 1000,
        **limits: Any,
    ):
        self.workers = ScriptedWorkers(answer)
        self.trainer = ScriptedTrainer()
        self.drops = ScriptedDrops()
        self.records: list[RolloutGroup | GroupDropped] = []
        self.news: list[Any] = []
        self.metrics: list[dict[str, float]] = []
        self.stop: Callable[[], bool] = lambda: True
        domains = [
            TrainDomain(name=name, weight=weight, problems=[{"i": i} for i in range(7)])
            for name, weight in (weights or {"d": 1.0}).items()
        ]
        values = {"attempts": ATTEMPTS, "max_failed_rollouts": 0, "max_reissues": 1, "max_domain_errors": 5}
        values |= {"every_n_versions": 0, "at_start": False, "at_end": False} | limits
        self.progress = ActorProgress({d.name: ProblemSource(num_problems=7, seed=0, name=d.name) for d in domains})
        table, metrics = WorkTable(self.workers, rollouts_per_server=8), ActorMetrics(0.0)
        training = TrainingGroups(
            domains=domains,
            rules=GroupRules(**{key: values[key] for key in ("attempts", "max_failed_rollouts", "max_reissues")}),
            pacing=Pacing(batch_size=batch, max_lag_steps=0, max_train_steps=100),
            progress=self.progress,
            journal=self,
            drops=self.drops,
            table=table,
            metrics=metrics,
        )
        when = {key: values[key] for key in ("every_n_versions", "at_start", "at_end")}
        rules = EvaluationRules(**when, attempts=1, timeout_s=100.0, max_repeats=values["max_reissues"])
        evaluator = evaluator_of(tests, rules, [domain.name for domain in domains], table, self.news)
        self.loop = ActorLoop(
            trainer=self.trainer,
            live=lambda: {"s": LiveServer(Job(name="s", kind="actor_llm", url="http://s"))},
            table=table,
            training=training,
            evaluator=evaluator,
            domain_errors=DomainErrors(values["max_domain_errors"]),
            metrics=metrics,
            reporter=Reporter(metrics, self, QuietStatus(), 1000.0),
        )

    def publish(self, record: RolloutGroup | GroupDropped) -> None:
        self.records.append(record)
        self.progress.apply(record)

    def save(self) -> None:
        pass

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.metrics.append(values)

    def until(self, condition: Callable[[], bool]) -> None:
        polls = iter(range(2000))
        self.stop = lambda: condition() or next(polls, None) is None
        self.loop.run(lambda: self.stop())
        assert condition()


def test_mix_of_what_is_published_meets_the_weights_although_one_domain_is_dropped() -> None:
    count = Counter[int]()

    def answer(start: StartGroup) -> GroupFinished:
        count[start.domain] += 1
        lost = start.domain == 0 and count[0] % 3 != 0
        return finished(start, failed=start.attempts if lost else (), reason="empty")

    stage = Stage(answer, weights={"a": 3.0, "b": 1.0})
    stage.until(lambda: len(stage.records) >= 400)
    published = Counter(record.domain for record in stage.records if isinstance(record, RolloutGroup))
    assert published["a"] / published.total() == pytest.approx(0.75, abs=0.02)
    assert count[0] > 2 * published["a"]


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
        lambda start: finished(start, failed=start.attempts if start.domain == 0 else (), reason="empty"),
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
    stage = Stage(lambda s: finished(s, failed=s.attempts if next(count) % 5 else (), reason="empty"), batch=4)
    stage.until(lambda: sum(len(r.rollouts) for r in stage.records if isinstance(r, RolloutGroup)) >= 4)
    before = len(stage.records)
    polls = iter(range(50))
    stage.stop = lambda: next(polls, None) is None
    stage.loop.run(stage.stop)
    assert len(stage.records) == before


def test_domain_errors_beyond_the_budget_end_the_role() -> None:
    stage = Stage(lambda start: finished(start, failed=start.attempts, reason="domain_error"))
    with pytest.raises(DomainError, match=r"6 rollouts failed.*actor\.max_domain_errors=5; the last: d"):
        stage.until(lambda: False)


def test_guilty_problem_is_found_although_others_die_with_it() -> None:
    """The worker dies whenever problem 3 is in it; only that problem is dropped, the others are published."""

    class Fragile(ScriptedWorkers):
        def poll(self, timeout_s: float) -> Sequence[GroupFinished | Lost]:
            self.waiting.clear()
            running = list(self.running.values())
            self.running.clear()
            if any(start.problem["i"] == 3 for start in running):
                return [Lost(tickets=tuple(start.ticket for start in running), exit_code=-11)]
            return [finished(start) for start in running]

    stage = Stage()
    stage.workers.__class__ = Fragile
    stage.until(lambda: len({record.problem_index for record in stage.records}) == 7)
    dropped = {record.problem_index for record in stage.records if isinstance(record, GroupDropped)}
    assert dropped == {3}
    assert all(record.reason == "poisonous" for record in stage.records if isinstance(record, GroupDropped))


def test_evaluation_counts_only_tokens_of_the_announced_version() -> None:
    stale = iter([7])

    def answer(start: StartGroup) -> GroupFinished:
        version = next(stale, start.version) if start.evaluation else start.version
        return GroupFinished(
            ticket=start.ticket, rollouts=tuple(rollout(i, version) for i in start.attempts), failures=()
        )

    stage = Stage(answer, tests=3, at_start=True)
    stage.until(lambda: any(isinstance(message, EvaluationDone) for message in stage.news))
    done = stage.news[-1]
    assert (done.version, done.num_rollouts, done.metrics["complete"]) == (0, 3, 1.0)
    assert len([start for start in stage.workers.started if start.evaluation]) == 4


def test_evaluation_failure_is_left_out_and_never_scored() -> None:
    def answer(start: StartGroup) -> GroupFinished:
        return finished(start, failed=start.attempts if start.evaluation and start.problem["i"] == 0 else ())

    stage = Stage(answer, tests=4, at_start=True)
    stage.until(lambda: any(isinstance(message, EvaluationDone) for message in stage.news))
    done = stage.news[-1]
    assert (done.success, done.num_rollouts, done.metrics["complete"]) == (1.0, 3, 0.75)


def test_evaluation_without_any_rollout_has_no_result() -> None:
    stage = Stage(
        lambda start: finished(start, failed=start.attempts if start.evaluation else ()), tests=3, at_start=True
    )
    stage.until(lambda: any(isinstance(message, EvaluationDone) for message in stage.news))
    done = stage.news[-1]
    assert (done.success, done.reward, done.num_rollouts) == (None, None, 0)
    assert evaluation_metrics(done) == {ActorMetric.EVAL_COMPLETE: 0.0}


def test_evaluation_every_n_versions_while_training_goes_on() -> None:
    stage = Stage(tests=2, every_n_versions=3, batch=4)

    def condition() -> bool:
        if len(stage.records) >= 2 * (stage.trainer.version + 1) and stage.trainer.version < 7:
            stage.trainer.version += 1
        return stage.trainer.version == 7 and len(stage.records) >= 16

    stage.until(condition)
    assert [m.version for m in stage.news if isinstance(m, EvaluationDone)] == [3, 6]


def test_training_done_gives_up_groups_and_evaluates_the_last_version() -> None:
    stage = Stage(lambda start: finished(start) if start.evaluation else None, tests=2, at_end=True)
    polls = iter(range(200))

    def condition() -> bool:
        stage.trainer.training_done = True
        stage.trainer.version = 9
        return next(polls, None) is None

    stage.stop = condition
    stage.loop.run(stage.stop)
    assert [type(m).__name__ for m in stage.news] == ["EvaluationStarted", "EvaluationDone"]
    assert stage.news[-1].version == 9
    assert stage.records == []
    assert stage.workers.running == {}


def test_server_that_missed_its_probe_is_withdrawn_before_it_comes_back() -> None:
    stage = Stage()
    told: list[Servers] = []
    stage.workers.set_servers = told.append  # type: ignore[method-assign]
    stage.loop._refresh()
    stage.trainer.misses = [ProbeMissed(server="s", version=3, since=2, is_final=False, reason="0.9 nats")]
    stage.loop._refresh()
    assert [(list(servers.urls), servers.missed) for servers in told] == [(["s"], {}), ([], {"s": 2}), (["s"], {})]
