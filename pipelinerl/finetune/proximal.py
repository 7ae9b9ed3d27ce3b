"""Computes log π_prox for steps that share a proximal policy (`finetune.rl.proximal_every`, docs/algorithms.md §2).

Consumes the micro-batches of a block of N steps before its first step is trained. Produces the log-probabilities of
their trained tokens under the weights at that time, and keeps each until its step. With N = 1 it does nothing, because
the loss uses the step's own log-probabilities.
"""

from collections.abc import Sequence

from torch import Tensor

from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.engines import Engine
from pipelinerl.records import MicroBatch


class ProximalPolicy:
    """The log-probabilities of the current block of steps.

    Each block begins at a multiple of N. A run that resumes inside a block begins a shorter block there.
    """

    def __init__(self, every: int | None, max_train_steps: int):
        self._every, self._max_train_steps = every or 1, max_train_steps
        self._known: dict[int, list[Tensor]] = {}

    def last_needed(self, step: int) -> int:
        """The last step whose data must have arrived before ``step`` is trained."""
        if self._every == 1 or step in self._known:
            return step
        return min((step // self._every + 1) * self._every, self._max_train_steps) - 1

    def of_step(
        self, step: int, records: Sequence[MicroBatch], reader: BatchReader, engine: Engine, rules: BatchRules
    ) -> list[Tensor] | None:
        """[K] log π_prox for each record of ``step``, or None for the step's own log-probabilities. Collective.

        Args:
            step: the same on all ranks.
            records: micro-batches of ``step``.
            reader: holds the micro-batches of the block's later steps.
            engine: computes the log-probabilities.
            rules: by which records are laid out.
        """
        if self._every == 1:
            return None
        if step not in self._known:
            last = self.last_needed(step)
            block = {step: records} | {later: reader.peek(later) for later in range(step + 1, last + 1)}
            self._known = {
                number: [engine.evaluate(prepare_batch(record, rules, engine.device)) for record in found]
                for number, found in block.items()
            }
        return self._known.pop(step)
