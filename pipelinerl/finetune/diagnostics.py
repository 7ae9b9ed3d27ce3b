"""Metrics of an optimizer step (docs/algorithms.md §6), from UNCLAMPED ratios, in float64.

Sums stay on the device, and are reduced over ranks and read once per optimizer step.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.model import PolicyOutput
from pipelinerl.finetune.rl.objective import LossSettings, kl_k3, policy_term
from pipelinerl.finetune.rl.tokens import LagInputs, segment_sum
from pipelinerl.observability.catalogue import MetricName, TrainerMetric

SEQUENCE_SUMS = ("sequence_ratio", "sequence_ratio_squared")
"""Ratios are divided by the step's largest one, which leaves the ESS unchanged and avoids overflow of float64."""
LARGEST_CLIP_FRACTION_LAG0 = 0.1
"""Share of clipped tokens among fresh ones, whose ratio would be 1 without the difference of both ends."""
LAG_PARTS = ("trained", "in_flight", "queued")
"""The whole lag of a trained token, the part that passed while its sequence was being sampled, and the rest."""
LAG_BIN_ENDS = (0, 1, 2, 4, 8, 16)
LAG_BINS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
LAG_COUNTS = tuple(TrainerMetric.LAG_HISTOGRAM.of(part=part, bin=name) for part in LAG_PARTS for name in LAG_BINS)


class StepSums(NamedTuple):
    """What is added up over micro-batches and ranks."""

    loss: Tensor
    tokens: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    log_ratio: Tensor
    abs_log_ratio: Tensor
    k3: Tensor
    clipped: Tensor
    corrected: Tensor
    fresh: Tensor
    clipped_fresh: Tensor
    entropy: Tensor
    kl: Tensor
    teacher_kl: Tensor
    teacher_gap: Tensor
    taught: Tensor
    value_loss: Tensor
    sequences: Tensor
    lag: Tensor
    in_flight_lag: Tensor
    reward: Tensor
    total_tokens: Tensor
    shared_tokens: Tensor
    padded_tokens: Tensor
    imitated: Tensor
    imitated_weight: Tensor
    imitated_loss: Tensor


class StepMaxima(NamedTuple):
    """Per-step maxima."""

    max_abs_log_ratio: Tensor
    max_abs_log_ratio_fresh: Tensor
    max_lag: Tensor
    max_negative_lag: Tensor


