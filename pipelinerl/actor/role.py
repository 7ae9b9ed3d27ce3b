"""Wires the actor's loop to the run: topics, trainer state, workers. ``run`` returns when the role is done."""

import logging
import threading
from pathlib import Path

from pipelinerl.actor.evaluation import TestProblem
from pipelinerl.actor.lag import Pacing
from pipelinerl.actor.loop import ActorLoop, Limits, TrainDomain
from pipelinerl.actor.problems import ProblemSource
from pipelinerl.actor.setup import domains_of, load_problems
from pipelinerl.actor.workers import WorkerPool
from pipelinerl.config.sections import Config
from pipelinerl.errors import StreamError
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.observability.role import RoleContext
from pipelinerl.records import ActorRecord, PreprocessorProgress, RolloutGroup, topics
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.state import TrainerState
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer

log = logging.getLogger(__name__)

LISTEN_S = 0.5


def run(context: RoleContext) -> None:
    """The role's main function."""
    cfg, run_dir, replica = context.cfg, context.run_dir, context.job.replica_idx
    domains = train_domains(cfg, replica)
    tests = test_problems(cfg) if replica == 0 else []
    trainer = TrainerState(run_dir)
    trainer.start_listening()
    drops = DropListener(run_dir, replica)
    kind = "actor" if replica == 0 else f"actor_{replica}"
    metrics = MetricsLogger(cfg, run_dir, kind)
    workers = WorkerPool(run_dir, context.job.name, cfg.actor.rollout_workers)
    try:
        with (
            open_writer(SingleStreamSpec(run_dir, topics.ACTOR, instance=replica), ActorRecord) as groups,
            open_writer(SingleStreamSpec(run_dir, topics.ACTOR_TEST, instance=replica), RolloutGroup) as test_groups,
            open_writer(SingleStreamSpec(run_dir, topics.EVALUATION, instance=replica), EvaluationMessage) as news,
        ):
            last = news.last()
            ActorLoop(
                limits=make_limits(cfg),
                pacing=make_pacing(cfg, replica),
                domains=domains,
                test_problems=tests,
                urls={server.name: server.url for server in context.world.servers_of(context.job)},
                trainer=trainer,
                workers=workers,
                dropped_later=drops.total,
                publish=groups.write,
                publish_test=test_groups.write,
                announce=news.write,
                log_metrics=lambda values, step: metrics.log(values, step=step),
                status=context.status,
                should_stop=context.stop.is_set,
                last_evaluation=last[1] if last else None,
            ).run()
    finally:
        workers.close()
        trainer.stop()
        drops.stop()
        metrics.close()


def train_domains(cfg: Config, replica: int) -> list[TrainDomain]:
    """Every domain with its problems in this actor's order."""
    domains = []
    for section in domains_of(cfg):
        problems = load_problems(section, section.train_dataset_names)
        source = ProblemSource(
            num_problems=len(problems),
            seed=cfg.seed,
            name=section.name,
            actor=replica,
            num_actors=cfg.world.replicas,
        )
        domains.append(TrainDomain(name=section.name, weight=section.weight, problems=problems, source=source))
        log.info("problems loaded domain=%s train=%d", section.name, len(problems))
    return domains


def test_problems(cfg: Config) -> list[TestProblem]:
    """The problems of every evaluation."""
    if not (cfg.eval.at_start or cfg.eval.at_end or cfg.eval_every_n_versions):
        return []
    tests = []
    for i, section in enumerate(domains_of(cfg)):
        problems = load_problems(section, section.test_dataset_names)
        for index, problem in enumerate(problems[: cfg.eval.max_problems]):
            dataset = str(problem.get("dataset", "test"))
            tests.append(TestProblem(domain=i, dataset=dataset, index=index, problem=problem))
    return tests


test_problems.__test__ = False  # type: ignore[attr-defined]


def make_limits(cfg: Config) -> Limits:
    return Limits(
        attempts=cfg.attempts,
        llm_max_rollouts=cfg.actor.llm_max_rollouts,
        max_failed_rollouts_per_group=cfg.actor.max_failed_rollouts_per_group,
        max_group_reissues=cfg.actor.max_group_reissues,
        max_domain_errors=cfg.actor.max_domain_errors,
        no_positive_resampling=cfg.finetune.rl.no_positive_resampling,
        eval_every_n_versions=cfg.eval_every_n_versions,
        eval_at_start=cfg.eval.at_start,
        eval_at_end=cfg.eval.at_end,
        eval_attempts=cfg.eval.attempts,
        eval_timeout_s=cfg.eval.timeout_s,
        log_every_s=cfg.actor.log_every_s,
    )


def make_pacing(cfg: Config, replica: int) -> Pacing:
    return Pacing(
        batch_size=cfg.batch_size,
        max_lag_steps=cfg.max_lag_steps,
        max_train_steps=cfg.finetune.max_train_steps,
        schedule=cfg.schedule,
        steps_per_phase=cfg.steps_per_phase,
        actor=replica,
        num_actors=cfg.world.replicas,
    )


class DropListener:
    """Samples that the preprocessor dropped, from topic ``preprocessor``, read by a thread of its own."""

    def __init__(self, run_dir: Path, replica: int):
        self._spec = SingleStreamSpec(run_dir, topics.PREPROCESSOR, instance=replica)
        self._total = 0
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="preprocessor-drops", daemon=True)
        self._thread.start()

    def total(self) -> int:
        if self._failure is not None:
            raise StreamError(f"the listener on {self._spec} died: {self._failure}") from self._failure
        return self._total

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        """Consumes progress records; ends with ``stop`` or a failure, which the next ``total`` raises."""
        try:
            with open_reader(self._spec, PreprocessorProgress, name=None) as reader:
                while not self._stop.is_set():
                    for _, progress in reader.poll(LISTEN_S):
                        self._total = progress.samples_dropped
        except Exception as error:  # the thread's boundary
            self._failure = error
