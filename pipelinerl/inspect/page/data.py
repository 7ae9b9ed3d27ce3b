"""Turns a run folder into plain data for the page. The caller must have opened the streams.

A figure without a record is left out.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from pipelinerl.config.keys import REQUIRED, declared
from pipelinerl.config.paths import PROFILES
from pipelinerl.config.sections import Config
from pipelinerl.inspect.balance import balance_of
from pipelinerl.inspect.curves import wilson
from pipelinerl.inspect.drops import HEADER, drops_table, read_drops
from pipelinerl.inspect.ending import RunEnding
from pipelinerl.inspect.page.classes import by_difficulty
from pipelinerl.inspect.report import RunRecords, imitation_of, last_per_step, number, read_summary, summarise
from pipelinerl.inspect.status import ago
from pipelinerl.inspect.why.evidence import RunSource
from pipelinerl.observability.catalogue import (
    SPREAD,
    STEP,
    TIME,
    ActorMetric,
    Metric,
    MetricName,
    PreprocessorMetric,
    TrainerMetric,
)
from pipelinerl.observability.metrics import Points
from pipelinerl.records import EvaluationDone, TrainingDone, WeightUpdateSuccess

MAX_POINTS = 1200
"""Points of a line: more than a chart has pixels."""
MAX_OWN_CHARTS = 12
"""Charts of a domain's own metrics, which may be any number."""
TRAINER_PARTS = {
    TrainerMetric.STEP_S: "training",
    TrainerMetric.WAIT_S: "waiting for data",
    TrainerMetric.PUSH_WAIT_S: "waiting for a weight update",
}


@dataclass(frozen=True)
class Chart:
    """A chart of the page: lines of metrics, each with its label, over optimizer steps."""

    title: str
    unit: str
    lines: tuple[tuple[Metric, str], ...]
    parts: bool = False
    """Whether to add the first line's metric of every domain or data set."""


CHARTS = (
    Chart("Reward", "", ((ActorMetric.REWARD, "sampled"), (TrainerMetric.REWARD, "trained")), parts=True),
    Chart("Success", "share", ((ActorMetric.SUCCESS, "training problems"),), parts=True),
    Chart(
        "Groups without signal",
        "share",
        ((ActorMetric.GROUPS_NEVER_SOLVED, "never solved"), (ActorMetric.GROUPS_ALWAYS_SOLVED, "always solved")),
    ),
    Chart(
        "Imitation",
        "nats per token",
        ((TrainerMetric.SFT_LOSS, "conversations"), (TrainerMetric.SFT_TEST_LOSS, "held out")),
    ),
    Chart("Lag", "steps", ((TrainerMetric.LAG_MEAN, "mean"), (TrainerMetric.LAG_MAX, "max"))),
    Chart("Effective sample size", "share", ((TrainerMetric.ESS, "tokens"), (TrainerMetric.ESS_SEQUENCE, "sequences"))),
    Chart("Entropy", "nats", ((TrainerMetric.ENTROPY, "entropy"),)),
    Chart(
        "Clipped and corrected tokens",
        "share",
        ((TrainerMetric.CLIP_FRACTION, "clipped"), (TrainerMetric.CORRECTED_FRACTION, "corrected")),
    ),
    Chart("KL", "nats", ((TrainerMetric.KL_K3, "to the sampler"), (TrainerMetric.KL_REF, "to the reference"))),
    Chart("Gradient norm", "", ((TrainerMetric.GRAD_NORM, "before clipping"),)),
    Chart("Loss", "", ((TrainerMetric.LOSS, "loss"),)),
    Chart("Length", "tokens", ((ActorMetric.OUTPUT_TOKENS, "mean"), (ActorMetric.OUTPUT_TOKENS_MAX, "max"))),
    Chart(
        "Cut or without an answer", "share", ((ActorMetric.CUT_BY_LENGTH, "cut"), (ActorMetric.NO_ANSWER, "no answer"))
    ),
    Chart(
        "Throughput",
        "tokens/s",
        ((ActorMetric.TOKENS_GENERATED_PER_S, "generated"), (TrainerMetric.TOKENS_PER_S, "trained, while training")),
    ),
    Chart("Weight update", "ms", ((TrainerMetric.PAUSE_MS, "pause"), (TrainerMetric.TRANSFER_MS, "transfer"))),
    Chart(
        "Where a step's time went",
        "s",
        ((TrainerMetric.STEP_S, "training"), (TrainerMetric.WAIT_S, "data"), (TrainerMetric.PUSH_WAIT_S, "update")),
    ),
)