class StepDiagnostics:
    """Running sums and maxima of one optimizer step on one rank."""

    def __init__(self, device: torch.device):
        self._sums = torch.zeros(len(StepSums._fields), dtype=torch.float64, device=device)
        self._maxima = torch.full((len(StepMaxima._fields),), -torch.inf, dtype=torch.float64, device=device)
        self._lag_counts = torch.zeros(len(LAG_COUNTS), dtype=torch.float64, device=device)
        self._lag_bin_ends = torch.tensor(LAG_BIN_ENDS, device=device)
        self._sequence_log_ratios = [torch.full((1,), -torch.inf, dtype=torch.float64, device=device)]

    @torch.no_grad()
    def add(self, output: PolicyOutput, batch: Batch, settings: LossSettings) -> Tensor:
        """Add one micro-batch. Returns bool [K]: the tokens on which the loss's clip or a correction acts.

        Tokens that are imitated count for their own loss alone.
        """
        inputs, lags = output.inputs, batch.lags
        logprobs_K, entropy_K = output.logprobs_K, output.entropy_K
        imitated_K = inputs.supervised_K
        imitated = imitated_weight = imitated_loss = output.loss.new_zeros((), dtype=torch.float64)
        if imitated_K is not None:
            weights_K = torch.where(imitated_K, inputs.advantages_K, 0.0).double()
            imitated, imitated_weight = imitated_K.sum().double(), weights_K.sum()
            imitated_loss = -(weights_K * logprobs_K.detach().double()).sum()
            inputs, lags = replace(inputs[~imitated_K], supervised_K=None), lags[~imitated_K]
            logprobs_K, entropy_K = logprobs_K[~imitated_K], entropy_K[~imitated_K]
        log_ratio_K = logprobs_K.double() - inputs.sampler_logprobs_K.double()
        ratio_K = log_ratio_K.exp()
        counts_S = segment_sum(torch.ones_like(log_ratio_K), inputs)
        sums_S = segment_sum(log_ratio_K, inputs)
        first = inputs.group is None or inputs.group.index == 0
        trained_S = (counts_S > 0) & first
        self._sequence_log_ratios.append(torch.where(trained_S, sums_S, -torch.inf))
        self._count_lags(lags)
        lag_K = lags.lag_K.double()
        zero = log_ratio_K.new_zeros(())
        kl, teacher_K = inputs.ref_logprobs_K, inputs.teacher_logprobs_K
        teacher_gap_K = zero if teacher_K is None else logprobs_K.double() - teacher_K.double()
        older_S = segment_sum((lags.lag_K > 0).double(), inputs)
        fresh_K = (older_S == 0)[inputs.segments_K]
        loss, tokens = policy_term(logprobs_K, inputs, settings, entropy_K)
        clipped = zero if loss.clipped_K is None else loss.clipped_K.sum().double()
        clipped_fresh = zero if loss.clipped_K is None else (loss.clipped_K & fresh_K).sum().double()
        self._sums += torch.stack(
            StepSums(
                loss=output.loss.double(),
                tokens=torch.full_like(zero, logprobs_K.shape[0]),
                ratio=ratio_K.sum(),
                ratio_squared=ratio_K.square().sum(),
                log_ratio=log_ratio_K.sum(),
                abs_log_ratio=log_ratio_K.abs().sum(),
                k3=(ratio_K - log_ratio_K - 1.0).sum(),
                clipped=clipped,
                corrected=tokens.corrected_K.sum().double(),
                fresh=fresh_K.sum().double(),
                clipped_fresh=clipped_fresh,
                entropy=entropy_K.double().sum(),
                kl=zero if kl is None else kl_k3(logprobs_K.double(), kl.double(), settings.kl_clamp).sum(),
                teacher_kl=teacher_gap_K.sum(),
                teacher_gap=teacher_gap_K.abs().sum(),
                taught=torch.full_like(zero, 0 if teacher_K is None else logprobs_K.shape[0]),
                value_loss=output.value_loss.double(),
                sequences=trained_S.sum().double(),
                lag=lag_K.sum(),
                in_flight_lag=lags.in_flight_K.double().sum(),
                reward=torch.where(trained_S, batch.segment_rewards_S.double(), 0.0).sum(),
                total_tokens=torch.full_like(zero, batch.num_tokens if first else 0),
                shared_tokens=torch.full_like(zero, batch.num_shared if first else 0),
                padded_tokens=torch.full_like(zero, batch.input_ids.numel()),
                imitated=imitated,
                imitated_weight=imitated_weight,
                imitated_loss=imitated_loss,
            )
        )
        if logprobs_K.shape[0]:
            magnitude_K = log_ratio_K.abs()
            largest = StepMaxima(
                max_abs_log_ratio=magnitude_K.max(),
                max_abs_log_ratio_fresh=torch.where(fresh_K, magnitude_K, 0.0).max(),
                max_lag=lag_K.max(),
                max_negative_lag=(-lag_K).max(),
            )
            self._maxima = torch.maximum(self._maxima, torch.stack(largest))
        altered_K = tokens.corrected_K if loss.clipped_K is None else tokens.corrected_K | loss.clipped_K
        if imitated_K is None:
            return altered_K
        return torch.zeros_like(imitated_K).masked_scatter(~imitated_K, altered_K)

    def _count_lags(self, lags: LagInputs) -> None:
        parts = torch.stack([lags.lag_K, lags.in_flight_K, lags.lag_K - lags.in_flight_K])
        bins = torch.bucketize(parts, self._lag_bin_ends)
        bins += len(LAG_BINS) * torch.arange(len(LAG_PARTS), device=bins.device)[:, None]
        self._lag_counts.index_add_(0, bins.flatten(), self._lag_counts.new_ones(bins.numel()))

    def reduce(self, distributed: bool) -> dict[str, float]:
        """Totals over all ranks. Waits for the device, which nothing else here does. Collective if ``distributed``."""
        sequences = torch.cat(self._sequence_log_ratios)
        maxima = torch.cat([self._maxima, sequences.max()[None]])
        if distributed:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        ratios = (sequences - maxima[-1].clamp(min=torch.finfo(maxima.dtype).min)).exp()
        sums = torch.cat([self._sums, torch.stack([ratios.sum(), ratios.square().sum()]), self._lag_counts])
        if distributed:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        names = StepSums._fields + SEQUENCE_SUMS + LAG_COUNTS + StepMaxima._fields
        return dict(zip(names, torch.cat([sums, maxima[:-1]]).tolist(), strict=True))


