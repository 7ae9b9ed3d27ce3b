"""Wires the actor's loop to the run: topics, trainer state, workers. ``run`` returns when the role is done."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.actor.evaluation import TestProblem
from pipelinerl.actor.lag import Pacing
from pipelinerl.actor.loop import ActorLoop, Limits, TrainDomain
from pipelinerl.actor.problems import ProblemSource
from pipelinerl.actor.progress import Progress, load_snapshot, save_snapshot
from pipelinerl.actor.setup import request_limits
from pipelinerl.actor.workers import RolloutWorkers
from pipelinerl.config.sections import Config
from pipelinerl.domains.contract import domains_of
from pipelinerl.errors import StreamError
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.observability.role import RoleContext, raise_open_files
from pipelinerl.records import ActorRecord, GroupDropped, PreprocessorProgress, RolloutGroup, topics
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.state import TrainerState
from pipelinerl.streams import SingleStreamSpec, TopicReader, TopicWriter, open_reader, open_writer

log = logging.getLogger(__name__)

LISTEN_S = 0.5
SAVE_EVERY_S = 5.0


def run(context: RoleContext) -> None:
    """The role's main function."""
    cfg, run_dir, replica = context.cfg, context.run_dir, context.job.replica_idx
    domains = train_domains(cfg)
    progress = Progress(problem_sources(cfg, domains, replica), cfg.finetune.rl.no_positive_resampling)
    tests = test_problems(cfg) if replica == 0 else []
    trainer = TrainerState(run_dir, last_step=cfg.finetune.max_train_steps)
    trainer.start_listening()
    drops = DropListener(run_dir, replica)
    kind = "actor" if replica == 0 else f"actor_{replica}"
    metrics = MetricsLogger(cfg, run_dir, kind)
    warn_of_open_files(cfg, len(context.world.servers_of(context.job)))
    workers = RolloutWorkers(run_dir, context.job.name, cfg.actor.rollout_workers, cfg.launcher.heartbeat_timeout_s)
    try:
        with (
            open_writer(SingleStreamSpec(run_dir, topics.ACTOR, instance=replica), ActorRecord) as groups,
            open_writer(SingleStreamSpec(run_dir, topics.ACTOR_TEST, instance=replica), RolloutGroup) as test_groups,
            open_writer(SingleStreamSpec(run_dir, topics.EVALUATION, instance=replica), EvaluationMessage) as news,
            open_reader(groups.spec, ActorRecord, name=context.job.name) as keeper,
        ):
            last = news.last()
            journal = Journal(run_dir / context.job.name, groups, keeper, progress)
            journal.replay()
            ActorLoop(
                limits=make_limits(cfg),
                pacing=make_pacing(cfg, replica),
                domains=domains,
                progress=progress,
                save=journal.save,
                test_problems=tests,
                urls={server.name: server.url for server in context.world.servers_of(context.job)},
                trainer=trainer,
                workers=workers,
                drops=drops,
                publish=journal.publish,
                publish_test=test_groups.write,
                announce=news.write,
                log_metrics=lambda values, step: metrics.log(values, step=step),
                status=context.status,
                should_stop=context.stop.is_set,
                last_evaluation=last[1] if last else None,
            ).run()
            journal.save()
    finally:
        workers.close()
        trainer.stop()
        drops.stop()
        metrics.close()


def warn_of_open_files(cfg: Config, num_servers: int) -> None:
    """Says when the system's limit on open files lets fewer requests run at once than the configuration asks for."""
    limit = raise_open_files()
    wanted = -(-num_servers * cfg.actor.llm_max_rollouts // cfg.actor.rollout_workers)
    possible = request_limits(cfg).max_requests
    if possible < wanted:
        log.warning(
            "open files are limited to %d: a worker has %d requests under way at once, not %d "
            "(%d servers x actor.llm_max_rollouts=%d / actor.rollout_workers=%d); "
            "raise the hard limit (ulimit -Hn, LimitNOFILE=, docker --ulimit nofile) or actor.rollout_workers",
            *(limit, possible, wanted, num_servers, cfg.actor.llm_max_rollouts, cfg.actor.rollout_workers),
        )


def train_domains(cfg: Config) -> list[TrainDomain]:
    """Every domain with its problems."""
    domains = []
    for domain in domains_of(cfg):
        section, problems = domain.section, domain.train_problems()
        domains.append(TrainDomain(name=section.name, weight=section.weight, problems=problems))
        log.info("problems loaded domain=%s train=%d", section.name, len(problems))
    return domains


def problem_sources(cfg: Config, domains: Sequence[TrainDomain], replica: int) -> dict[str, ProblemSource]:
    """Every domain's problems in this actor's order."""
    return {
        domain.name: ProblemSource(
            num_problems=len(domain.problems),
            seed=cfg.seed,
            name=domain.name,
            actor=replica,
            num_actors=cfg.world.replicas,
        )
        for domain in domains
    }


def test_problems(cfg: Config) -> list[TestProblem]:
    """The problems of every evaluation."""
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


def make_limits(cfg: Config) -> Limits:
    return Limits(
        attempts=cfg.attempts,
        llm_max_rollouts=cfg.actor.llm_max_rollouts,
        max_failed_rollouts_per_group=cfg.actor.max_failed_rollouts_per_group,
        max_group_reissues=cfg.actor.max_group_reissues,
        max_domain_errors=cfg.actor.max_domain_errors,
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


class Journal:
    """Publishes on topic ``actor`` and keeps the snapshot of what was published behind it."""

    def __init__(self, folder: Path, groups: TopicWriter, keeper: TopicReader, progress: Progress):
        self._folder, self._groups, self._progress = folder, groups, progress
        self._keeper = keeper
        self._next_save = time.monotonic() + SAVE_EVERY_S

    def replay(self) -> None:
        """Takes up where an earlier process of this job stopped."""
        snapshot = load_snapshot(self._folder)
        if snapshot is not None:
            self._progress.restore(snapshot)
        offset = snapshot.offset if snapshot else 0
        with open_reader(self._groups.spec, ActorRecord, name=None, start=offset) as reader:
            for _, record in reader.read_all():
                self._progress.apply(record)
        self._progress.resume()
        if self._groups.next_offset:
            log.info("continued records=%d published=%d", self._groups.next_offset, self._progress.published)

    def publish(self, record: RolloutGroup | GroupDropped) -> int:
        """Appends the record; saves now and then. The caller applies the record afterwards."""
        if time.monotonic() >= self._next_save:
            self.save()
        return self._groups.write(record)

    def save(self) -> None:
        """Writes the snapshot, then gives the records that it covers up for deletion."""
        offset = self._groups.next_offset
        save_snapshot(self._folder, self._progress.snapshot(offset))
        self._keeper.commit(offset)
        self._next_save = time.monotonic() + SAVE_EVERY_S


class DropListener:
    """Samples that the preprocessor dropped, from topic ``preprocessor``, read by a thread of its own."""

    def __init__(self, run_dir: Path, replica: int):
        self._spec = SingleStreamSpec(run_dir, topics.PREPROCESSOR, instance=replica)
        self._total = 0
        self._by_domain: dict[str, int] = {}
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="preprocessor-drops", daemon=True)
        self._thread.start()

    def total(self) -> int:
        if self._failure is not None:
            raise StreamError(f"the listener on {self._spec} died: {self._failure}") from self._failure
        return self._total

    def by_domain(self) -> dict[str, int]:
        return self._by_domain

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
                        self._by_domain = progress.dropped_by_domain
        except Exception as error:  # the thread's boundary
            self._failure = error
