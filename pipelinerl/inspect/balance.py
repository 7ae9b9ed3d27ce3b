"""Whether generation and training keep up with each other in a run, and the split of devices that balances them.

The trainer waits for data if generation is the narrow side, and `max_lag_steps` keeps slots of the servers empty if
training is. A share that may lie below `TOLERATED` is not reported.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipelinerl.config.engine import engine_of
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import devices_per_server
from pipelinerl.errors import WorldError
from pipelinerl.inspect.curves import CERTAIN
from pipelinerl.inspect.series import Series
from pipelinerl.observability.catalogue import TIME, ActorMetric, TrainerMetric
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.world import WorldMap

TOLERATED = 0.1
"""Share of its time that a side may wait in a run that counts as balanced."""
FULL = 0.8
"""Share of its time for which a full rollout worker is busy: what comes then waits four times as long as it takes."""
FEWEST = 8
"""Steps, and points of the actor, from which a share has an error that means something."""
RECENT = 128
"""The newest steps that are looked at, because lengths change while a policy learns."""


class Share(NamedTuple):
    """A share of time, 0 to 1."""

    mean: float
    error: float
    """Standard error."""

    @property
    def least(self) -> float:
        """What it certainly is."""
        return max(0.0, self.mean - CERTAIN * self.error)


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How much each side waits."""

    trainer_waits: Share
    """Share of its time in which the trainer waits for data."""
    slots_held: Share
    """Share of the servers' slots that `max_lag_steps` keeps empty."""
    workers_busy: Share
    """Share of their time in which rollout workers compute or stand blocked. 0 ± inf: an older run does not say."""

    @property
    def narrow(self) -> Literal["generation", "workers", "training", "between", None]:
        """What limits the run. None: both sides keep up with each other."""
        # Both: neither side is short of devices. The bound is too tight for such answers, or what lies between is slow.
        generation_is, training_is = self.trainer_waits.least > TOLERATED, self.slots_held.least > TOLERATED
        if generation_is and self.workers_busy.least > FULL:
            return "workers"
        if generation_is and training_is:
            return "between"
        return "generation" if generation_is else "training" if training_is else None

    @property
    def ratio(self) -> float:
        """What generation could give over what training could take.

        An upper bound where slots are empty: decoding with fewer sequences at once is faster per sequence.
        """
        return (1 - self.trainer_waits.mean) / max(1 - self.slots_held.mean, 1e-3)

    @property
    def text(self) -> str:
        """`the trainer waits for data 41 % of its time; …`."""
        waits, held = self.trainer_waits.mean, self.slots_held.mean
        shares = (
            f"the trainer waits for data in {waits:.0%} of its time, max_lag_steps keeps {held:.0%} of the servers' "
            "slots empty: "
        )
        match self.narrow:
            case "generation":
                return f"{shares}generation gives {self.ratio:.2f} of what could be trained"
            case "workers":
                busy = f"{self.workers_busy.mean:.0%}"
                return f"{shares}rollout workers compute or stand blocked in {busy} of their time"
            case "training":
                return f"{shares}generation could give up to {self.ratio:.1f} × what is trained"
            case "between":
                return f"{shares}each side waits for the other"
        return f"{shares}balanced"


@dataclass(frozen=True, kw_only=True)
class Division:
    """A division of the devices, and the keys that set it."""

    generating: float
    """Share of the devices or CPU cores that generates."""
    training: float
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Divisions:
    """What a run has, and what it could have instead."""

    now: Division
    others: tuple[Division, ...] = ()
    max_lag_steps: int
    max_rollouts: int | Literal["auto"]
    """`actor.llm_max_rollouts`"""
    rollout_workers: int
    """`actor.rollout_workers`"""


