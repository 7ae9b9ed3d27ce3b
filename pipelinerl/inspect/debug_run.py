"""What roles did that ran without the rest of their run (`debug.mode`): figures, as lines and in `alone.json`."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.config.paths import DEBUG_RUN_FILE
from pipelinerl.config.sections import Config
from pipelinerl.inspect.drops import read_drops
from pipelinerl.inspect.report import (
    RolloutTotals,
    answer_line,
    last_per_step,
    latest,
    number,
    percentile,
    rate,
    read_records,
)
from pipelinerl.observability.catalogue import ActorMetric, PreprocessorMetric, TrainerMetric
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ActorRecord, EvaluationDone, GroupDropped, PreprocessorProgress, RolloutGroup
from pipelinerl.records.topics import ACTOR, PREPROCESSOR
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.world.disk import replace_file

TOLD = (TrainerMetric.LOSS, TrainerMetric.GRAD_NORM, TrainerMetric.ENTROPY, TrainerMetric.ESS, TrainerMetric.LR)
"""Metrics of the trainer's last step that are shown."""


def read_debug_run(run_dir: Path) -> dict[str, Any] | None:
    """The figures of roles that have ended their work. None: they have not, or this is a whole run."""
    try:
        return json.loads((run_dir / DEBUG_RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_debug_run(run_dir: Path, figures: dict[str, Any]) -> None:
    replace_file(run_dir / DEBUG_RUN_FILE, json.dumps(figures, indent=2) + "\n", mode=0o600, sync=True)


def debug_run_figures(run_dir: Path, cfg: Config) -> dict[str, Any]:
    """Read what the roles wrote. The streams backend must be set."""
    mode, replicas = cfg.debug.mode, cfg.world.replicas
    figures: dict[str, Any] = {"mode": mode}
    match mode:
        case "actor" | "evaluation":
            evaluations = read_records(run_dir, replicas=replicas, with_rollouts=False).evaluations
            return figures | actor_figures(run_dir, replicas) | {"evaluation": evaluation_figures(evaluations)}
        case "preprocessor":
            return figures | preprocessor_figures(run_dir, replicas)
        case "finetune":
            return figures | trainer_figures(run_dir)
    return figures


def actor_figures(run_dir: Path, replicas: int) -> dict[str, Any]:
    """Totals of the training rollouts, and how fast they were made while any was under way."""
    totals, problems, dropped = RolloutTotals(), set(), Counter[str]()
    rewards: list[float] = []
    equal = groups = 0
    successes: list[float] = []
    for record in (one for replica in range(replicas) for one in _records(run_dir, ACTOR, ActorRecord, replica)):
        if isinstance(record, GroupDropped):
            dropped[record.reason] += record.attempts
        elif isinstance(record, RolloutGroup):
            totals.add(record)
            problems.add((record.domain, record.problem_index))
            earned = [rollout.reward for rollout in record.rollouts]
            rewards += earned
            groups += 1
            equal += max(earned, default=0.0) == min(earned, default=0.0)
            successes += [r.metrics["success"] for r in record.rollouts if "success" in r.metrics]
    points = read_metrics(run_dir, "actor")
    sampled = sum(tokens * count for tokens, count in totals.lengths.items())
    made, seconds = latest(points, ActorMetric.ROLLOUTS), latest(points, ActorMetric.GENERATING_S)
    return {
        "rollouts": totals.rollouts,
        "problems": len(problems),
        "rollouts_per_s": rate(made, seconds),
        "reward": {"mean": _mean(rewards), "min": min(rewards, default=None), "max": max(rewards, default=None)},
        "success": _mean(successes),
        "groups": {"played": groups, "with_equal_rewards": equal},
        "tokens_per_useful_group": round(sampled / (groups - equal)) if groups > equal else None,
        "answer_tokens": {"median": percentile(totals.lengths, 50), "p99": percentile(totals.lengths, 99)},
        "dropped": dict(dropped),
        "failures": dict(read_drops(run_dir, replicas).attempts),
    }


def evaluation_figures(evaluations: list[EvaluationDone]) -> dict[str, Any] | None:
    if not evaluations:
        return None
    last = evaluations[-1]
    return {
        "success": last.success,
        "reward": last.reward,
        "rollouts": last.num_rollouts,
        "metrics": last.metrics,
        "outcomes": last.outcomes,
    }


def preprocessor_figures(run_dir: Path, replicas: int) -> dict[str, Any]:
    packed, batches, dropped = 0, 0, Counter[str]()
    newest: dict[int, PreprocessorProgress] = {}
    for replica in range(replicas):
        for record in _records(run_dir, PREPROCESSOR, PreprocessorProgress, replica):
            newest[replica] = record
            batches += bool(record.packed_sample_ids)
    for record in newest.values():
        packed += record.samples_packed
        dropped.update(record.dropped_by_reason)
    points = read_metrics(run_dir, "preprocessor")
    return {
        "batches": batches,
        "rollouts_packed": packed,
        "rollouts_dropped": dict(dropped),
        "tokens": sum(point.get(PreprocessorMetric.TOKENS, 0) for point in points),
    }


def trainer_figures(run_dir: Path) -> dict[str, Any]:
    steps = last_per_step(read_records(run_dir, with_rollouts=False).trainer)
    metrics = steps[-1].metrics if steps else {}
    seconds = sum(step.metrics.get(TrainerMetric.STEP_S, 0.0) for step in steps)
    tokens = sum(step.metrics.get(TrainerMetric.TOKENS, 0.0) for step in steps)
    return {
        "optimizer_steps": steps[-1].step if steps else 0,
        "rollouts_trained": steps[-1].samples_processed if steps else 0,
        "tokens": tokens,
        "tokens_per_s": rate(tokens, seconds),
        "last": {str(name.value): metrics[name] for name in TOLD if name in metrics},
    }


def debug_run_lines(figures: dict[str, Any], run_dir: Path) -> list[str]:
    """Return the figures as lines of text, with what to look at."""
    match figures["mode"]:
        case "actor":
            return [*rollout_lines(figures), *_evaluation_lines(figures), *_where_rollouts_are(run_dir)]
        case "evaluation":
            return _evaluation_lines(figures)
        case "preprocessor":
            return [
                f"batches          {figures['batches']} of {figures['rollouts_packed']} rollouts, "
                f"{number(figures['tokens'], 0)} trained tokens",
                f"dropped          {_counts(figures['rollouts_dropped'])}",
                f"look at          pipelinerl rollouts {shlex.quote(str(run_dir))}; metrics/preprocessor.jsonl",
                f"train them with  debug.mode=finetune debug.streams_from={run_dir}",
            ]
        case "finetune":
            last = "  ".join(f"{name} {value:.4g}" for name, value in figures["last"].items())
            return [
                f"optimizer steps  {figures['optimizer_steps']}, {figures['rollouts_trained']} rollouts",
                f"tokens           {number(figures['tokens'], 0)}, {number(figures['tokens_per_s'], 0)} per second",
                f"last step        {last or '–'}",
                f"look at          {run_dir}: metrics/finetune.jsonl, finetune_0/log.txt, checkpoints/",
            ]
    return []


def rollout_lines(figures: dict[str, Any]) -> list[str]:
    """Lines about the training rollouts of `debug.mode=actor`."""
    reward, lengths, groups = figures["reward"], figures["answer_tokens"], figures["groups"]
    return [
        f"rollouts         {figures['rollouts']} of {figures['problems']} problems, "
        f"{number(figures['rollouts_per_s'], 1)} per second",
        f"success          {number(figures['success'], 3)}",
        f"reward           mean {number(reward['mean'], 3)}, from {number(reward['min'], 3)} to "
        f"{number(reward['max'], 3)}",
        f"groups           {groups['played']}, {groups['with_equal_rewards']} of them with equal rewards, which teach "
        f"nothing: {number(figures['tokens_per_useful_group'], 0)} tokens for each of the others",
        answer_line(lengths),
        f"failed           {_counts(figures['failures'])}",
        f"dropped          {_counts(figures['dropped'])}",
    ]


def _evaluation_lines(figures: dict[str, Any]) -> list[str]:
    found = figures["evaluation"]
    if found is None:
        return []
    return [
        f"evaluation       success {found['success']:.3f}, reward {found['reward']:.3f}, {found['rollouts']} rollouts"
    ]


def _where_rollouts_are(run_dir: Path) -> list[str]:
    return [
        f"look at          pipelinerl rollouts {shlex.quote(str(run_dir))} (--best 3, --worst 3, --grep REGEX)",
        f"pack them with   debug.mode=preprocessor debug.streams_from={run_dir}",
    ]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _records(run_dir: Path, topic: str, kind: Any, replica: int) -> Iterator[Any]:
    with open_reader(SingleStreamSpec(run_dir, topic, replica), kind, name=None, over_damage=True) as reader:
        yield from (record for _, record in reader.read_each())
