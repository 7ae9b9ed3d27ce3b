"""Makes a replay folder from a run: finds the checkpoint, the micro-batches and what the run recorded of the step.

The caller must have opened the run's streams. The trainer keeps its inputs from its oldest checkpoint on
(`finetune.keep_checkpoints`).
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from pipelinerl.config.load import load_old_run
from pipelinerl.errors import CheckpointError, CorruptStreamError
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.checkpoints import checkpoint_root, list_steps, read_counters
from pipelinerl.finetune.proximal import ProximalPolicy
from pipelinerl.inspect.replay import folder as files
from pipelinerl.inspect.replay.folder import Recorded, ReplayPlan, StepBatches
from pipelinerl.observability.archive import read_archive
from pipelinerl.observability.catalogue import STEP, TrainerMetric
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ArchivedStep, MicroBatch, ScoredStep
from pipelinerl.records.topics import TRAINING_DATA
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.streams.epoch import read_epoch
from pipelinerl.world import WorldMap

TIMINGS = {
    TrainerMetric.STEP_S,
    TrainerMetric.TOKENS_PER_S,
    TrainerMetric.INPUT_TOKENS_PER_S_PER_DEVICE,
    TrainerMetric.MFU,
}
"""Metrics of a step that differ in every repetition."""


def collect_inputs(run_dir: Path, step: int, folder: Path) -> ReplayPlan:
    """Make the replay folder of a run's step in the empty ``folder``.

    Raises:
        CheckpointError: something that the step was computed from is not there.
    """
    cfg, world = load_old_run(run_dir), WorldMap.load(run_dir)
    saved = [number for number, _ in list_steps(checkpoint_root(run_dir))]
    epoch, block = read_epoch(run_dir), cfg.proximal_steps or 1
    holding = [number for number in saved if number % block and holds_proximal(run_dir, number, epoch.number)]
    begun = [] if epoch.step is None else [epoch.step]  # with new streams, a block begins where they do
    first = checkpoint_before(step, saved, block, [*holding, *begun])
    if first:
        files.link_checkpoint(run_dir, folder, first)
    last = max(ProximalPolicy(cfg.proximal_steps, cfg.finetune.max_train_steps).last_needed(step), step)
    job = world.get("finetune")[0]
    plan = ReplayPlan(
        run_dir=str(run_dir.absolute()),
        step=step,
        first=first,
        last=last,
        restores_proximal=first in holding,
        proximal_every=block,
        num_ranks=world.trainer_world_size,
        threads=max(len(job.cores) // job.num_ranks, 1),
        accelerator=world.accelerator,
    )
    for rank in range(plan.num_ranks):
        _copy_batches(run_dir, folder, plan, rank, max(len(world.get("preprocessor")), 1))
    files.write_record(folder / files.PLAN, plan)
    return plan


def checkpoint_before(step: int, saved: Iterable[int], block: int, usable: Collection[int] = ()) -> int:
    """The step of the checkpoint from which ``step`` is replayed, 0 for the run's model.

    Args:
        saved: steps of the run's checkpoints.
        block: number of steps that share a proximal policy, which is that of the block's first step.
        usable: checkpoints inside a block that hold its proximal policy, or from which a block began. Others inside a
            block are used only if there is none.
    """
    earlier = [number for number in saved if number <= step]
    return max([number for number in earlier if number % block == 0 or number in usable] or earlier, default=0)


def holds_proximal(run_dir: Path, number: int, epoch: int) -> bool:
    """Whether the checkpoint of step ``number`` holds the rest of a block, for the streams of ``epoch``."""
    try:
        counters = read_counters(checkpoint_root(run_dir) / f"step_{number}")
    except CheckpointError:
        return False
    return counters.proximal_made_at is not None and counters.epoch == epoch


def replayable(run_dir: Path) -> str:
    """Which steps of a run can be replayed, as a phrase for messages."""
    saved = [number for number, _ in list_steps(checkpoint_root(run_dir))]
    trained = [point[STEP] for point in read_metrics(run_dir, "finetune")]
    if not trained:
        return "the run has trained no step"
    first = min(saved, default=0)
    return f"steps {first} to {trained[-1] - 1} can be replayed" if first < trained[-1] else "no step can be replayed"


def recorded(run_dir: Path, step: int) -> Recorded:
    """What the run recorded about ``step``: in the metrics, in the trainer's archive and in the preprocessor's."""
    points = [point for point in read_metrics(run_dir, "finetune") if point[STEP] == step + 1]
    metrics = points[-1] if points else {}
    advantages = {
        f"{found.sample_id}/{index}": advantage
        for _, _, records in read_archive(run_dir, "preprocessor", ArchivedStep, step)
        for record in records
        for found in record.rollouts
        for index, advantage in enumerate(found.advantages)
        if advantage is not None
    }
    sequences = [
        sequence
        for _, _, records in read_archive(run_dir, "finetune", ScoredStep, step)
        for record in records
        for sequence in record.sequences
    ]
    return Recorded(
        metrics={str(name): value for name, value in metrics.items() if value is not None and name not in TIMINGS},
        sequences=tuple(sequences),
        advantages=advantages,
    )


def _copy_batches(run_dir: Path, folder: Path, plan: ReplayPlan, rank: int, instances: int) -> None:
    """Copy one rank's micro-batches of all steps of the plan."""
    positions: dict[str, int] = {}
    if plan.first:
        counters = read_counters(checkpoint_root(folder) / f"step_{plan.first}")
        positions = counters.positions if counters.epoch == read_epoch(run_dir).number else {}
    readers = []
    for instance in range(instances):
        spec, key = SingleStreamSpec(run_dir, TRAINING_DATA, instance, rank), f"{instance}/{rank}"
        readers.append((key, open_reader(spec, MicroBatch, name=None, start=positions.get(key))))
    feed = BatchReader(readers)
    try:
        for number in range(plan.first, plan.last + 1):
            records = feed.next_step(number, 0.0)
            if records is None:
                raise CorruptStreamError("the stream ends before it")
            trained = tuple(record for record in records if not record.is_held_out)
            files.write_record(files.batch_file(folder, rank, number), StepBatches(records=trained))
    except CorruptStreamError as error:
        wanted = "checkpoint" if plan.first else "the run's beginning, as no checkpoint is older"
        raise CheckpointError(
            f"step {plan.step} would be replayed from step {plan.first} ({wanted}), but the micro-batches of step "
            f"{number} are not in the run ({error}); {replayable(run_dir)}. A higher finetune.keep_checkpoints keeps "
            "more of a run's inputs"
        ) from error
    finally:
        feed.close()
