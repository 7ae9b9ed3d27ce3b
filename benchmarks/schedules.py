"""Pipeline against conventional training, to the same held-out success, on two cores with a real inference server.

    python -m benchmarks.schedules --json benchmarks/schedules.json             # all rows, seeds 5 … 9: 25 minutes
    python -m benchmarks.schedules --seeds 0 --rows "heavy G=1" --json FILE     # adds to what FILE holds
    python -m benchmarks.schedules --summary benchmarks/schedules.json          # the table again

Lengths are heavy-tailed (log-normal, up to 220 tokens) or constant, both with mean 40. One model, one task
(`schedules_task.py`), one placement: the inference server on core 0, the trainer on core 1, as each has its own devices
on GPUs; actor and preprocessor run where there is room. The model's width balances the two sides. Compared are the
pipeline (`max_lag_steps` 5), `schedule=conventional` with 1 and 8 steps per phase, and a conventional run that would
use both cores perfectly in both phases: its generation takes the measured run's time but the gap, by as much less as
decoding with half of the sequences on each core is faster at the measured rates; half the measured time of each train
step and of what actor and preprocessor do; no push (`perfect`: computed, not run; it learns as the measured run did).

The model of docs/algorithms.md §8 gets what each side does alone and predicts the seconds per step. `calibrations`,
one per seed: decoding rates by concurrency, with sequences so long that a token has as many before it as it has on
average among these lengths, and from a short conventional run with constant lengths the gap, the pause and what the
trainer's core does beside training, per token. The training time per token is that of the conventional runs
(`train_time`).
"""

import argparse
import itertools
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import schedules_runs as runs
from benchmarks import schedules_task as task
from pipelinerl.plan.rates import measured_rates
from pipelinerl.plan.throughput import Workload, conventional_rate, pipeline_plan
from pipelinerl.world import Job

BATCH_SIZE, CONCURRENCY, MAX_LAG = 64, 64, 5
STEPS, FIRST_COUNTED = 16, 8
"""Seconds per step are those of the steps from FIRST_COUNTED on: whole phases, and the pipeline is full."""
HEIGHTS = (1, 4, 16, 32, 64)
SCHEDULES = {
    "pipeline": (f"max_lag_steps={MAX_LAG}",),
    "G=1": ("schedule=conventional", "steps_per_phase=1", "max_lag_steps=0"),
    "G=8": ("schedule=conventional", "steps_per_phase=8", "max_lag_steps=7"),
}
ROWS = {f"{lengths} {schedule}": (lengths, schedule) for lengths in task.LENGTHS for schedule in SCHEDULES}


def make_run(row: str, seed: int) -> runs.Run:
    lengths, schedule = ROWS[row]
    steps = STEPS + (MAX_LAG + 1 if schedule == "pipeline" else 0)  # a pipeline runs empty at its end
    return runs.Run(lengths=lengths, steps=steps, overrides=SCHEDULES[schedule], seed=seed)


def calibrate(model: Path, folder: Path, server: Job) -> dict[str, Any]:
    """Each side alone: the server with constant lengths, the trainer in a short conventional run."""
    run = runs.Run(lengths="constant", steps=7, overrides=SCHEDULES["G=1"], seed=1000)
    runs.execute(run, model, folder, server)
    result = runs.measured(run, model, folder)
    rates = {
        name: runs.in_child(runs.decoding_rates, server, model, HEIGHTS, round(lengths.mean_square / lengths.mean), 2)
        for name, lengths in task.LENGTHS.items()
    }
    step_s, ends = result["step_s"][2:], result["step_ends_s"]
    steps, train_s = len(step_s), statistics.mean(step_s)
    tokens = BATCH_SIZE * task.MEAN
    busy_s = (result["core_busy_s"][-1][1] - result["core_busy_s"][1][1]) / steps
    decode_s = tokens / float(measured_rates(rates["constant"], 1.0).decode(BATCH_SIZE))
    return {
        "decode_tokens_per_s": {
            name: {str(height): round(rate, 1) for height, rate in by_height.items()}
            for name, by_height in rates.items()
        },
        "beside_s_per_token": (busy_s - train_s) / tokens,
        "gap_s": (ends[-1] - ends[1]) / steps - train_s - decode_s,
        "pause_s": statistics.mean(result["pause_ms"][2:]) / 1000,
    }


def calibration(data: dict[str, Any], lengths_name: str) -> dict[str, Any]:
    """The mean of all."""
    every = list(data["calibrations"].values())
    rates = [one["decode_tokens_per_s"][lengths_name] for one in every]
    mean = {key: statistics.mean(one[key] for one in every) for key in every[0] if key != "decode_tokens_per_s"}
    return mean | {"decode_tokens_per_s": {height: statistics.mean(r[height] for r in rates) for height in rates[0]}}


