"""Connects the actor's loop to the run: topics, trainer state and workers. ``run`` returns when the role is done."""

import logging
import time

from pipelinerl.actor.answer_journal import AnswerJournal
from pipelinerl.actor.drops import DropListener
from pipelinerl.actor.evaluation import EvaluationRules, Evaluator, TestProblem
from pipelinerl.actor.failures import DomainErrors
from pipelinerl.actor.groups import GroupRules, TrainDomain, TrainingGroups
from pipelinerl.actor.loop import ActorLoop
from pipelinerl.actor.metrics import ActorMetrics, Reporter
from pipelinerl.actor.pacing import Pacing
from pipelinerl.actor.problems import ProblemSource
from pipelinerl.actor.progress import ActorProgress, TopicJournal
from pipelinerl.actor.resume import begin_again
from pipelinerl.actor.sampling import make_sampler
from pipelinerl.actor.setup import request_limits
from pipelinerl.actor.without_trainer import ONLY_VERSION, OneVersion
from pipelinerl.actor.work import WorkTable
from pipelinerl.actor.worker_pool import RolloutWorkers
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import first_capacity, most_rollouts, requests_per_worker
from pipelinerl.domains.contract import domains_of
from pipelinerl.errors import DomainError
from pipelinerl.membership.role import RoleContext
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.records import ActorRecord, RolloutGroup, topics
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.state import TrainerState
from pipelinerl.streams import SingleStreamSpec, TopicWriter, open_reader, open_writer
from pipelinerl.utils import is_healthy
from pipelinerl.world.process import raise_open_files

log = logging.getLogger(__name__)

ENVIRONMENT_POLL_S = 0.5
"""Interval of the questions whether an environment server answers, while the role starts."""


def run(context: RoleContext) -> None:
    cfg, run_dir, replica = context.cfg, context.run_dir, context.job.replica_idx
    view = context.server_view
    domains = train_domains(cfg)
    wait_for_environments(context)
    sources = {
        domain.name: ProblemSource(
            num_problems=len(domain.problems),
            seed=cfg.seed,
            name=domain.name,
            actor=replica,
            num_actors=cfg.world.replicas,
            sampler=make_sampler(cfg, domain.name, domain.problems, replica),
        )
        for domain in domains
    }
    progress = ActorProgress(sources, cfg.finetune.rl.no_positive_resampling, cfg.finetune.batch_unit)
    trainer = make_trainer(context, progress)
    trainer.start_listening()
    drops = DropListener(run_dir, replica)
    metrics_log = MetricsLogger(cfg, run_dir, "actor" if replica == 0 else f"actor_{replica}")
    warn_of_open_files(cfg, len(context.world.servers_of(context.job)))
    metrics = ActorMetrics(time.monotonic())
    silence_s = cfg.launcher.heartbeat_timeout_s
    workers = RolloutWorkers(run_dir, context.job.name, cfg.actor.rollout_workers, silence_s, metrics.sampling)
    table = WorkTable(workers, first_capacity(cfg))
    try:
        with (
            open_writer(SingleStreamSpec(run_dir, topics.ACTOR, instance=replica), ActorRecord) as groups,
            open_writer(SingleStreamSpec(run_dir, topics.ACTOR_TEST, instance=replica), RolloutGroup) as test_groups,
            open_writer(
                SingleStreamSpec(run_dir, topics.EVALUATION, instance=replica), EvaluationMessage
            ) as evaluations,
            open_reader(groups.spec, ActorRecord, name=None if cfg.debug.mode else context.job.name) as cursor,
        ):
            journal = TopicJournal(run_dir / context.job.name, groups, None if cfg.debug.mode else cursor, progress)
            journal.replay()
            if isinstance(trainer, TrainerState) and not begin_again(context, trainer, journal, groups, evaluations):
                return
            ActorLoop(
                trainer=trainer,
                live=lambda: view.servers("actor_llm", replica),
                table=table,
                training=TrainingGroups(
                    domains=domains,
                    rules=GroupRules(
                        attempts=cfg.attempts,
                        max_failed_rollouts=cfg.actor.max_failed_rollouts_per_group,
                        max_reissues=cfg.actor.max_group_reissues,
                    ),
                    pacing=make_pacing(cfg, replica),
                    progress=progress,
                    journal=journal,
                    drops=drops,
                    table=table,
                    metrics=metrics,
                ),
                evaluator=make_evaluator(cfg, replica, evaluations, test_groups, table),
                domain_errors=DomainErrors(cfg.actor.max_domain_errors),
                metrics=metrics,
                reporter=Reporter(metrics, metrics_log, context.status, cfg.actor.log_every_s),
            ).run(context.stop.is_set)
            journal.save()
            is_over = trainer.training_done
    finally:
        workers.close()
        trainer.stop()
        drops.stop()
        metrics_log.close()
    if is_over:
        AnswerJournal(run_dir / context.job.name).clear()