def run_data(source: RunSource, ending: RunEnding | None = None) -> dict[str, Any]:
    """Return the data about a run, except its rollouts and alarms. ``ending``: of a run that is not finished."""
    return {
        "name": source.run_dir.resolve().name,
        "path": str(source.run_dir),
        "state": state_of(source, ending),
        "figures": figures(source),
        "charts": [data for chart in CHARTS if (data := chart_data(chart, source))["lines"]]
        + own_charts(source.actor)
        + by_difficulty(source.records.evaluations),
        "evaluations": [
            evaluation(done)
            for done in sorted(source.records.evaluations, key=lambda e: e.version)
            if done.num_rollouts
        ],
        "survivorship": survivorship(source.preprocessor),
        "drops": [HEADER, *drops_table(read_drops(source.run_dir, source.cfg.world.replicas))],
        "time": time_by_role(source),
        "changed": changed_keys(source.cfg),
        "config": flat(source.cfg.model_dump()),
    }


def state_of(source: RunSource, ending: RunEnding | None) -> str:
    """Describe the state of the run with its newest step."""
    step = source.finetune[-1][STEP] if source.finetune else 0
    total = source.cfg.finetune.max_train_steps
    done = any(isinstance(m, TrainingDone) and m.step >= total for m in source.records.trainer)
    if ending is None:
        return f"finished, {step} steps" if done else f"step {step} of {total}"
    return f"{'failed' if ending.kind == 'failed' else ending.reason} at step {step} of {total}"


def figures(source: RunSource) -> list[tuple[str, str]]:
    """Return (label, value) of the figures on the first screen."""
    known = read_summary(source.run_dir)
    imitation = imitation_of(source.finetune, source.preprocessor, last_per_step(source.records.trainer), source.cfg)
    seen = summarise(
        source.records,
        source.actor,
        wall_s=known["wall_s"] if known else 0.0,
        seed=source.cfg.seed,
        imitation=imitation,
    )
    rows = [
        *(rollout_figures(seen) if "rollouts" in seen else []),
        *(imitation_figures(imitation) if imitation else []),
        ("optimizer steps", number(seen["optimizer_steps"], 0)),
        ("tokens trained per second", number(seen["tokens_trained_per_s"], 0)),
        ("training", "–" if seen["training_s"] is None else ago(seen["training_s"])),
    ]
    if (balance := balance_of(source.series())) is not None:
        rows.append(("the trainer waits for data", f"{balance.trainer_waits.mean:.0%}"))
        rows.append(("server slots that max_lag_steps keeps empty", f"{balance.slots_held.mean:.0%}"))
    if traces := len(list((source.run_dir / PROFILES).rglob("*.json.gz"))):
        rows.append((f"profiles, for ui.perfetto.dev, in {PROFILES}/", number(traces, 0)))
    return [(label, value) for label, value in rows if "–" not in value]


def imitation_figures(imitation: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("loss in nats per token", _arrow(imitation["loss_first"], imitation["loss_last"])),
        ("held-out loss", _arrow(imitation["held_out_first"], imitation["held_out_last"])),
        ("rows imitated (left out)", f"{number(imitation['rows'], 0)} ({number(imitation['rows_left_out'], 0)})"),
    ]


