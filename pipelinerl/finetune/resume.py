"""Finds where a started trainer resumes: its positions in the streams, and the message that announces it."""

import logging
import time
from pathlib import Path

import msgspec

from pipelinerl.finetune.checkpoints import Counters
from pipelinerl.observability.metrics import drop_points_after
from pipelinerl.records import TrainingResumed
from pipelinerl.streams.epoch import StreamEpoch, read_epoch, write_epoch

log = logging.getLogger(__name__)


def in_present_streams(found: Counters | None, run_dir: Path) -> Counters:
    """The checkpoint's counters, or zeros if ``found`` is None. Drops what is about streams of an earlier epoch."""
    number = read_epoch(run_dir).number
    counters = found or Counters()
    if counters.epoch == number:
        return counters
    return msgspec.structs.replace(counters, epoch=number, positions={}, proximal_made_at=None)


def resumed_message(run_dir: Path, counters: Counters) -> TrainingResumed | None:
    """The message of a run resumed at ``counters``, or None for a new one. Deletes the metrics of repeated steps."""
    epoch = read_epoch(run_dir)
    if epoch.step is None and epoch.number > 1:
        write_epoch(run_dir, StreamEpoch(number=epoch.number, step=counters.step))
    repeated = drop_points_after(run_dir, "finetune", counters.step)
    if not (counters.step or repeated or epoch.number > 1):
        return None
    log.info("event=resumed step=%d repeated=%d", counters.step, repeated)
    return TrainingResumed(
        step=counters.step,
        repeated=repeated,
        samples_processed=counters.samples_processed,
        orders=counters.orders,
        timestamp=time.time(),
    )
