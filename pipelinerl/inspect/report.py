"""Summarises a run from its own records. A figure without a record is None, never 0."""

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.config.paths import CURVE_FILE, REPORT_FILE, SUMMARY_FILE, metrics_file
from pipelinerl.config.sections import Config
from pipelinerl.inspect.balance import balance_figures, balance_line
from pipelinerl.inspect.card import write_cards
from pipelinerl.observability.catalogue import STEP, ActorMetric, MetricName, PreprocessorMetric, TrainerMetric
from pipelinerl.observability.metrics import Point, Points, points_of, read_metrics
from pipelinerl.observability.status import StatusRecord, read_statuses
from pipelinerl.records.messages import (
    EvaluationDone,
    EvaluationMessage,
    SamplesProcessed,
    TrainerMessage,
    TrainingResumed,
    WeightUpdateSuccess,
)
from pipelinerl.records.rollouts import ActorRecord, RolloutGroup
from pipelinerl.records.topics import ACTOR, EVALUATION, TRAINER
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.world.disk import replace_file


@dataclass(kw_only=True)
class RolloutTotals:
    """Totals over the actors' groups. They are added record by record, because a long topic does not fit in memory."""

    rollouts: int = 0
    tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of rollouts by their number of sampled tokens."""
    versions: Counter[int] = field(default_factory=Counter)
    """Number of rollouts by their number of weight versions."""
    is_complete: bool = True
    """False if older groups were deleted from the topic before they were counted."""

    def add(self, group: RolloutGroup) -> None:
        for rollout in group.rollouts:
            self.rollouts += 1
            self.tokens += rollout.num_sampled
            self.lengths[rollout.num_sampled] += 1
            self.versions[len(rollout.versions)] += 1


@dataclass(kw_only=True)
class RunRecords:
    """The records of a run's topics from which the summary is made."""

    trainer: list[TrainerMessage] = field(default_factory=list)
    evaluations: list[EvaluationDone] = field(default_factory=list)
    rollouts: RolloutTotals = field(default_factory=RolloutTotals)


def read_records(run_dir: Path, *, replicas: int = 1, with_rollouts: bool = True) -> RunRecords:
    """Read the topics of a run from their beginning. The streams backend must be set.

    ``with_rollouts``: also read the groups, which takes long for a long run.
    """
    records = RunRecords()
    with open_reader(SingleStreamSpec(run_dir, TRAINER), TrainerMessage, name=None, over_damage=True) as reader:
        records.trainer = [message for _, message in reader.read_all()]
    for replica in range(replicas):
        with open_reader(
            SingleStreamSpec(run_dir, EVALUATION, replica), EvaluationMessage, name=None, over_damage=True
        ) as reader:
            records.evaluations += [m for _, m in reader.read_all() if isinstance(m, EvaluationDone)]
        if with_rollouts:
            read_rollouts(SingleStreamSpec(run_dir, ACTOR, replica), records.rollouts)
    return records


def read_rollouts(spec: SingleStreamSpec, totals: RolloutTotals) -> None:
    """Add a topic of groups to the totals, one batch at a time."""
    with open_reader(spec, ActorRecord, name=None, over_damage=True) as reader:
        batch = reader.poll(0)
        totals.is_complete &= not batch or batch[0][0] == 0
        while batch:
            for _, record in batch:
                if isinstance(record, RolloutGroup):
                    totals.add(record)
            batch = reader.poll(0)


