"""``python -m pipelinerl.plan split``: the split of devices, the concurrency and the lag that train fastest."""

import argparse
import math
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from pipelinerl.config import load
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import devices_per_server
from pipelinerl.errors import ConfigError
from pipelinerl.plan import ceiling
from pipelinerl.plan.lengths import Lengths
from pipelinerl.plan.model_shape import find_model_shape
from pipelinerl.plan.speed import GPUS, MEAN_SHARE, PROMPT_TOKENS, Rates, assumed_rates, measured_rates
from pipelinerl.plan.throughput import (
    PipelinePlan,
    Workload,
    conventional_rate,
    drop_shares,
    recommend,
    recommended_bound,
)
from pipelinerl.world.cluster import count_visible_gpus

NOT_NEEDED = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b"]


def add_arguments(split: argparse.ArgumentParser) -> None:
    split.add_argument("--config-name", default="base", help="configuration whose values are the defaults below")
    split.add_argument("--config-dir", type=Path, help="folder with your own configurations")
    split.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    split.add_argument("--model", help="Hugging Face name or folder with config.json")
    split.add_argument("--gpus", type=count, help="devices in total")
    split.add_argument("--gpus-per-llm", type=count, help="tensor × pipeline parallel size of a server")
    split.add_argument("--seq-parallel", type=count, help="sequence-parallel size of the trainer")
    split.add_argument("--batch-size", type=count, help="sequences per optimizer step")
    split.add_argument("--mean-length", type=positive, help="tokens per completion (default: 30%% of the longest)")
    split.add_argument("--max-length", type=count, help="longest completion")
    split.add_argument("--prompt-length", type=positive, default=PROMPT_TOKENS, help="tokens per prompt")
    split.add_argument("--lengths", choices=("lognormal", "uniform", "constant"), default="lognormal")
    split.add_argument("--max-lag", type=int, help="bound on the lag in optimizer steps (default: max_lag_steps)")
    split.add_argument("--gpu", choices=sorted(GPUS), default="H100", help="for assumed rates")
    split.add_argument(
        "--decode", action="append", type=parse_point, default=[], metavar="H:TOKENS_PER_S", help="measured, per device"
    )
    split.add_argument("--train", type=positive, metavar="TOKENS_PER_S", help="measured, per device")


def parse_point(text: str) -> tuple[float, float]:
    height, _, rate = text.partition(":")
    return positive(height), positive(rate)


def positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return value


def recommend_split(args: argparse.Namespace, console: Console) -> tuple[Workload, PipelinePlan, dict[str, Any]]:
    """Print the recommended plan. Returns the workload, the plan, and all results as plain data.

    Raises:
        ConfigError: no split respects the bound on the lag, or the arguments are inconsistent.
    """
    cfg = load.parse(load.compose(args.config_name, [*NOT_NEEDED, *args.override], args.config_dir, own=True))
    work, rates = workload(args, cfg)
    bound = args.max_lag if args.max_lag is not None else cfg.max_lag_steps
    drops = cfg.preprocess.lag_drop != "never"
    plan = recommend(work, bound, in_the_mean=not drops)
    if plan is None:
        raise ConfigError(
            f"no split of {work.devices} device(s) respects a lag of {bound} steps with batches of {work.batch_size}: "
            "raise the batch size or the bound"
        )
    conventional = conventional_rate(work, max(plan.largest_lag, 1))
    print_plan(console, work, rates, plan, conventional)
    dropped = print_drops(console, work, plan, cfg.attempts, bound if drops else None)
    for line in ceiling.lines(cfg, plan.rate, work.devices, work.lengths.mean, args.prompt_length):
        console.print(line)
    wanted = ceiling.needs(plan.rate, work.lengths.mean, args.prompt_length)
    result = {
        "plan": msgspec.to_builtins(plan),
        "overrides": overrides(work, plan),
        "conventional_rate": conventional,
        "speed_up": plan.rate / conventional,
        "rates": rates.source,
        "dropped": dropped,
        "needs": msgspec.to_builtins(wanted),
        "short": ceiling.shortages(wanted, cfg),
    }
    return work, plan, result


def workload(args: argparse.Namespace, cfg: Config) -> tuple[Workload, Rates]:
    """Return workload and rates from the command line, with the configuration's values as defaults."""
    devices = args.gpus or _configured_gpus(cfg)
    longest = args.max_length or int(cfg.llm.parameters["max_tokens"])
    mean = args.mean_length or MEAN_SHARE * longest
    lengths = {
        "lognormal": lambda: Lengths.lognormal(mean, longest),
        "uniform": lambda: Lengths.uniform(longest),
        "constant": lambda: Lengths.constant(longest),
    }[args.lengths]()
    per_llm = args.gpus_per_llm or devices_per_server(cfg)
    rates = choose_rates(args, cfg, lengths, per_llm)
    work = Workload(
        devices=devices,
        batch_size=args.batch_size or cfg.batch_size,
        lengths=lengths,
        train_time=1.0 / rates.train,
        utilisation=rates.decode,
        max_concurrency=rates.max_concurrency,
        devices_per_server=per_llm,
        devices_per_trainer_group=args.seq_parallel or cfg.finetune.seq_parallel,
    )
    if work.devices < work.devices_per_server + work.devices_per_trainer_group:
        raise ConfigError(
            f"{work.devices} device(s) cannot hold a server of {work.devices_per_server} and a trainer group of "
            f"{work.devices_per_trainer_group}: use more devices, or one GPU for both (world.share_devices=true)"
        )
    return work, rates


