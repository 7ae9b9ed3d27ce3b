"""Compares the predictions of the model of docs/algorithms.md §8 with a run's measurements, after the run."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.config.load import load_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.observability.catalogue import STEP, TIME, ActorMetric, MetricName, TrainerMetric
from pipelinerl.observability.metrics import Points, read_metrics
from pipelinerl.plan.lengths import Lengths
from pipelinerl.records import ActorRecord, RolloutGroup
from pipelinerl.records.topics import ACTOR
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend

WARM_UP_SHARE = 0.1
"""Share of the optimizer steps that is left out, because of compilation and empty queues."""
MAX_GROUPS = 2000


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of the prediction."""

    batch_size: int
    generation_tokens_per_s: float
    """All servers, counting only the time in which rollouts are in progress."""
    latency_s: float
    """Mean time of a rollout."""
    train_tokens_per_s: float
    """The whole trainer, counting only the time in which it does not wait for data."""
    mean_tokens: float
    longest_tokens: float
    mean_square_tokens: float | None = None
    """None if the lengths of the run's rollouts are no longer available."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One compared quantity."""

    name: str
    predicted: float
    measured: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None or not self.predicted else self.measured / self.predicted


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput and in-flight lag of a pipeline."""

    generation_rate: float
    training_rate: float
    rate: float
    largest_in_flight_lag: float
    mean_in_flight_lag: float | None

    @property
    def trainer_waits(self) -> float:
        """Share of the trainer's time without work."""
        return 1.0 - self.rate / self.training_rate


def predict(facts: RunFacts) -> Prediction:
    """r = min(generation, training). A token's in-flight lag is the optimizer steps until its sequence ends."""
    rate = min(facts.generation_tokens_per_s, facts.train_tokens_per_s)
    token_time = facts.latency_s / facts.mean_tokens
    steps_per_s = rate / (facts.mean_tokens * facts.batch_size)
    remaining = None if facts.mean_square_tokens is None else facts.mean_square_tokens / (2 * facts.mean_tokens)
    return Prediction(
        generation_rate=facts.generation_tokens_per_s,
        training_rate=facts.train_tokens_per_s,
        rate=rate,
        largest_in_flight_lag=facts.longest_tokens * token_time * steps_per_s,
        mean_in_flight_lag=None if remaining is None else remaining * token_time * steps_per_s,
    )


def compare_prediction(facts: RunFacts, steps: Points) -> tuple[Prediction, tuple[Line, ...]]:
    """Compare prediction and measurement. ``steps`` are the trainer's points after the warm-up."""
    prediction = predict(facts)
    seconds = steps[-1][TIME] - steps[0][TIME]
    lines = [
        Line(
            name="trained tokens/s",
            predicted=prediction.rate,
            measured=sum(point[TrainerMetric.TOKENS] for point in steps[1:]) / seconds,
        ),
        Line(
            name="trainer waits for data (share of time)",
            predicted=prediction.trainer_waits,
            measured=sum(point[TrainerMetric.WAIT_S] for point in steps[1:]) / seconds,
        ),
    ]
    if prediction.mean_in_flight_lag is not None:
        lines.append(
            Line(
                name="mean in-flight lag (optimizer steps)",
                predicted=prediction.mean_in_flight_lag,
                measured=_weighted(steps, TrainerMetric.LAG_IN_FLIGHT_MEAN),
            )
        )
    lines.append(
        Line(
            name="largest lag (in flight / with queues, optimizer steps)",
            predicted=prediction.largest_in_flight_lag,
            measured=max(point[TrainerMetric.LAG_MAX] for point in steps),
        )
    )
    return prediction, tuple(lines)


def facts_of_run(
    cfg: Config,
    actor_points: Points,
    steps: Points,
    lengths: Lengths | None,
) -> RunFacts:
    """Return the rates of a run from its metrics and, if they still exist, the lengths of its rollouts.

    Raises:
        ConfigError: the run has too few metrics.
    """
    known = [point for point in actor_points if point.get(ActorMetric.GENERATING_S) and ActorMetric.LATENCY_S in point]
    if not known or len(steps) < 3:
        raise ConfigError("the run has too few metrics to compare: it needs at least 4 optimizer steps")
    latest = known[-1]
    seconds = steps[-1][TIME] - steps[0][TIME]
    busy = seconds - sum(point[TrainerMetric.WAIT_S] for point in steps[1:])
    return RunFacts(
        batch_size=cfg.batch_size,
        generation_tokens_per_s=_generation_rate(known, steps),
        latency_s=latest[ActorMetric.LATENCY_S],
        train_tokens_per_s=sum(point[TrainerMetric.TOKENS] for point in steps[1:]) / busy,
        mean_tokens=lengths.mean if lengths else latest[ActorMetric.OUTPUT_TOKENS],
        longest_tokens=lengths.longest if lengths else latest[ActorMetric.OUTPUT_TOKENS_MAX],
        mean_square_tokens=lengths.mean_square if lengths else None,
    )


