"""One optimizer step from the micro-batches of one rank: accumulate, synchronise once, update.

A gradient that is not finite never changes the weights.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from pipelinerl.errors import RecordError
from pipelinerl.finetune.data import Batch, GridLayout, check_record, in_rows, packed, to_batch, with_shared_prefixes
from pipelinerl.finetune.diagnostics import StepDiagnostics, step_metrics
from pipelinerl.finetune.engines import Engine, NonFiniteGradientError
from pipelinerl.finetune.images import ImageReader
from pipelinerl.finetune.model import PolicyOutput
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.finetune.rl.tokens import SequenceGroup
from pipelinerl.finetune.sequence import slice_batch
from pipelinerl.finetune.speed import speed_metrics
from pipelinerl.observability.catalogue import MetricName, TrainerMetric
from pipelinerl.records import MicroBatch
from pipelinerl.records.prefixes import prefixes_of

Observer = Callable[[MicroBatch, PolicyOutput, torch.Tensor], None]
"""Called with a record, its outputs, and bool [K]: the tokens on which the clip or a correction acts."""


@dataclass(frozen=True, kw_only=True)
class BatchRules:
    """How records are checked and laid out. The same for every step of a run."""

    vocab_size: int
    max_lag_steps: int | None
    layout: Literal["packed", "rows", "cheaper"]
    """``cheaper`` chooses for each record the one of the other two that costs less."""
    dense_mask: bool = True
    """Whether packed attention computes the scores of all pairs of tokens and masks them."""
    tokens_per_attention_unit: int
    pad_id: int = 0
    float_dtype: torch.dtype = torch.float32
    sequence: SequenceGroup | None = None
    """Ranks that share each micro-batch. None: each rank has its own."""
    images: ImageReader | None = None
    """None: the model takes no images."""
    share_prefixes: bool = False
    """Whether a prefix that segments have in common may be computed once."""

    def layout_of(self, record: MicroBatch) -> GridLayout:
        """The cheapest layout that the rules allow."""
        lengths = record.segment_lengths
        if self.sequence is not None:
            return packed(lengths)
        if self.layout == "rows":
            return in_rows(lengths)
        layouts = [packed(lengths)]
        if self.share_prefixes:
            order_S, shared_S = prefixes_of(record)
            if shared_S.any():
                layouts.insert(0, with_shared_prefixes(lengths, order_S, shared_S))
        if self.layout == "cheaper":
            layouts.append(in_rows(lengths))
        return min(layouts, key=lambda layout: layout.cost(self.tokens_per_attention_unit, self.dense_mask))


def prepare_batch(record: MicroBatch, rules: BatchRules, device: torch.device) -> Batch:
    """Check one record and convert it to tensors on ``device``, only this rank's slice with sequence parallelism.

    Raises:
        RecordError: the record may not be trained.
    """
    index = check_record(record, rules.vocab_size, rules.max_lag_steps)
    layout = rules.layout_of(record)
    batch = to_batch(
        record, index, layout=layout, pad_id=rules.pad_id, float_dtype=rules.float_dtype, reader=rules.images
    )
    return (batch if rules.sequence is None else slice_batch(batch, rules.sequence)).to(device)


def train_step(
    engine: Engine,
    records: Sequence[MicroBatch],
    settings: LossSettings,
    rules: BatchRules,
    learning_rate: float,
    proximal: Sequence[torch.Tensor] | None = None,
    observe: Observer | None = None,
) -> dict[MetricName, float]:
    """Train one optimizer batch and return its metrics, equal on all ranks. Collective.

    Args:
        settings: of the loss.
        rules: for the layout of the records, of which every rank passes its own, and all the same number.
        proximal: [K] log π_prox of the trained tokens of each record. None: the policy's own.
        observe: called after each micro-batch. It must not wait for the device.

    Raises:
        RecordError: a record may not be trained, or the gradient is not finite. The weights are unchanged.
    """
    started = time.perf_counter()
    diagnostics = StepDiagnostics(engine.device)
    losses = []
    for number, record in enumerate(records):
        batch = prepare_batch(record, rules, engine.device)
        if proximal is not None:
            batch = replace(batch, inputs=replace(batch.inputs, proximal_logprobs_K=proximal[number]))
        output = engine.forward(batch, settings)
        engine.backward(output.loss, last=number == len(records) - 1)
        losses.append(output.loss.detach())
        altered_K = diagnostics.add(output, batch, settings)
        if observe is not None:
            observe(record, output, altered_K)
    try:
        grad_norm = engine.step(learning_rate)
    except NonFiniteGradientError as error:
        raise RecordError(f"step {records[0].step} is refused: {error}; {_suspects(records, losses)}") from error
    set_by: dict[MetricName, float] = {
        TrainerMetric.LR: learning_rate,
        TrainerMetric.KL_COEF: settings.kl_coef,
        TrainerMetric.ENTROPY_BONUS: settings.entropy_bonus,
    }
    set_by |= {TrainerMetric.MICRO_BATCHES: float(len(records))}
    if math.isfinite(grad_norm):
        set_by |= {TrainerMetric.GRAD_NORM: grad_norm}
    if engine.scaling is not None:
        scale, _, skipped = engine.scaling.tolist()
        set_by |= {TrainerMetric.LOSS_SCALE: scale, TrainerMetric.SKIPPED_STEPS: skipped}
    totals = diagnostics.reduce(engine.world_size > 1)
    return step_metrics(totals) | set_by | _speed(engine, totals, time.perf_counter() - started)


def held_out_loss(engine: Engine, records: Sequence[MicroBatch], rules: BatchRules) -> float:
    """Mean of −log π over the answers of ``records``, by their weights, in nats per token. Collective."""
    total = torch.zeros(2, dtype=torch.float64)
    for record in records:
        batch = prepare_batch(record, rules, engine.device)
        weights_K = batch.inputs.advantages_K.double()
        logprobs_K = engine.evaluate(batch).double()
        total += torch.stack([(weights_K * logprobs_K).sum(), weights_K.sum()]).cpu()
    sums = np.array(engine.gather_objects(total.tolist())).sum(axis=0)
    return float(-sums[0] / sums[1])


def _speed(engine: Engine, totals: dict[str, float], elapsed: float) -> dict[MetricName, float]:
    tokens, config = totals["total_tokens"] - totals["shared_tokens"], engine.policy.lm.config
    trained = totals["tokens"] + totals["imitated"]
    per_device = speed_metrics(config, engine.device, tokens, elapsed, engine.world_size)
    return {TrainerMetric.STEP_S: elapsed, TrainerMetric.TOKENS_PER_S: trained / elapsed} | per_device


def _suspects(records: Sequence[MicroBatch], losses: Sequence[torch.Tensor]) -> str:
    """Name the samples of the micro-batches whose loss is not finite, or of all micro-batches if there is none."""
    bad = [r for r, loss in zip(records, losses, strict=True) if not torch.isfinite(loss).item()] or records
    return "samples " + ", ".join(sample for record in bad for sample in record.sequence_ids)