def make_trainer(context: RoleContext, progress: ActorProgress) -> TrainerState | OneVersion:
    """Makes the view of the trainer. Without one it is a fixed version, until enough samples are published."""
    cfg, view, replica = context.cfg, context.server_view, context.job.replica_idx
    if cfg.debug.mode is None:
        return TrainerState(context.run_dir, last_step=cfg.finetune.max_train_steps)
    wanted = make_pacing(cfg, replica).limit(ONLY_VERSION)
    return OneVersion(
        lambda: view.servers("actor_llm", replica),
        lambda: is_enough(progress, wanted),
        startup_s=cfg.launcher.startup_timeout_s,
        silence_s=cfg.launcher.heartbeat_timeout_s,
    )


def is_enough(progress: ActorProgress, wanted: int) -> bool:
    """Whether ``wanted`` units are published. Raises ``DomainError`` if as many samples were dropped instead."""
    if progress.units < wanted <= progress.dropped:
        raise DomainError(
            f"{progress.dropped} samples were dropped and {progress.published} published: see the log for the reasons"
        )
    return progress.units >= wanted


def wait_for_environments(context: RoleContext) -> None:
    """Returns when every environment server answers, or a stop is requested. The supervisor ends a wait in vain."""
    for job in context.world.get("environment"):
        with context.status.waiting(f"environment {job.environment_key!r}", on=job.name):
            while not is_healthy(job.url) and not context.stop.wait(ENVIRONMENT_POLL_S):
                pass


def warn_of_open_files(cfg: Config, num_servers: int) -> None:
    """Warns if the system's limit on open files allows fewer concurrent requests than the configuration asks for."""
    limit = raise_open_files()
    per_server = most_rollouts(cfg)
    wanted = requests_per_worker(cfg, num_servers)
    possible = request_limits(cfg).max_requests
    if possible < wanted:
        log.warning(
            "event=open_files_limited note="
            "open files are limited to %d: a worker has %d requests under way at once, not %d "
            "(%d servers x actor.llm_max_rollouts=%d / actor.rollout_workers=%d); "
            "raise the hard limit (ulimit -Hn, LimitNOFILE=, docker --ulimit nofile) or actor.rollout_workers",
            *(limit, possible, wanted, num_servers, per_server, cfg.actor.rollout_workers),
        )


def train_domains(cfg: Config) -> list[TrainDomain]:
    """Loads every domain's training problems."""
    domains = []
    for domain in domains_of(cfg):
        section, problems = domain.section, domain.train_problems()
        domains.append(TrainDomain(name=section.name, weight=section.weight, problems=problems))
        log.info("event=problems_loaded domain=%s train=%d", section.name, len(problems))
    return domains


def test_problems(cfg: Config) -> list[TestProblem]:
    """Loads the problems of every evaluation. Returns none if the configuration asks for no evaluation."""
    if not (cfg.eval.at_start or cfg.eval.at_end or cfg.eval_every_n_versions):
        return []
    tests = []
    for i, domain in enumerate(domains_of(cfg)):
        for index, problem in enumerate(domain.test_problems()[: cfg.eval.max_problems]):
            dataset = str(problem.get("dataset", "test"))
            if cfg.domains:  # two domains may both have a data set `test`
                dataset = f"{domain.section.name}/{dataset}"
            tests.append(TestProblem(domain=i, dataset=dataset, index=index, problem=problem))
    return tests


test_problems.__test__ = False  # type: ignore[attr-defined]


def make_evaluator(
    cfg: Config,
    replica: int,
    evaluations: TopicWriter[EvaluationMessage],
    test_groups: TopicWriter[RolloutGroup],
    table: WorkTable,
) -> Evaluator:
    """Makes the evaluator. Only the first actor gets problems, because it evaluates for all actors."""
    last = evaluations.last()
    return Evaluator(
        problems=test_problems(cfg) if replica == 0 else [],
        rules=EvaluationRules(
            every_n_versions=cfg.eval_every_n_versions,
            at_start=cfg.eval.at_start,
            at_end=cfg.eval.at_end,
            attempts=cfg.eval.attempts,
            timeout_s=cfg.eval.timeout_s,
            max_repeats=cfg.actor.max_group_reissues,
        ),
        domains=[domain.section.name for domain in domains_of(cfg)],
        actor=replica,
        announce=evaluations.write,
        publish=test_groups.write,
        table=table,
        last=last[1] if last else None,
    )


def make_pacing(cfg: Config, replica: int) -> Pacing:
    return Pacing(
        batch_size=cfg.batch_size,
        max_lag_steps=cfg.max_lag_steps,
        max_train_steps=0 if cfg.debug.mode == "evaluation" else cfg.finetune.max_train_steps,
        schedule=cfg.schedule,
        steps_per_phase=cfg.steps_per_phase,
        actor=replica,
        num_actors=cfg.world.replicas,
    )