def rollout_figures(seen: Mapping[str, Any]) -> list[tuple[str, str]]:
    lag, pause = seen["lag_steps"], seen["pause_ms"]
    return [
        ("success on test problems", _arrow(seen["success_before"], seen["success_after"])),
        ("reward on test problems", _arrow(seen["reward_before"], seen["reward_after"])),
        ("rollouts trained", number(seen["rollouts_trained"], 0)),
        ("lag, mean (max)", f"{number(lag['mean'], 2)} ({number(lag['max'], 0)})"),
        ("pause per update, mean (max)", f"{number(pause['mean'], 0)} ({number(pause['max'], 0)}) ms"),
    ]


def _arrow(before: float | None, after: float | None) -> str:
    return "–" if before is None or after is None else f"{before:.3f} → {after:.3f}"


def chart_data(chart: Chart, source: RunSource) -> dict[str, Any]:
    """Return a chart with the lines that have values other than 0. Of several points of a step the last one counts."""
    wanted: list[tuple[Points, MetricName, str]] = [
        (source.points(metric.role), metric, label) for metric, label in chart.lines
    ]
    if chart.parts:
        points, first, _ = wanted[0]
        wanted += [(points, name, name.rpartition("/")[0]) for name in part_names(points, first)]
    lines = []
    for points, name, label in wanted:
        xs, ys = series(points, name)
        if xs and any(ys):
            lines.append({"label": label, "x": xs, "y": ys})
    return {"title": chart.title, "unit": chart.unit, "lines": lines}


def own_charts(points: Points) -> list[dict[str, Any]]:
    """A chart for each metric that the domain reports beside reward, success, errors and missing answers."""
    known = {*ActorMetric, STEP, TIME}
    names = sorted({name for point in points[-1:] for name in point if "/" not in name and name not in known})
    reported = {*names, *known}
    own = [name for name in names if name.rpartition("_")[0] not in reported or name.rpartition("_")[2] not in SPREAD]
    charts = []
    for name in own[:MAX_OWN_CHARTS]:
        xs, ys = series(points, name)
        charts.append({"title": str(name), "unit": "of the domain", "lines": [{"label": str(name), "x": xs, "y": ys}]})
    return charts


def part_names(points: Points, metric: MetricName) -> list[MetricName]:
    """The names of the metric's values of one domain or data set in the newest point, like `<domain>/success`."""
    names = {name for point in points[-1:] for name in point if name.endswith(f"/{metric}")}
    return sorted(name for name in names if not name.startswith("eval/"))


