"""Text and JSON of a replayed step. Pure."""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipelinerl.inspect.decode import TokenText
from pipelinerl.inspect.replay.compare import Agreement, StepComparison
from pipelinerl.inspect.replay.folder import ReplayedSequence, ReplayedStep, ReplayPlan
from pipelinerl.observability.catalogue import TrainerMetric

HEADLINES = (
    TrainerMetric.LOSS,
    TrainerMetric.GRAD_NORM,
    TrainerMetric.REWARD,
    TrainerMetric.ENTROPY,
    TrainerMetric.KL_K3,
    TrainerMetric.ESS,
    TrainerMetric.CLIP_FRACTION,
    TrainerMetric.CORRECTED_FRACTION,
)
DIFFERENCES = 8
"""Metrics and sequences that differ and are named. The rest is counted."""
TOKEN_COLUMNS = ("version", "sampler", "trainer", "ratio", "advantage", "entropy", "loss", "slope")


class TokenPlace(NamedTuple):
    """One trained token: its sequence, and its number among that sequence's trained tokens."""

    sequence: int
    token: int


def heading(plan: ReplayPlan, step: ReplayedStep) -> list[str]:
    tokens = sum(len(sequence.token_ids) for sequence in step.sequences)
    before = plan.step - plan.first
    start = f"from the checkpoint of step {plan.first}" if plan.first else "from the run's model"
    trained = f", after training {before} step{'s' * (before != 1)} again" if before else ""
    counted = f"{len(step.sequences)} sequences, {tokens} trained tokens" if step.sequences else "no figures of tokens"
    ranks = f"{plan.num_ranks} rank{'s' * (plan.num_ranks != 1)}"
    return [f"step {plan.step}: {counted}, on {ranks} {start}{trained}", *_proximal(plan, step)]


def _proximal(plan: ReplayPlan, step: ReplayedStep) -> list[str]:
    """Which policy is π_prox, if it is not the step's own."""
    made_at, block = step.proximal_made_at, plan.step - plan.step % plan.proximal_every
    if made_at is None:
        return []
    text = f"  its ratio is to the policy before step {made_at}, π_prox of its block"
    if made_at < plan.first:
        return [f"{text}, whose log-probabilities are in the checkpoint"]
    if made_at > block:
        return [
            f"{text}. That begins with step {block}, but no checkpoint holds the rest of it: unless the run began one "
            f"at step {made_at}, too, its figures are others"
        ]
    return [text]


def verdict(found: StepComparison) -> list[str]:
    """What is equal to the run's own record, and what is not."""
    if found.is_empty:
        return ["the run recorded nothing about this step to compare with"]
    lines = [f"  {found.metrics_compared - len(found.metrics)} of {found.metrics_compared} metrics bit-equal"]
    for name, (theirs, ours) in list(found.metrics.items())[:DIFFERENCES]:
        lines.append(f"    {name}: recorded {theirs!r}, replayed {ours!r}")
    kinds = {"log-probabilities": found.logprobs, "entropies": found.entropy, "advantages": found.advantages}
    lines += [f"  {_agreement(kind, agreement)}" for kind, agreement in kinds.items() if agreement.compared]
    names = sorted(found.sequences)
    if names:
        more = f" and {len(names) - DIFFERENCES} more" if len(names) > DIFFERENCES else ""
        lines.append(f"  sequences that differ: {', '.join(names[:DIFFERENCES])}{more}")
    return ["EQUAL to the run, bit for bit" if found.is_equal else "NOT EQUAL to the run", *lines]


def _agreement(kind: str, found: Agreement) -> str:
    text = f"{found.compared - found.different} of {found.compared} recorded {kind} bit-equal"
    return f"{text}, the largest difference is {found.largest:.3g}" if found.different else text