def step_metrics(totals: dict[str, float]) -> dict[MetricName, float]:
    """Compute the metrics of a step, by name, from the totals of ``StepDiagnostics.reduce``."""
    tokens, sequences = max(totals["tokens"], 1.0), max(totals["sequences"], 1.0)
    trained, computed = totals["tokens"] > 0, totals["total_tokens"] - totals["shared_tokens"]
    mean_square = totals["ratio_squared"] / tokens
    return (
        {
            TrainerMetric.LOSS: totals["loss"],
            TrainerMetric.VALUE_LOSS: totals["value_loss"],
            TrainerMetric.TOKENS: totals["tokens"] + totals["imitated"],
            TrainerMetric.SEQUENCES: totals["sequences"],
            TrainerMetric.INPUT_TOKENS: totals["total_tokens"],
            TrainerMetric.SHARED_TOKENS: totals["shared_tokens"],
            TrainerMetric.PADDING_FRACTION: 1.0 - computed / max(totals["padded_tokens"], 1.0),
            TrainerMetric.REWARD: totals["reward"] / sequences,
            TrainerMetric.ENTROPY: totals["entropy"] / tokens,
            TrainerMetric.KL_REF: totals["kl"] / tokens,
            TrainerMetric.ESS: _ess(totals["ratio"], totals["ratio_squared"], totals["tokens"]),
            TrainerMetric.ESS_SEQUENCE: _ess(
                totals["sequence_ratio"], totals["sequence_ratio_squared"], totals["sequences"]
            ),
            TrainerMetric.KL_K1: -totals["log_ratio"] / tokens,
            TrainerMetric.KL_K3: totals["k3"] / tokens,
            TrainerMetric.CHI_SQUARED: mean_square - 1.0 if trained else 0.0,
            TrainerMetric.LOGRATIO_ABS_MEAN: totals["abs_log_ratio"] / tokens,
            TrainerMetric.LOGRATIO_ABS_MAX: totals["max_abs_log_ratio"] if trained else 0.0,
            TrainerMetric.LOGRATIO_ABS_MAX_LAG0: totals["max_abs_log_ratio_fresh"] if trained else 0.0,
            TrainerMetric.CLIP_FRACTION: totals["clipped"] / tokens,
            TrainerMetric.CLIP_FRACTION_LAG0: totals["clipped_fresh"] / max(totals["fresh"], 1.0),
            TrainerMetric.CORRECTED_FRACTION: totals["corrected"] / tokens,
            TrainerMetric.LAG_MIN: -totals["max_negative_lag"] if trained else 0.0,
            TrainerMetric.LAG_MEAN: totals["lag"] / tokens,
            TrainerMetric.LAG_MAX: totals["max_lag"] if trained else 0.0,
            TrainerMetric.LAG_IN_FLIGHT_MEAN: totals["in_flight_lag"] / tokens,
            TrainerMetric.LAG_QUEUED_MEAN: (totals["lag"] - totals["in_flight_lag"]) / tokens,
        }
        | {name: totals[name] / tokens for name in LAG_COUNTS}
        | _teacher_metrics(totals)
        | _imitation_metrics(totals)
    )


def _teacher_metrics(totals: dict[str, float]) -> dict[MetricName, float]:
    if not totals["taught"]:
        return {}
    kl, gap = totals["teacher_kl"] / totals["taught"], totals["teacher_gap"] / totals["taught"]
    return {TrainerMetric.KL_TEACHER: kl, TrainerMetric.TEACHER_GAP: gap}


def _imitation_metrics(totals: dict[str, float]) -> dict[MetricName, float]:
    if not totals["imitated"]:
        return {}
    mean = totals["imitated_loss"] / totals["imitated_weight"]
    return {TrainerMetric.SFT_TOKENS: totals["imitated"], TrainerMetric.SFT_LOSS: mean}


def clip_warning(metrics: dict[MetricName, float]) -> str | None:
    """A warning with a remedy if the clip acts on many tokens of the version in training. Their ratio is noise."""
    share = metrics[TrainerMetric.CLIP_FRACTION_LAG0]
    if share <= LARGEST_CLIP_FRACTION_LAG0:
        return None
    return (
        f"the loss clips {share:.0%} of the tokens that the present weights sampled: there the ratio shows no "
        "change of the policy but the numerical difference between server and trainer. Set finetune.rl.proximal_every, "
        "so that the ratio is taken to the trainer's own policy, or widen finetune.rl.epsilon_low and epsilon_high"
    )


def _ess(total: float, total_of_squares: float, count: float) -> float:
    """(Σρ)²/(N·Σρ²): 1 when all ratios are equal, 1/N when one dominates."""
    return total * total / (count * total_of_squares) if count and total_of_squares else 0.0
