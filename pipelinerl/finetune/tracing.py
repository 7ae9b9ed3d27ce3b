"""Spans of an optimizer step: the step, its wait for data, its micro-batches, and the training of each rollout.

On a GPU a micro-batch's span is the time in which its work was put in; the step's span ends when the GPU has done it.
"""

import time

from pipelinerl.observability import spans
from pipelinerl.records import MicroBatch


class StepSpans:
    """Records the spans of one step on one rank. It begins with the wait for the step's data."""

    def __init__(self, step: int):
        self._step, self._trace = step, f"step {step}"
        self._began = self._last = time.time_ns()

    def has_data(self) -> None:
        """The data has arrived."""
        spans.record("wait", self._trace, self._last)
        self._began = self._last = time.time_ns()

    def micro_batch(self, record: MicroBatch) -> None:
        """A micro-batch's forward and backward passes have ended, and began when the one before had."""
        start, self._last = self._last, time.time_ns()
        tokens, sequences = len(record.token_ids), len(record.segment_lengths)
        spans.record("micro-batch", self._trace, start, self._last, tokens=tokens, sequences=sequences)
        for sample_id in dict.fromkeys(name.rpartition("/")[0] for name in record.sequence_ids):
            spans.record("train", sample_id, start, self._last, step=self._step)

    def end(self) -> None:
        """The weights have changed."""
        spans.record("step", self._trace, self._began, root=True, step=self._step)
