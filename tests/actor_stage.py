"""An actor's loop with everything around it scripted, and what its workers answer."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipelinerl.actor.evaluation import EvaluationRules, Evaluator, TestProblem
from pipelinerl.actor.failures import DomainErrors
from pipelinerl.actor.groups import GroupRules, TrainDomain, TrainingGroups
from pipelinerl.actor.loop import ActorLoop
from pipelinerl.actor.messages import Failure, GroupFinished, StartGroup
from pipelinerl.actor.metrics import ActorMetrics, Reporter
from pipelinerl.actor.pacing import Pacing
from pipelinerl.actor.problems import Place, ProblemSource
from pipelinerl.actor.progress import ActorProgress
from pipelinerl.actor.work import WorkTable
from pipelinerl.actor.worker_pool import Lost
from pipelinerl.membership.lease import LiveServer
from pipelinerl.observability.catalogue import undeclared
from pipelinerl.records import BatchUnit, GroupDropped, ProbeMissed, Rollout, RolloutGroup, TrainingSequence
from pipelinerl.records.drops import DropReason
from pipelinerl.world import Job
from tests.scripted_actor import QuietStatus, ScriptedDrops, ScriptedTrainer, ScriptedWorkers

ATTEMPTS = 2


def rollout(attempt: int, version: int, success: float = 1.0, servers: dict[str, int] | None = None) -> Rollout:
    """``servers``: those that answered, with the probes that they had missed before."""
    used = servers or {}
    sequence = TrainingSequence(
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(1, np.float32),
        spans=np.array([[2, 3, version]], np.int32),
        finish_reason="stop",
    )
    metrics = {"success": success, "reward": success}
    return Rollout(
        attempt=attempt,
        reward=success,
        sequences=(sequence,),
        metrics=metrics,
        latency_s=0.1,
        num_llm_calls=1,
        servers=tuple(used),
        probes_missed=tuple(used.values()),
    )


def ended_group(
    place: Place,
    index: int,
    rewards: Sequence[float],
    *,
    epoch_size: int = 0,
    dispatched_version: int = 0,
) -> RolloutGroup | GroupDropped:
    """A published group in which a reward above 0 is a success, or a dropped one if there are no rewards."""
    fields: dict[str, Any] = {
        "group_id": f"{place.epoch}-{place.position}",
        "epoch": place.epoch,
        "position": place.position,
        "problem_index": place.problem_index,
        "actor": 0,
        "domain": "d",
        "dataset": "train",
        "attempts": 2,
        "settled_before": 0,
        "dispatch_index": index,
        "epoch_size": epoch_size,
    }
    if not rewards:
        return GroupDropped(**fields, reason="transport", detail="")
    rollouts = tuple(
        Rollout(
            attempt=i,
            reward=reward,
            sequences=(),
            metrics={"success": float(reward > 0)},
            latency_s=0.0,
            num_llm_calls=1,
        )
        for i, reward in enumerate(rewards)
    )
    return RolloutGroup(**fields, rollouts=rollouts, dispatched_version=dispatched_version)


def finished(start: StartGroup, *, failed: Sequence[int] = (), reason: str = "transport") -> GroupFinished:
    known = DropReason.of(reason)
    assert known is not None
    return GroupFinished(
        task_id=start.task_id,
        rollouts=tuple(rollout(i, start.version) for i in start.attempts if i not in failed),
        failures=tuple(Failure(attempt=i, reason=known, detail="d") for i in start.attempts if i in failed),
    )


def sampled_by(start: StartGroup, server: str, version: int, missed: int = 0) -> GroupFinished:
    """The attempts, by a server that serves the version."""
    rollouts = tuple(rollout(i, version, servers={server: missed}) for i in start.attempts)
    return GroupFinished(task_id=start.task_id, rollouts=rollouts, failures=())


def missed_probe(server: str, since: int) -> ProbeMissed:
    return ProbeMissed(server=server, version=since, since=since, is_final=False, reason="0.9 nats")


def servers_of(records: Sequence[RolloutGroup | GroupDropped]) -> list[str]:
    """The server of each published group."""
    return [name for record in records if isinstance(record, RolloutGroup) for name in record.rollouts[0].servers]


def declared(values: dict[str, float]) -> dict[str, float]:
    """The values, all of them declared metrics of the actor."""
    assert undeclared("actor", values, domain_metrics=("reward", "success")) == []
    return values


def evaluator_of(
    tests: int, rules: EvaluationRules, domains: list[str], table: WorkTable, announced: list[Any]
) -> Evaluator:
    """An evaluator of that many problems, which announces to ``announced``."""
    return Evaluator(
        problems=[TestProblem(domain=0, dataset="test", index=i, problem={"i": i}) for i in range(tests)],
        rules=rules,
        domains=domains,
        actor=0,
        announce=lambda m: announced.append(m) or 0,  # type: ignore[func-returns-value]
        publish=lambda record: 0,
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
        max_lag_steps: int = 0,
        unit: BatchUnit = "rollouts",
        **limits: Any,
    ):
        self.workers = ScriptedWorkers(answer)
        self.trainer = ScriptedTrainer()
        self.drops = ScriptedDrops()
        self.records: list[RolloutGroup | GroupDropped] = []
        self.forgotten: list[tuple[str, int]] = []
        self.announced: list[Any] = []
        self.metrics: list[dict[str, float]] = []
        self.stop: Callable[[], bool] = lambda: True
        domains = [
            TrainDomain(name=name, weight=weight, problems=[{"i": i} for i in range(7)])
            for name, weight in (weights or {"d": 1.0}).items()
        ]
        values = {"attempts": ATTEMPTS, "max_failed_rollouts": 0, "max_reissues": 1, "max_domain_errors": 5}
        values |= {"every_n_versions": 0, "at_start": False, "at_end": False} | limits
        sources = {d.name: ProblemSource(num_problems=7, seed=0, name=d.name) for d in domains}
        self.progress = ActorProgress(sources, unit=unit)
        table, metrics = WorkTable(self.workers, rollouts_per_server=8), ActorMetrics(0.0)
        self.training = TrainingGroups(
            domains=domains,
            rules=GroupRules(**{key: values[key] for key in ("attempts", "max_failed_rollouts", "max_reissues")}),
            pacing=Pacing(batch_size=batch, max_lag_steps=max_lag_steps, max_train_steps=100),
            progress=self.progress,
            journal=self,
            drops=self.drops,
            table=table,
            metrics=metrics,
        )
        when = {key: values[key] for key in ("every_n_versions", "at_start", "at_end")}
        rules = EvaluationRules(**when, attempts=1, timeout_s=100.0, max_repeats=values["max_reissues"])
        evaluator = evaluator_of(tests, rules, [domain.name for domain in domains], table, self.announced)
        self.loop = ActorLoop(
            trainer=self.trainer,
            live=lambda: {
                name: LiveServer(Job(name=name, kind="actor_llm", url=f"http://{name}"))
                for name in self.trainer.servers
            },
            table=table,
            training=self.training,
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

    def forget_answers(self, group_id: str, attempts: Sequence[int]) -> None:
        self.forgotten += [(group_id, attempt) for attempt in attempts]

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.metrics.append(values)

    def until(self, condition: Callable[[], bool]) -> None:
        polls = iter(range(2000))
        self.stop = lambda: condition() or next(polls, None) is None
        self.loop.run(lambda: self.stop())
        assert condition()