def _configured_gpus(cfg: Config) -> int:
    configured = cfg.world.gpus_per_node
    if configured is not None:
        per_node = [configured] * len(cfg.world.hosts or [""]) if isinstance(configured, int) else configured
        return sum(per_node)
    world = cfg.world
    return count_visible_gpus({}) or world.actor_fraction + world.preprocessor_fraction + world.finetune_fraction


def choose_rates(args: argparse.Namespace, cfg: Config, lengths: Lengths, per_llm: int) -> Rates:
    if bool(args.decode) != bool(args.train):
        raise ConfigError(
            "measured rates are --decode (once or more) and --train together; without both they are assumed"
        )
    if args.decode:
        return measured_rates(dict(args.decode), args.train)
    model = args.model or cfg.model_path
    shape = find_model_shape(model)
    if shape is None and not args.model and cfg.tiny_model is not None:
        raise ConfigError("the run builds its model itself: give --model=FOLDER, or measured rates (--decode, --train)")
    if shape is None:
        raise ConfigError(
            f"the config.json of {model!r} is not on this machine: give a local folder, or measured rates "
            "(--decode, --train)"
        )
    return assumed_rates(cfg, shape, GPUS[args.gpu], lengths, prompt_tokens=args.prompt_length, ranks=per_llm)


def overrides(work: Workload, plan: PipelinePlan) -> list[str]:
    """Return the plan as arguments for the launcher."""
    return [
        f"world.actor_fraction={plan.generating}",
        f"world.finetune_fraction={work.devices - plan.generating}",
        f"actor.llm_max_rollouts={plan.concurrency * work.devices_per_server}",
    ]


def print_plan(console: Console, work: Workload, rates: Rates, plan: PipelinePlan, conventional: float) -> None:
    training = work.devices - plan.generating
    steps_per_h = 3600 * plan.rate / (work.lengths.mean * work.batch_size)
    console.print(
        f"{work.devices} devices, {work.batch_size} sequences per step, lengths mean {work.lengths.mean:.0f}, "
        f"longest {work.lengths.longest}; rates per device are {rates.source}: training {rates.train:,.0f} tokens/s, "
        f"decoding {float(rates.decode(plan.concurrency)):,.0f} tokens/s at {plan.concurrency} sequences "
        f"(at most {rates.max_concurrency} fit)"
    )
    table = Table(title="Recommended", title_justify="left", show_header=False)
    for name, value in (
        ("generating / training devices", f"{plan.generating} / {training}"),
        ("sequences at a time per device", f"{plan.concurrency}"),
        (
            "trained tokens/s",
            f"{plan.rate:,.0f} (generation {plan.generation_rate:,.0f}, training {plan.training_rate:,.0f})",
        ),
        ("optimizer steps per hour", f"{steps_per_h:,.1f}"),
        (
            "in-flight lag, mean of tokens / of rollouts / largest",
            f"{plan.mean_in_flight_lag:.1f} / {plan.mean_rollout_lag:.1f} / {plan.largest_lag} steps",
        ),
        (
            "conventional at the same largest lag",
            f"{conventional:,.0f} tokens/s: the pipeline is {plan.rate / conventional:.2f}× as fast",
        ),
        ("command line", " ".join(overrides(work, plan))),
    ):
        table.add_row(name, value)
    console.print(table)


def print_drops(
    console: Console, work: Workload, plan: PipelinePlan, attempts: int, bound: int | None
) -> dict[str, Any]:
    """Print and return the share of rollouts that the bound on the lag drops, and the bound that keeps them.

    ``bound``: None if nothing is dropped for its lag.
    """
    needed = recommended_bound(work, plan, attempts)
    result: dict[str, Any] = {"recommended_max_lag_steps": needed}
    line = f"preprocess.lag_drop=rollout keeps 99 % of the longest tenth from max_lag_steps={needed} on"
    if bound is not None:
        shares = drop_shares(work, plan, attempts, bound)
        result |= {"rollouts": shares.rollouts, "longest_tenth": shares.longest_tenth}
        line = (
            f"Predicted at max_lag_steps={bound}: {shares.rollouts:.0%} of the rollouts are dropped, "
            f"{shares.longest_tenth:.0%} of the longest tenth (groups of {attempts}); {line}"
        )
    console.print(line)
    return result