def summarise(
    records: RunRecords,
    actor_points: Points,
    *,
    wall_s: float,
    seed: int,
    phases: Mapping[str, Any] | None = None,
    imitation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compute the figures of `summary.json`. A run that only imitates has no figures of rollouts.

    Args:
        wall_s: seconds of all launches that ended by themselves. The seconds of training count where they are more.
        phases: see `phases_of`.
        imitation: see `imitation_of`. None or empty: the run imitates nothing.
    """
    steps = last_per_step(records.trainer)
    evaluations = sorted(records.evaluations, key=lambda evaluation: evaluation.version)
    updates = {m.version: m for m in records.trainer if isinstance(m, WeightUpdateSuccess) and m.version > 0}
    pauses = [pause for update in updates.values() for pause in update.pause_ms]
    training_s = training_seconds(records.trainer, evaluations)
    trained = sum(step.metrics.get(TrainerMetric.TOKENS, 0.0) for step in steps)
    seen = records.rollouts
    rollouts = seen.rollouts if seen.is_complete else latest(actor_points, ActorMetric.SAMPLES_PUBLISHED)
    of_all_runs = {
        **({"imitation": dict(imitation)} if imitation else {}),
        "tokens_trained_per_s": rate(trained, training_s),
        "tokens_shared": shared_share(steps),
        "training_s": training_s,
        "wall_s": max(wall_s, training_s or 0.0),
        "phases": dict(phases or {}),
        "seed": seed,
    }
    if imitation and imitates_alone(steps[-1]):
        return {"optimizer_steps": steps[-1].step, **of_all_runs}
    return {
        **before_and_after(evaluations),
        "optimizer_steps": steps[-1].step if steps else 0,
        "weight_updates": len(updates),
        "rollouts": rollouts,
        "rollouts_trained": steps[-1].samples_processed if steps else 0,
        "rollouts_per_s": rate(rollouts, training_s),
        "aborted_requests": latest(actor_points, ActorMetric.ABORTED_REQUESTS),
        "pause_ms": middle_and_worst(pauses),
        "lag_steps": lag_steps(steps),
        "versions_in_one_rollout_median": percentile(seen.versions, 50) if seen.is_complete else None,
        "versions_in_one_rollout_max": max(seen.versions, default=0)
        if seen.is_complete
        else largest_value(actor_points, ActorMetric.VERSIONS_IN_ONE_ROLLOUT_MAX),
        "tokens_in_one_rollout": {
            "median": percentile(seen.lengths, 50) if seen.is_complete else None,
            "p99": percentile(seen.lengths, 99) if seen.is_complete else None,
        },
        "tokens_generated_per_s": rate(
            seen.tokens if seen.is_complete else latest(actor_points, ActorMetric.TOKENS_GENERATED), training_s
        ),
        **of_all_runs,
    }


def imitates_alone(step: SamplesProcessed) -> bool:
    """Whether a step trained conversations and no rollouts."""
    return TrainerMetric.SFT_LOSS in step.metrics and not step.metrics.get(TrainerMetric.SEQUENCES)


def imitation_of(
    trainer_points: Points, preprocessor_points: Points, steps: Sequence[SamplesProcessed], cfg: Config
) -> dict[str, Any]:
    """What a run imitated: its first and last loss in nats per token, and the rows. Empty if it imitated nothing.

    Args:
        trainer_points: metrics. Point 0 has the held-out loss of the first weights.
        steps: see `last_per_step`.
    """
    losses = curve(steps, TrainerMetric.SFT_LOSS)
    if not losses:
        return {}
    held_out = held_out_curve(trainer_points)
    rows = latest(preprocessor_points, PreprocessorMetric.SFT_ROWS)
    trained = losses[-1][0] * (cfg.batch_size if cfg.stage == "sft" else cfg.sft.per_step)
    return {
        "loss_first": losses[0][1],
        "loss_last": losses[-1][1],
        "held_out_first": held_out[0][1] if held_out else None,
        "held_out_last": held_out[-1][1] if held_out else None,
        "rows": rows,
        "rows_left_out": latest(preprocessor_points, PreprocessorMetric.SFT_ROWS_LEFT_OUT),
        "epochs": trained / rows if rows else None,
    }


def held_out_curve(trainer_points: Points) -> list[tuple[int, float]]:
    """(optimizer step, loss) of the held-out conversations. Of a repeated step the newest point counts."""
    name = TrainerMetric.SFT_TEST_LOSS
    return sorted({point[STEP]: point[name] for point in trainer_points if point.get(name) is not None}.items())


def before_and_after(evaluations: Sequence[EvaluationDone]) -> dict[str, float | None]:
    """Success and reward of the first and the last evaluation. One alone is "before" if it is of the first weights."""
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    if first is last and first is not None:
        first, last = (first, None) if first.version == 0 else (None, last)
    return {
        "success_before": None if first is None else first.success,
        "success_after": None if last is None else last.success,
        "reward_before": None if first is None else first.reward,
        "reward_after": None if last is None else last.reward,
    }


def lag_steps(steps: Sequence[SamplesProcessed]) -> dict[str, float | None]:
    """Mean lag over tokens and largest lag, in optimizer steps."""
    return {
        "mean": weighted_mean(
            (step.metrics.get(TrainerMetric.LAG_MEAN), step.metrics.get(TrainerMetric.TOKENS, 1.0)) for step in steps
        ),
        "max": max((value for _, value in curve(steps, TrainerMetric.LAG_MAX)), default=None),
    }


def phases_of(
    records: RunRecords, statuses: Mapping[str, StatusRecord], *, launched: float, started: float, now: float
) -> dict[str, Any]:
    """Seconds of each phase of this launch, in order. Phases that did not happen are left out.

    Args:
        statuses: of the roles, for `ready`: seconds from the start of each role to its first progress.
        launched: Unix time when the launcher's process began.
        started: Unix time when it started the roles.
    """
    live = [m.timestamp for m in records.trainer if isinstance(m, WeightUpdateSuccess) and m.timestamp >= started]
    steps = [m.timestamp for m in records.trainer if isinstance(m, SamplesProcessed) and m.timestamp >= started]
    tests = [e.timestamp for e in records.evaluations if e.timestamp >= started]
    before = [t for t in tests if steps and t < min(steps)]
    after = [t for t in tests if steps and t > max(steps)]
    ends = {
        "checks": [started],
        "start": live and [min(live)],
        "first_evaluation": before[:1],
        "training": steps and [max(steps)],
        "last_evaluation": after[-1:],
        "ending": [now],
    }
    phases: dict[str, Any] = {}
    previous = launched
    for name, (*_, end) in ((name, found) for name, found in ends.items() if found):
        phases[name], previous = round(end - previous, 2), end
    ready = {name: status.fields["ready_s"] for name, status in statuses.items() if "ready_s" in status.fields}
    return phases | {"ready": ready}


def middle_and_worst(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "median": statistics.median(values) if values else None,
        "mean": statistics.fmean(values) if values else None,
        "max": max(values, default=None),
    }


def curve(steps: Iterable[SamplesProcessed], name: MetricName) -> list[tuple[int, float]]:
    """(optimizer step, value) of a metric of the trainer, of the steps that have it."""
    return [(step.step, step.metrics[name]) for step in steps if name in step.metrics]


def largest_value(points: Points, name: MetricName) -> Any:
    """The largest value of a metric that starts again with each process. None if no point has it."""
    return max((point[name] for point in points if point.get(name) is not None), default=None)


def last_per_step(messages: Iterable[TrainerMessage]) -> list[SamplesProcessed]:
    """The newest message of every optimizer step, in order of the steps. A resumed trainer repeats steps."""
    return sorted({m.step: m for m in messages if isinstance(m, SamplesProcessed)}.values(), key=lambda m: m.step)


def training_seconds(messages: Sequence[TrainerMessage], evaluations: Sequence[EvaluationDone] = ()) -> float | None:
    """Seconds in which a trainer trained. None if there were none.

    Each of its processes counts from the first weights that servers held, or the end of their evaluation, to its last
    optimizer step, so the days before a run was resumed do not.
    """
    parts: list[list[TrainerMessage]] = [[]]
    for message in messages:
        if isinstance(message, TrainingResumed):
            parts.append([])
        parts[-1].append(message)
    return sum(_process_seconds(part, evaluations) for part in parts) or None


def _process_seconds(messages: Sequence[TrainerMessage], evaluations: Sequence[EvaluationDone]) -> float:
    updates = [m for m in messages if isinstance(m, WeightUpdateSuccess) and m.timestamp]
    steps = [m for m in messages if isinstance(m, SamplesProcessed) and m.timestamp]
    ends = [step.timestamp for step in steps]
    if steps and imitates_alone(steps[0]):  # without servers
        return max(ends) - min(ends) + steps[0].metrics.get(TrainerMetric.STEP_S, 0.0)
    if not updates or not ends:
        return 0.0
    first = min(updates, key=lambda update: update.timestamp)
    evaluated = [e.timestamp for e in evaluations if e.version == first.version and e.timestamp < max(ends)]
    return max(0.0, max(ends) - max([first.timestamp, *evaluated]))


def percentile(counts: Counter[int], percent: float) -> int | None:
    """The smallest value that at least ``percent`` of the observations do not exceed. None without observations."""
    wanted, seen = counts.total() * percent / 100, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    return None


def rate(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if seconds and amount is not None else None


def latest(points: Points, name: MetricName) -> Any:
    """The newest value of a running total. None if no point has it."""
    return next((point[name] for point in reversed(points) if point.get(name) is not None), None)


def weighted_mean(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def write_report(run_dir: Path, cfg: Config, *, launched: float, started: float) -> dict[str, Any]:
    """Write `summary.json`, `learning_curve.png` and the cards of the exports. Times are as in `phases_of`.

    Returns:
        the summary.
    """
    records, actor_points = read_records(run_dir, replicas=cfg.world.replicas), read_metrics(run_dir, "actor")
    previous, now = read_summary(run_dir), time.time()
    total_s = now - launched + float((previous or {}).get("wall_s") or 0.0)
    phases = phases_of(records, read_statuses(run_dir), launched=launched, started=started, now=now)
    trainer_points, preprocessor_points = read_metrics(run_dir, "finetune"), read_metrics(run_dir, "preprocessor")
    imitation = imitation_of(trainer_points, preprocessor_points, last_per_step(records.trainer), cfg)
    summary = summarise(records, actor_points, wall_s=total_s, seed=cfg.seed, phases=phases, imitation=imitation)
    if cfg.stage == "rl":
        summary["balance"] = balance_figures(run_dir, cfg)
    replace_file(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n", mode=0o600, sync=True)
    draw_learning_curve(run_dir / CURVE_FILE, records, actor_points, held_out_curve(trainer_points))
    write_cards(run_dir, cfg, records.evaluations)
    return summary


def read_metrics_tail(run_dir: Path, kind: str) -> Point | None:
    """Return the newest whole point of a kind of role, from the end of its file. None if there is none."""
    try:
        with open(metrics_file(run_dir, kind), "rb") as stream:
            size, tail = stream.seek(0, os.SEEK_END), 0
            while tail < size:
                # A point of many domains and their metrics is longer than the first tail.
                tail = min(size, 4 * tail or 8192)
                stream.seek(size - tail)
                if points := points_of(stream.read(tail).split(b"\n")):
                    return points[-1]
    except OSError:
        pass
    return None


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    try:
        return json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def summary_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """Return the summary as lines of text. That of a run that only imitates ends with what it learned."""
    imitation = summary.get("imitation")
    if imitation and "rollouts" not in summary:
        return [
            f"optimizer steps  {summary['optimizer_steps']}",
            f"tokens           {number(summary['tokens_trained_per_s'], 0)}/s trained",
            *last_lines(summary, run_dir),
            *imitation_lines(imitation),
        ]
    pause, lag, lengths = summary["pause_ms"], summary["lag_steps"], summary["tokens_in_one_rollout"]
    before, after = number(summary["success_before"], 3), number(summary["success_after"], 3)
    rate = summary["rollouts_per_s"]
    balance, shared = summary.get("balance"), summary.get("tokens_shared")  # older summaries have none
    return [
        f"success          {before} → {after} on the test problems",
        f"optimizer steps  {summary['optimizer_steps']}, weight updates {summary['weight_updates']}",
        f"rollouts         {number(summary['rollouts'], 0)}, "
        f"{number(rate, 2 if (rate or 0) < 10 else 0)} per second while training",
        f"pause            mean {number(pause['mean'], 0)} ms, max {number(pause['max'], 0)} ms per weight update",
        f"lag              mean {number(lag['mean'], 2)}, max {number(lag['max'], 0)} optimizer steps; "
        f"a median of {number(summary['versions_in_one_rollout_median'], 0)}, up to "
        f"{number(summary['versions_in_one_rollout_max'], 0)} weight versions in one rollout",
        answer_line(lengths),
        f"tokens           {number(summary['tokens_generated_per_s'], 0)}/s generated, "
        f"{number(summary['tokens_trained_per_s'], 0)}/s trained",
        *([f"prefixes         {shared:.0%} of the trainer's tokens not computed again"] if shared else []),
        *([f"balance          {balance_line(balance)}"] if balance else []),
        *(imitation_lines(imitation) if imitation else []),
        *last_lines(summary, run_dir),
    ]


def last_lines(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    return [
        f"wall time        {number(summary['wall_s'], 0)} s, of which training {number(summary['training_s'], 0)} s",
        f"look at          {run_dir}: {REPORT_FILE}, {CURVE_FILE}, {SUMMARY_FILE}, <role>/log.txt",
    ]


def imitation_lines(imitation: Mapping[str, Any]) -> list[str]:
    """Rows, and the loss of the first and the last step."""
    held_out = f"{number(imitation['held_out_first'], 3)} → {number(imitation['held_out_last'], 3)}"
    return [
        f"conversations    {number(imitation['rows'], 0)} rows imitated {number(imitation['epochs'], 1)} times, "
        f"{number(imitation['rows_left_out'], 0)} left out",
        f"loss             {number(imitation['loss_first'], 3)} → {number(imitation['loss_last'], 3)} nats per token"
        + ("" if imitation["held_out_last"] is None else f", held-out {held_out}"),
    ]


def answer_line(lengths: Mapping[str, int | None]) -> str:
    return f"answers          median {number(lengths['median'], 0)}, 99th percentile {number(lengths['p99'], 0)} tokens"


def shared_share(steps: Sequence[SamplesProcessed]) -> float | None:
    """Share of the trainer's tokens that were not computed, because others have the same prefix. None: not known."""
    shared = sum(step.metrics.get(TrainerMetric.SHARED_TOKENS, 0.0) for step in steps)
    return rate(shared, sum(step.metrics.get(TrainerMetric.INPUT_TOKENS, 0.0) for step in steps) or None)


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to `width` − 1 values before it."""
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def draw_learning_curve(
    path: Path, records: RunRecords, actor_points: Points = (), held_out: Sequence[tuple[int, float]] = ()
) -> None:
    """Draw reward and success over weight versions, and below them lag and waiting time of each optimizer step.

    A run that only imitates has the loss and the speed in their places. ``held_out``: (version, loss).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = last_per_step(records.trainer)
    figure, (learned, lag, waits) = plt.subplots(
        3, figsize=(8, 7), sharex=True, layout="constrained", height_ratios=(4, 1, 1)
    )
    imitates = bool(steps) and imitates_alone(steps[-1])
    losses, rewards = curve(steps, TrainerMetric.SFT_LOSS), [] if imitates else curve(steps, TrainerMetric.REWARD)
    if imitates:
        learned.plot(*zip(*losses, strict=True), color="tab:blue", label="loss of the step's conversations")
        if held_out:
            learned.plot(*zip(*held_out, strict=True), "D-", color="tab:orange", label="loss of the held-out ones")
    if rewards:
        x, y = zip(*rewards, strict=True)
        width = max(1, len(y) // 20)
        learned.plot(x, y, ".", color="tab:blue", alpha=0.2, markersize=3)
        learned.plot(x, running_mean(y, width), color="tab:blue", label=f"training reward, mean of {width} steps")
    seen = [(point[STEP], value) for point in actor_points if (value := point.get(ActorMetric.SUCCESS)) is not None]
    if seen:
        learned.plot(*zip(*sorted(seen), strict=True), color="tab:green", label="training success, 1,024 rollouts")
    tests = sorted((e.version, e.success) for e in records.evaluations if e.success is not None)
    if tests:
        learned.plot(*zip(*tests, strict=True), "D", color="tab:orange", label="success on the test problems")
    learned.set(ylabel="nats per token" if imitates else "per rollout")
    if learned.lines:
        learned.legend(loc="best", fontsize="small")
    speed, delay = (TrainerMetric.TOKENS_PER_S, "tokens\nper s"), (TrainerMetric.LAG_MEAN, "lag in\nsteps")
    for axis, name, label in (
        (lag, *(speed if imitates else delay)),
        (waits, TrainerMetric.WAIT_S, "waiting\nin s"),
    ):
        known = curve(steps, name)
        if known:
            axis.plot(*zip(*known, strict=True), color="tab:gray", linewidth=1)
        axis.set(ylabel=label, ylim=(0, None))
    waits.set(xlabel="optimizer step = weight version")
    figure.savefig(path, dpi=120)
    plt.close(figure)
