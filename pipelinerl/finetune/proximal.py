"""Computes log π_prox for steps that share a proximal policy (`finetune.rl.proximal_every`, docs/algorithms.md §2).

Before the first of a block of N steps, the log-probabilities of all its trained tokens are computed. A checkpoint
inside a block holds those of its later steps, because their weights are gone. With N = 1 it does nothing.
"""

import logging
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.engines import Engine
from pipelinerl.records import MicroBatch
from pipelinerl.streams.codec import Codec

log = logging.getLogger(__name__)


class ScoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A micro-batch's log π_prox on one rank."""

    crc32: int
    """Digest of the micro-batch's tokens (`fingerprint`)."""
    logprobs: np.ndarray
    """[K] of the rank's trained tokens, in the dtype in which the loss takes them."""


class ProximalState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's log π_prox of the steps that are left of a block, as a checkpoint holds them."""

    made_at: int
    """The weights before this step are π_prox."""
    steps: dict[int, tuple[ScoredBatch, ...]]
    """By step, in the order of the step's micro-batches."""


class _Scored(NamedTuple):
    crc32: int
    logprobs_K: Tensor
    """On the engine's device."""


_codec: Codec[ProximalState] = Codec(ProximalState)


class ProximalPolicy:
    """The log-probabilities of the current block of steps, which begins at a multiple of N.

    A run that resumes inside a block keeps the π_prox of its checkpoint, or begins a shorter block if it has none.
    """

    def __init__(self, every: int | None, max_train_steps: int):
        self._every, self._max_train_steps = every or 1, max_train_steps
        self._known: dict[int, list[_Scored]] = {}
        self._made_at: int | None = None
        self._restored: frozenset[int] = frozenset()

    @property
    def made_at(self) -> int | None:
        """The weights before this step are π_prox of the present block. None: no block has begun."""
        return self._made_at

    @property
    def is_inside_block(self) -> bool:
        """Whether later steps will be trained with the present π_prox."""
        return bool(self._known)

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
            reader: holds the micro-batches of the block's later steps.
            rules: by which records are laid out.
        """
        if self._every == 1:
            return None
        if step in self._restored and not self._fits(step, records, engine):
            log.warning("event=proximal_policy_dropped step=%d reason=the checkpoint holds it for other data", step)
            self._known, self._restored = {step: _score(records, engine, rules)}, frozenset()
            self._made_at = step
        if step not in self._known:
            if step % self._every:
                log.warning("event=proximal_block_begins_late step=%d block=%d", step, step - step % self._every)
            last = self.last_needed(step)
            block = {step: records} | {later: reader.peek(later) for later in range(step + 1, last + 1)}
            self._known = {number: _score(found, engine, rules) for number, found in block.items()}
            self._made_at = step
        return [scored.logprobs_K for scored in self._known.pop(step)]

    def state(self) -> bytes | None:
        """What a checkpoint must hold of this rank to go on inside the block. None: nothing, at a block's border."""
        if not self._known or self._made_at is None:
            return None
        steps = {
            step: tuple(ScoredBatch(crc32=one.crc32, logprobs=one.logprobs_K.cpu().numpy()) for one in scored)
            for step, scored in self._known.items()
        }
        return _codec.encode(ProximalState(made_at=self._made_at, steps=steps))

    def restore(self, state: bytes, device: torch.device) -> None:
        """Go on with the ``state`` of a checkpoint."""
        found = _codec.decode(state)
        self._made_at, self._restored = found.made_at, frozenset(found.steps)
        self._known = {
            step: [_Scored(one.crc32, torch.from_numpy(one.logprobs).to(device)) for one in batches]
            for step, batches in found.steps.items()
        }
        log.info("event=proximal_policy_restored made_at=%d steps=%s", found.made_at, sorted(found.steps))

    def _fits(self, step: int, records: Sequence[MicroBatch], engine: Engine) -> bool:
        """Whether what was restored for ``step`` belongs to ``records`` on all ranks. Collective."""
        known = [scored.crc32 for scored in self._known.get(step, ())]
        return engine.lowest(int(known == [fingerprint(record) for record in records])) == 1


def fingerprint(record: MicroBatch) -> int:
    """CRC of what a micro-batch trains: its sequences, their tokens, and which of these are trained."""
    value = zlib.crc32("\n".join(record.sequence_ids).encode())
    for array in (record.token_ids, record.segment_lengths, record.spans):
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value


def _score(records: Sequence[MicroBatch], engine: Engine, rules: BatchRules) -> list[_Scored]:
    """Log-probabilities under the present weights. Collective."""
    return [
        _Scored(fingerprint(record), engine.evaluate(prepare_batch(record, rules, engine.device))) for record in records
    ]