def series(points: Points, metric: MetricName) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, thinned so that no spike is lost."""
    last = {point[STEP]: point[metric] for point in points if point.get(metric) is not None}
    xs = sorted(last)
    kept = thinned([float(last[x]) for x in xs])
    return [xs[i] for i in kept], [_short(last[xs[i]]) for i in kept]


def thinned(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """Places of about ``limit`` values: the smallest and the largest of every bucket, and the last value."""
    if len(values) <= limit:
        return list(range(len(values)))
    size = math.ceil(len(values) / (limit // 2))
    kept: set[int] = {len(values) - 1}
    for start in range(0, len(values), size):
        bucket = range(start, min(start + size, len(values)))
        kept |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return sorted(kept)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def evaluation(done: EvaluationDone) -> dict[str, Any]:
    """Return a finished evaluation with the 95 % interval of its success, which counts rollouts as independent."""
    assert done.success is not None
    assert done.reward is not None
    low, high = wilson(done.success, done.num_rollouts)
    parts = {
        name.removesuffix("/success"): _short(value)
        for name, value in done.metrics.items()
        if name.endswith("/success")
    }
    return {
        "version": done.version,
        "success": _short(done.success),
        "low": _short(low),
        "high": _short(high),
        "reward": _short(done.reward),
        "rollouts": done.num_rollouts,
        "parts": parts if len(parts) > 1 else {},
    }


def survivorship(points: Points) -> dict[str, Any]:
    """Counts and means of every outcome over the run, and the newest share of dropped rollouts per length decile."""
    totals: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0.0, "tokens": 0.0, "reward": 0.0})
    for point in points:
        for outcome, count in PreprocessorMetric.SURVIVORSHIP_COUNT.found(point).items():
            if count:
                own = totals[outcome]
                own["count"] += count
                own["tokens"] += count * (
                    point.get(PreprocessorMetric.SURVIVORSHIP_MEAN_TOKENS.of(outcome=outcome)) or 0.0
                )
                own["reward"] += count * (
                    point.get(PreprocessorMetric.SURVIVORSHIP_MEAN_REWARD.of(outcome=outcome)) or 0.0
                )
    outcomes = [
        {
            "outcome": outcome,
            "count": int(t["count"]),
            "tokens": t["tokens"] / t["count"],
            "reward": t["reward"] / t["count"],
        }
        for outcome, t in sorted(totals.items(), key=lambda item: -item[1]["count"])
    ]
    shares = (PreprocessorMetric.DROPPED_BY_LENGTH.found(point) for point in reversed(points))
    newest = next((found for found in shares if found.get("1") is not None), {})
    deciles = [newest[decile] for decile in sorted(newest, key=int)]
    return {"outcomes": outcomes, "deciles": deciles}


def time_by_role(source: RunSource) -> list[dict[str, Any]]:
    """Seconds that trainer and servers spent on each activity, from their first to their last metrics."""
    roles = []
    if len(source.finetune) > 1:
        wall = source.finetune[-1][TIME] - source.finetune[0][TIME]
        sums = {text: sum(p.get(name) or 0.0 for p in source.finetune[1:]) for name, text in TRAINER_PARTS.items()}
        roles.append({"role": "trainer", "parts": _with_rest(sums, wall, "other: checkpoints, evaluation")})
    if len(source.actor) > 1:
        first, last = source.actor[0], source.actor[-1]
        wall = last[TIME] - first[TIME]
        busy = (last.get(ActorMetric.GENERATING_S) or 0.0) - (first.get(ActorMetric.GENERATING_S) or 0.0)
        pauses = sum(p.get(TrainerMetric.PAUSE_MS) or 0.0 for p in source.finetune) / 1000
        parts = {"generating": max(0.0, busy - pauses), "paused for weight updates": pauses}
        left = max(0.0, wall - sum(parts.values()))
        parts["evaluation"] = min(left, evaluating_seconds(source.records, first[TIME], last[TIME]))
        roles.append({"role": "servers", "parts": _with_rest(parts, wall, "nothing under way")})
    return roles


def evaluating_seconds(records: RunRecords, start: float, end: float) -> float:
    """Seconds within a time in which evaluations ran: each from the update of its version to its result."""
    live = {m.version: m.timestamp for m in records.trainer if isinstance(m, WeightUpdateSuccess) and m.timestamp}
    times = [(max(live[e.version], start), min(e.timestamp, end)) for e in records.evaluations if e.version in live]
    return sum(max(0.0, done - began) for began, done in times)


def _with_rest(parts: Mapping[str, float], wall: float, rest: str) -> list[tuple[str, float]]:
    left = max(0.0, wall - sum(parts.values()))
    return [(name, round(seconds, 3)) for name, seconds in [*parts.items(), (rest, left)]]


def changed_keys(cfg: Config) -> list[tuple[str, str, str]]:
    """(key, value, default) of the keys whose values differ from their defaults."""
    values = OmegaConf.create(cfg.model_dump(mode="json"))
    changed = []
    for key in declared(Config):
        value, default = OmegaConf.select(values, key.name), key.default
        if isinstance(default, str) and default.startswith("${"):
            default = OmegaConf.select(values, default[2:-1])
        if value != default:
            changed.append((key.name, shown(value), "" if default == REQUIRED else shown(default)))
    return changed


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the nested values as dotted keys with texts."""
    if isinstance(value, dict) and value:
        items: Iterable[tuple[str, str]] = (
            item for key, inner in value.items() for item in flat(inner, f"{prefix}.{key}".lstrip(".")).items()
        )
        return dict(items)
    return {prefix: shown(value)}


def shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
