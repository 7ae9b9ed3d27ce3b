"""On new streams, after `resume=checkpoint`, the actor goes on where the trainer's checkpoint ends."""

import logging
from pathlib import Path

from pipelinerl.actor.progress import TopicJournal, load_snapshot
from pipelinerl.errors import StreamError
from pipelinerl.membership.role import RoleContext
from pipelinerl.records import ActorRecord, DataOrder, EvaluationDone, OrderResumed, TrainingResumed
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.state import TrainerState
from pipelinerl.streams import TopicWriter
from pipelinerl.streams.epoch import EVALUATIONS_FILE, lost_folder, read_epoch, read_lost

log = logging.getLogger(__name__)

WAIT_S = 0.1
"""Interval at which the trainer's message is looked for, once in a resumed run."""


def begin_again(
    context: RoleContext,
    trainer: TrainerState,
    journal: TopicJournal,
    groups: TopicWriter[ActorRecord],
    evaluations: TopicWriter[EvaluationMessage],
) -> bool:
    """On new streams, adopts the trainer's checkpoint and copies the evaluations before it.

    Returns False if a stop is requested first.
    """
    epoch, cfg, replica = read_epoch(context.run_dir), context.cfg, context.job.replica_idx
    if epoch.number == 1 or groups.next_offset:
        return True
    message = await_trainer(context, trainer)
    if message is None:
        return False
    lost = lost_folder(context.run_dir, epoch.number - 1)
    if not replica and not evaluations.next_offset:
        for evaluation in earlier_evaluations(lost, message.step):
            evaluations.write(evaluation)
    record = order_resumed(
        message,
        lost,
        job=context.job.name,
        actor=replica,
        num_actors=cfg.world.replicas,
        batch_size=cfg.batch_size,
    )
    journal.begin(record)
    log.info("event=streams_renewed epoch=%d step=%d", epoch.number, message.step)
    return True


def await_trainer(context: RoleContext, trainer: TrainerState) -> TrainingResumed | None:
    """Waits for the trainer's message about where it resumes. Returns None if a stop is requested first."""
    with context.status.waiting("the checkpoint that the new streams begin with", on="finetune_0"):
        while (message := trainer.resumed) is None:
            if context.stop.wait(WAIT_S):
                return None
    return message


def order_resumed(
    message: TrainingResumed, lost: Path, *, job: str, actor: int, num_actors: int, batch_size: int
) -> OrderResumed:
    """Builds the first record of the new stream.

    Args:
        lost: folder of the stream epoch that has ended. Its snapshot holds the problems that had left the pool.
        batch_size: units per optimizer step. Actor r of n fills the steps with ``step % n == r``.
    """
    removed, removed_at = removed_problems(lost / job)
    return OrderResumed(
        step=message.step,
        order=message.orders.get(actor, DataOrder()),
        published=batch_size * len(range(actor, message.step, num_actors)),
        removed=removed,
        removed_at=removed_at,
    )


def removed_problems(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, dict[int, tuple[int, ...]]]]:
    """Returns the problems that left the pool, by domain, and by domain and epoch: none without a snapshot."""
    try:
        snapshot = load_snapshot(folder)
    except StreamError:
        snapshot = None
    domains = snapshot.domains if snapshot else {}
    return (
        {name: domain.removed for name, domain in domains.items()},
        {name: {epoch.epoch: epoch.removed_when_begun for epoch in domain.epochs} for name, domain in domains.items()},
    )


def earlier_evaluations(lost: Path, step: int) -> list[EvaluationDone]:
    """Returns the evaluation results of the ended stream epoch, up to version ``step``. Later ones do not apply."""
    found = read_lost(lost / EVALUATIONS_FILE, EvaluationDone)
    return [evaluation for evaluation in found if evaluation.version <= step]
