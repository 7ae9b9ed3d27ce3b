"""The commands of `research`, which print their results and return them as plain data."""

import argparse
import json
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from pipelinerl.errors import ConfigError
from pipelinerl.plan.research.compare import compare_run, run_evaluations
from pipelinerl.plan.research.scaling import fit_scaling
from pipelinerl.plan.research.simulate import simulate_pipeline
from pipelinerl.plan.throughput import PipelinePlan, Workload

SIMULATED_STEPS = 150
MAX_SIMULATED_SLOTS = 4096


def print_simulation(console: Console, work: Workload, plan: PipelinePlan) -> dict[str, float]:
    slots = plan.generating * plan.concurrency
    if slots > MAX_SIMULATED_SLOTS:
        raise ConfigError(
            f"the simulation takes at most {MAX_SIMULATED_SLOTS} sequences at a time, the plan has {slots}"
        )
    steps = SIMULATED_STEPS + 4 * slots // work.batch_size
    simulated = simulate_pipeline(work, plan.generating, plan.concurrency, steps)
    console.print(
        f"Simulated: {simulated.rate:,.0f} tokens/s ({simulated.rate / plan.rate:.3f} of the formula), lag mean "
        f"{simulated.mean_lag:.1f}, largest {simulated.largest_lag} (queue and batch under training included)"
    )
    return msgspec.to_builtins(simulated)


def run_compare(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    facts, prediction, lines = compare_run(args.run_dir)
    table = Table(title=f"{args.run_dir}: model and measurement", title_justify="left")
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


def run_scaling(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Fit held-out success against optimizer steps of a run, or the (compute, reward) pairs of a JSON file."""
    points = run_evaluations(args.source) if args.source.is_dir() else json.loads(args.source.read_text())
    start = next((float(reward) for compute, reward in points if compute == 0), None)
    compute, reward = zip(*[pair for pair in points if pair[0] > 0], strict=True)
    fit = fit_scaling(compute, reward, start=start, ceiling=args.ceiling)
    console.print(
        f"A = {fit.asymptote:.3f} ± {fit.asymptote_error:.3f}, B = {fit.exponent:.2f}, C_mid = {fit.midpoint:.3g}, "
        f"R0 = {fit.start:.3f}; residual {fit.residual:.3f} over {len(compute)} points"
    )
    return msgspec.to_builtins(fit)