def train_time(data: dict[str, Any], lengths_name: str) -> float:
    """Seconds per generated token of the trainer alone, as in the conventional runs; it depends on the packing."""
    step_s = [s for result in data["runs"][f"{lengths_name} G=1"].values() for s in result["step_s"]]
    return statistics.mean(step_s) / (BATCH_SIZE * task.MEAN)


def workload(data: dict[str, Any], lengths_name: str, devices: int, schedule: str) -> Workload:
    """What the model knows. The pipeline's trainer shares its core with pushes, actor and preprocessor."""
    known = calibration(data, lengths_name)
    rates = measured_rates({float(h): r for h, r in known["decode_tokens_per_s"].items()}, 1.0)
    beside = known["beside_s_per_token"] if schedule == "pipeline" else 0.0
    return Workload(
        devices=devices,
        batch_size=BATCH_SIZE,
        lengths=task.LENGTHS[lengths_name],
        train_time=train_time(data, lengths_name) + beside,
        utilisation=rates.decode,
        max_concurrency=CONCURRENCY,
        update_pause=known["pause_s"],
        phase_gap=known["gap_s"],
    )


def predicted_step_s(data: dict[str, Any], lengths_name: str, schedule: str) -> float:
    """Seconds per optimizer step by docs/algorithms.md §8."""
    lengths = task.LENGTHS[lengths_name]
    if schedule == "pipeline":
        work = workload(data, lengths_name, 2, schedule)
        return BATCH_SIZE * lengths.mean / pipeline_plan(work, 1, min(CONCURRENCY, MAX_LAG * BATCH_SIZE)).rate
    work = workload(data, lengths_name, 1, schedule)
    return BATCH_SIZE * lengths.mean / conventional_rate(work, phase_steps(schedule))


def phase_steps(schedule: str) -> int:
    return int(schedule.partition("=")[2])


def perfect_step_ends(result: dict[str, Any], data: dict[str, Any], lengths_name: str, schedule: str) -> list[float]:
    """When the steps of a measured conventional run would have ended on two perfectly used cores."""
    group, known = phase_steps(schedule), calibration(data, lengths_name)
    one, two = (
        1 / conventional_rate(msgspec.structs.replace(work, train_time=0.0, phase_gap=0.0), group)
        for work in (workload(data, lengths_name, devices, schedule) for devices in (1, 2))
    )
    beside_s = known["beside_s_per_token"] * BATCH_SIZE * task.MEAN
    ends, now = [], 0.0
    for step, (train_s, end) in enumerate(zip(result["step_s"], result["step_ends_s"], strict=True)):
        if step % group == 0:
            generation_s = end - train_s - (result["step_ends_s"][step - 1] if step else 0.0)
            now += (generation_s - known["gap_s"]) * two / one
        now += (train_s + beside_s) / 2
        ends.append(now)
    return ends


def step_seconds(ends: Sequence[float]) -> float:
    return (ends[STEPS - 1] - ends[FIRST_COUNTED - 1]) / (STEPS - FIRST_COUNTED)


def time_to(success: Mapping[str, float], ends: Sequence[float], target: float) -> float | None:
    """Seconds from the first request to the held-out success, linear between snapshots; None = never reached."""
    points = sorted((int(step), value) for step, value in success.items())
    for (before, low), (step, value) in itertools.pairwise(points):
        if value >= target:
            start, end = (ends[before - 1] if before else 0.0), ends[step - 1]
            return end if value == low else start + (end - start) * max(target - low, 0.0) / (value - low)
    return None


def summarise(data: dict[str, Any], target: float) -> dict[str, Any]:
    """The table: per row means and ranges over seeds, ratios to the pipeline with the same lengths and seed."""
    table: dict[str, Any] = {}
    for row in [*ROWS, *(f"{lengths} {schedule} perfect" for lengths in task.LENGTHS for schedule in ("G=1", "G=8"))]:
        lengths, schedule, *kind = row.split()
        source = f"{lengths} {schedule}" if kind == ["perfect"] else row
        line = summarise_row(data, source, kind == ["perfect"], target)
        if line is not None:
            table[row] = line
    return table