def share_of(parts: Sequence[float], wholes: Sequence[float]) -> Share:
    """Σ parts / Σ wholes with its standard error √(n/(n − 1) Σ(part − ratio · whole)²) / Σ wholes."""
    count, total = len(parts), sum(wholes)
    mean = sum(parts) / total if total else 0.0
    squares = sum((part - mean * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    error = math.sqrt(squares * count / (count - 1)) / total if total and count > 1 else math.inf
    return Share(mean, error)


def balance_of(series: Series) -> Balance | None:
    """Measure the newest `RECENT` steps but the first quarter, while the pipeline fills. None: too few points."""
    _, *columns = series.of(TrainerMetric.WAIT_S, TrainerMetric.STEP_S, TrainerMetric.PUSH_WAIT_S, TIME)
    filling = len(columns[0]) // 4
    waits, works, pushes, times = (column[filling:][-RECENT:] for column in columns)
    if len(waits) < FEWEST:
        return None

    def inside(metric: ActorMetric) -> list[float]:
        _, shares, at = series.of(metric, TIME)
        return [share for share, when in zip(shares, at, strict=True) if times[0] <= when <= times[-1]]

    held, busy = inside(ActorMetric.SLOTS_HELD), inside(ActorMetric.WORKERS_BUSY)
    if len(held) < FEWEST:
        return None
    wholes = [sum(parts) for parts in zip(waits, works, pushes, strict=True)]
    return Balance(
        trainer_waits=share_of(waits, wholes),
        slots_held=share_of(held, [1.0] * len(held)),
        workers_busy=share_of(busy, [1.0] * len(busy)),
    )


def better_split(balance: Balance, splits: Divisions) -> tuple[Division, float] | None:
    """Return the split that trains most, and its speed over the present one. None if none is certainly faster."""
    now = splits.now.generating, splits.now.training
    others = [other for other in splits.others if (other.generating, other.training) != now]
    if balance.narrow not in ("generation", "training") or not others:
        return None
    best = max(others, key=lambda other: _speed(balance.trainer_waits.mean, balance.slots_held.mean, splits.now, other))
    if _speed(balance.trainer_waits.least, balance.slots_held.least, splits.now, best) <= 1:
        return None
    return best, _speed(balance.trainer_waits.mean, balance.slots_held.mean, splits.now, best)


def _speed(waits: float, held: float, now: Division, other: Division) -> float:
    """Trained tokens over time with the other split, over now. What waits now has so much more to give."""
    generation = other.generating / now.generating / max(1 - held, 1e-3)
    training = other.training / now.training / max(1 - waits, 1e-3)
    return min(generation, training)


def splits_of(cfg: Config, world: WorldMap) -> Divisions | None:
    """What could be chosen instead of a run's split. None where both sides wait by design, or share their devices."""
    if cfg.schedule != "pipeline" or not cfg.max_lag_steps or cfg.stage != "rl" or world.share_devices:
        return None
    ranks = {kind: sum(job.num_ranks for job in world.get(kind)) for kind in ("actor_llm", "preprocessor_llm")}
    generating, training, scoring = ranks["actor_llm"], world.trainer_world_size, ranks["preprocessor_llm"]
    if cfg.debug.mode is not None or cfg.debug.existing_llms or not generating:
        return None
    own = generating + training + world.idle_devices
    return Divisions(
        now=Division(generating=generating / own, training=training / own),
        others=tuple(_others(cfg, world, own, scoring)),
        max_lag_steps=cfg.max_lag_steps,
        max_rollouts=cfg.actor.llm_max_rollouts,
        rollout_workers=cfg.actor.rollout_workers,
    )


def _others(cfg: Config, world: WorldMap, devices: int, scoring: int) -> Iterable[Division]:
    if world.accelerator == "cuda":
        yield from _divided(cfg, devices, scoring)
    elif not scoring and len(world.nodes) == 1:  # the slots of a CPU are ours to choose
        for slots in range(2, len(world.nodes[0].cores) + 1):
            yield from _divided(cfg, slots, 0, (f"world.cpu_slots={slots}",))


def _divided(cfg: Config, devices: int, scoring: int, given: tuple[str, ...] = ()) -> Iterable[Division]:
    """Every division of this many devices into whole servers and whole groups of the trainer."""
    size, finetune = devices_per_server(cfg), cfg.finetune
    for generating in range(size * cfg.world.replicas, devices, size):
        training = devices - generating
        sharing = finetune.shard_ranks or training
        uneven = training % finetune.seq_parallel or training % sharing or sharing % (finetune.expert_ranks or 1)
        if uneven or (training > 1 and engine_of(cfg, training) == "ddp"):
            continue
        fractions = (f"world.actor_fraction={generating}", f"world.finetune_fraction={training}")
        others = (f"world.preprocessor_fraction={scoring}",) if scoring else ()
        yield Division(
            generating=generating / devices, training=training / devices, overrides=(*given, *fractions, *others)
        )


def cheaper_steps(cfg: Config, series: Series) -> str:
    """What makes an optimizer step cheaper on the same devices."""
    finetune, limit = cfg.finetune, cfg.llm.parameters.get("max_tokens")
    _, inputs, trained = series.of(TrainerMetric.INPUT_TOKENS, TrainerMetric.TOKENS)
    _, shared = series.of(TrainerMetric.SHARED_TOKENS)  # which older runs do not have
    options = []
    if computed := sum(inputs) - sum(shared):
        prompts = "shorter prompts" if finetune.shares_prefixes else "finetune.share_prefixes=auto or shorter prompts"
        options.append(f"{prompts} ({1 - sum(trained) / computed:.0%} of the tokens that it computes are not trained)")
    if finetune.gradient_checkpointing not in (False, "auto"):
        options.append("finetune.gradient_checkpointing=auto, which recomputes no more layers than memory asks for")
    return ", ".join([*options, f"shorter answers (llm.parameters.max_tokens is {limit})"])


def advice(balance: Balance, splits: Divisions, cheaper: str) -> str:
    """What to change in a run that is not balanced. ``cheaper``: as of `cheaper_steps`."""
    if balance.narrow == "between":
        return (
            f"Raise max_lag_steps (it is {splits.max_lag_steps}); if lag is far below it, `pipelinerl timeline RUN` "
            "shows who else is slow: preprocessor, judge, weight updates"
        )
    if balance.narrow == "workers":
        return (
            f"Raise actor.rollout_workers (it is {splits.rollout_workers}) where CPU cores are free, or make the "
            "domain cheaper: wait in a thread, compute in a process of its own"
        )
    found = better_split(balance, splits)
    words = (
        "No other split of these devices is certainly faster"
        if found is None
        else f"`{' '.join(found[0].overrides)}` trains up to {found[1]:.2f} × as fast (computed)"
    )
    if balance.narrow == "generation" and splits.max_rollouts != "auto":
        also = "You could" if found is None else "You could also"
        return f"{words}. {also} raise actor.llm_max_rollouts (it is {splits.max_rollouts})"
    if balance.narrow == "training":
        return f"{words}. A step is cheaper with {cheaper}"
    return words


def balance_figures(run_dir: Path, cfg: Config) -> dict[str, Any] | None:
    """The figures of `summary.json`. None where there is nothing to measure, or not yet."""
    splits = read_splits(run_dir, cfg)
    series = Series(finetune=read_metrics(run_dir, "finetune"), actor=read_metrics(run_dir, "actor"))
    balance = balance_of(series)
    if splits is None or balance is None:
        return None
    return {
        "trainer_waits": balance.trainer_waits.mean,
        "slots_held": balance.slots_held.mean,
        "generation_over_training": balance.ratio,
        "text": balance.text,
        "advice": advice(balance, splits, cheaper_steps(cfg, series)) if balance.narrow else "",
    }


def balance_line(figures: Mapping[str, Any]) -> str:
    """The figures in words."""
    return ". ".join(filter(None, (figures["text"], figures["advice"])))


def read_splits(run_dir: Path, cfg: Config) -> Divisions | None:
    """As `splits_of`. None also for a folder without a world."""
    try:
        return splits_of(cfg, WorldMap.load(run_dir))
    except WorldError:
        return None