def objectives(own: ReplayedStep, other: ReplayedStep | None) -> list[str]:
    """The step's figures under the run's objective, and beside them under another one."""
    rows: list[tuple[str, float, float | None]] = [
        (name, own.metrics[name], None if other is None else other.metrics[name]) for name in HEADLINES
    ]
    rows.append(("update_norm", own.update_norm, None if other is None else other.update_norm))
    lines = [
        f"  {name:<20} {ours:>14.7g}" + ("" if theirs is None else f" {theirs:>14.7g}") for name, ours, theirs in rows
    ]
    if other is None:
        return lines
    return [
        f"  {'':<20} {'the run':>14} {'--with':>14}",
        *lines,
        f"  the two updates of the parameters have a cosine of {other.update_cosine:.4f}",
    ]


def largest_tokens(step: ReplayedStep, count: int, other: ReplayedStep | None = None) -> list[TokenPlace]:
    """The tokens with the largest part of the loss. With another objective: those whose slope changes most."""
    theirs = {sequence.sequence_id: sequence.slopes for sequence in other.sequences} if other is not None else {}

    def sizes() -> Iterator[tuple[float, TokenPlace]]:
        for number, sequence in enumerate(step.sequences):
            values = sequence.slopes - theirs[sequence.sequence_id] if theirs else sequence.losses
            order = np.argsort(-np.abs(values), kind="stable")[:count]
            yield from ((float(abs(values[token])), TokenPlace(number, int(token))) for token in order if values[token])

    return [place for _, place in heapq.nlargest(count, sizes(), key=lambda entry: entry[0])]


def token_table(
    step: ReplayedStep, places: Sequence[TokenPlace], text: TokenText, other: ReplayedStep | None = None
) -> list[str]:
    """One line per token. ``other``: the same step under another objective, for one more column."""
    theirs = {sequence.sequence_id: sequence for sequence in other.sequences} if other is not None else {}
    columns = "".join(f"{name:>11}" for name in (*TOKEN_COLUMNS, *(["--with"] if theirs else [])))
    lines = [f"  {'token':<18} {'place':>6}{columns}  of sequence"]
    for place in places:
        sequence = step.sequences[place.sequence]
        figures = _figures(sequence, place.token)
        if theirs:
            figures.append(float(theirs[sequence.sequence_id].slopes[place.token]))
        version, *rest = figures
        shown = repr(text.pieces([int(sequence.token_ids[place.token])])[0])[:18]
        numbers = "".join(f"{value:>11.4g}" for value in rest)
        position = int(sequence.positions[place.token])
        lines.append(f"  {shown:<18} {position:>6}{version:>11}{numbers}  {sequence.sequence_id}")
    return lines


def _figures(sequence: ReplayedSequence, token: int) -> list[Any]:
    """In the order of ``TOKEN_COLUMNS``."""
    columns = (
        sequence.sampler_logprobs,
        sequence.logprobs,
        sequence.ratios,
        sequence.advantages,
        sequence.entropy,
        sequence.losses,
        sequence.slopes,
    )
    return [int(sequence.versions[token]), *(float(column[token]) for column in columns)]


def as_json(plan: ReplayPlan, found: StepComparison, own: ReplayedStep, other: ReplayedStep | None) -> dict[str, Any]:
    """Everything, with one array per field of a sequence."""
    return {
        "step": plan.step,
        "from_checkpoint": plan.first,
        "ranks": plan.num_ranks,
        "proximal_made_at": own.proximal_made_at,
        "equal": found.is_equal,
        "different_metrics": found.metrics,
        "different_sequences": sorted(found.sequences),
        "compared": {
            "metrics": found.metrics_compared,
            "logprobs": found.logprobs.compared,
            "entropies": found.entropy.compared,
            "advantages": found.advantages.compared,
        },
        "run": _step_json(own),
        "with": None if other is None else _step_json(other),
    }


def _step_json(step: ReplayedStep) -> dict[str, Any]:
    return {
        "metrics": step.metrics,
        "update_norm": step.update_norm,
        "update_cosine": step.update_cosine,
        "sequences": [
            {name: getattr(sequence, name) for name in (*sequence.__struct_fields__, "ratios")}
            for sequence in step.sequences
        ],
    }