def summarise_row(data: dict[str, Any], row: str, perfect: bool, target: float) -> dict[str, Any] | None:
    lengths, schedule = ROWS[row]
    seeds = [
        seed
        for seed in sorted(data["runs"].get(row, {}), key=int)
        if seed in data["runs"].get(f"{lengths} pipeline", {})
    ]
    if not seeds or (perfect and f"{lengths} G=1" not in data["runs"]):
        return None
    steps, times, step_ratios, time_ratios = [], [], [], []
    for seed in seeds:
        result, pipeline = data["runs"][row][seed], data["runs"][f"{lengths} pipeline"][seed]
        ends = perfect_step_ends(result, data, lengths, schedule) if perfect else result["step_ends_s"]
        steps.append(step_seconds(ends))
        step_ratios.append(steps[-1] / step_seconds(pipeline["step_ends_s"]))
        reached = time_to(result["success"], ends, target)
        base = time_to(pipeline["success"], pipeline["step_ends_s"], target)
        if reached is not None and base is not None:
            times.append(reached)
            time_ratios.append(reached / base)
    line = {
        "seeds": len(seeds),
        "reached": len(times),
        "seconds_to_success": spread(times),
        "times_the_pipelines": spread(time_ratios),
        "step_s": spread(steps),
        "step_times_the_pipelines": spread(step_ratios),
        "lag_mean": round(statistics.mean(data["runs"][row][seed]["lag_mean"] for seed in seeds), 2),
        "lag_max": max(data["runs"][row][seed]["lag_max"] for seed in seeds),
    }
    if not perfect and f"{lengths} G=1" in data["runs"]:
        line["predicted_step_s"] = round(predicted_step_s(data, lengths, schedule), 3)
        line["measured_over_predicted"] = round(statistics.mean(steps) / line["predicted_step_s"], 3)
    return line


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "mean": round(statistics.mean(values), 3),
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def print_table(table: dict[str, Any], target: float) -> None:
    print(f"seconds to held-out success {target} and per optimizer step; × = times the pipeline's, mean (min … max)")
    for row, line in table.items():
        reached, ratio, step = line["seconds_to_success"], line["times_the_pipelines"], line["step_times_the_pipelines"]
        words = [f"{row:24s} seeds {line['reached']}/{line['seeds']}"]
        if reached and ratio:
            words.append(f"{reached['mean']:6.1f} s  {ratio['mean']:.2f}× ({ratio['min']:.2f} … {ratio['max']:.2f})")
        words.append(
            f"step {line['step_s']['mean']:.2f} s  {step['mean']:.2f}× ({step['min']:.2f} … {step['max']:.2f})"
        )
        words.append(f"lag {line['lag_mean']:.1f} (max {line['lag_max']:.0f})")
        if "predicted_step_s" in line:
            words.append(
                f"predicted {line['predicted_step_s']:.2f} s, measured/predicted {line['measured_over_predicted']:.2f}"
            )
        print("  ".join(words))


def measure(args: argparse.Namespace, data: dict[str, Any], save: Any) -> None:
    rows = args.rows
    runs.environment()
    runs.preload()
    with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
        folder = Path(scratch)
        model = runs.ensure_model(args.model or folder / "model")
        with runs.running_server(model, folder / "server") as server:
            for seed in args.seeds:
                data["calibrations"][str(seed)] = calibrate(model, folder / f"calibration-{seed}", server)
                save()
                for row in rows:
                    run = make_run(row, seed)
                    started = time.monotonic()
                    place = folder / f"{row.replace(' ', '-').replace('=', '')}-{seed}"
                    runs.execute(run, model, place, server)
                    data["runs"].setdefault(row, {})[str(seed)] = runs.measured(run, model, place)
                    shutil.rmtree(place)
                    save()
                    print(f"{row} seed {seed}: {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="results; what it holds already is kept")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(5, 10)))
    parser.add_argument(
        "--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW", help=f"of {list(ROWS)}"
    )
    parser.add_argument("--model", type=Path, help="folder of the model, built there if it does not exist")
    parser.add_argument("--target", type=float, default=0.5, help="held-out success")
    parser.add_argument("--summary", type=Path, help="print the table of this file, measure nothing")
    args = parser.parse_args()
    path = args.summary or args.json
    data: dict[str, Any] = {"calibrations": {}, "runs": {}}
    if path and path.exists():
        data = json.loads(path.read_text())
        del data["summary"]

    def save() -> None:
        if args.json:
            described = {"benchmark": "schedules", "machine": f"{platform.machine()}, 2 cores", "target": args.target}
            table = summarise(data, args.target)
            args.json.write_text(json.dumps({**described, "summary": table, **data}, indent=1) + "\n")

    if args.summary is None:
        measure(args, data, save)
    print_table(summarise(data, args.target), args.target)


if __name__ == "__main__":
    main()