def _generation_rate(points: Points, steps: Points) -> float:
    """Tokens per second of generation between the actor's first and last points during the steps."""
    totals = [point[ActorMetric.GENERATING_S] for point in points]
    started = max((i for i in range(1, len(totals)) if totals[i] < totals[i - 1]), default=0)
    inside = [point for point in points[started:] if steps[0][TIME] <= point[TIME] <= steps[-1][TIME]]
    if len(inside) < 2 or inside[0][ActorMetric.GENERATING_S] == inside[-1][ActorMetric.GENERATING_S]:
        raise ConfigError(
            f"the actor logged {len(inside)} time(s) while {len(steps)} steps were trained, two are needed: "
            "compare a longer run, or lower actor.log_every_s"
        )
    first, last = inside[0], inside[-1]
    return (last[ActorMetric.TOKENS_GENERATED] - first[ActorMetric.TOKENS_GENERATED]) / (
        last[ActorMetric.GENERATING_S] - first[ActorMetric.GENERATING_S]
    )


def compare_run(run_dir: Path) -> tuple[RunFacts, Prediction, tuple[Line, ...]]:
    """Compare prediction and measurement of a finished or running run folder."""
    cfg = load_run(run_dir)
    points = {point[STEP]: point for point in read_metrics(run_dir, "finetune")}
    steps = [points[step] for step in sorted(points)]
    steps = steps[int(len(steps) * WARM_UP_SHARE) :]
    facts = facts_of_run(cfg, read_metrics(run_dir, "actor"), steps, run_lengths(cfg, run_dir))
    prediction, lines = compare_prediction(facts, steps)
    return facts, prediction, lines


def run_lengths(cfg: Config, run_dir: Path) -> Lengths | None:
    """Lengths of the rollouts that the files of topic `actor` still hold. None if there are none."""
    if cfg.streams.backend != "files":
        return None
    read_files_of(cfg)
    tokens: list[int] = []
    for replica in range(cfg.world.replicas):
        with open_reader(SingleStreamSpec(run_dir, ACTOR, replica), ActorRecord, name=None) as reader:
            while len(tokens) < MAX_GROUPS * cfg.attempts and (batch := reader.poll(0)):
                groups = (record for _, record in batch if isinstance(record, RolloutGroup))
                tokens += [
                    sum(len(sequence.logprobs) for sequence in rollout.sequences)
                    for group in groups
                    for rollout in group.rollouts
                ]
    return Lengths.from_samples(tokens) if any(tokens) else None


def read_files_of(cfg: Config) -> None:
    if cfg.streams.backend != "files":
        raise ConfigError("streams.backend is redis: its topics are gone with the run, only the metrics remain")
    set_streams_backend("files")


def _weighted(steps: Points, name: MetricName) -> float | None:
    known = [point for point in steps if point.get(name) is not None]
    total = sum(point[TrainerMetric.TOKENS] for point in known)
    return sum(point[name] * point[TrainerMetric.TOKENS] for point in known) / total if total else None


def run_compare(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    facts, prediction, lines = compare_run(args.run_dir)
    table = Table(title=f"{escape(str(args.run_dir))}: model and measurement", title_justify="left")
    for column in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(column, justify="left" if not column else "right")
    for line in lines:
        ratio = "–" if line.ratio is None else f"{line.ratio:.2f}"
        measured = "–" if line.measured is None else f"{line.measured:,.2f}"
        table.add_row(line.name, f"{line.predicted:,.2f}", measured, ratio)
    console.print(table)
    side = "generation" if prediction.generation_rate < prediction.training_rate else "training"
    balance = prediction.generation_rate / prediction.training_rate
    console.print(
        f"{side} is the narrow side: generation could give {prediction.generation_rate:,.0f} tokens/s, training "
        f"{prediction.training_rate:,.0f} (ratio {balance:.2f}; 1 is balanced)"
    )
    return {
        "facts": msgspec.to_builtins(facts),
        "prediction": msgspec.to_builtins(prediction),
        "lines": [{**msgspec.to_builtins(line), "ratio": line.ratio} for line in lines],
    }
