"""Pipeline against conventional training, to the same held-out success, on two cores with a real inference server.

    python -m benchmarks.schedules --json benchmarks/schedules.json             # all rows, seeds 5 … 9: 30 minutes
    python -m benchmarks.schedules --seeds 0 --rows "heavy G=1" --json FILE     # adds to what FILE holds
    python -m benchmarks.schedules --seeds 0 --rows --ratios .25 .5 1 2 4 --json FILE   # off balance: 25 minutes
    python -m benchmarks.schedules --summary benchmarks/schedules.json          # the table again

Lengths are heavy-tailed (log-normal, up to 220 tokens) or constant, both with mean 40. One model, one task
(`schedules_task.py`), one placement: the inference server on core 0, the trainer on core 1, as each has its own devices
on GPUs; actor and preprocessor run where there is room. Before anything is compared, the width of the model is chosen
so that generation alone takes as long as training alone, within a tenth (`find_width`); where no width does that, fewer
sequences at a time or longer prompts do the rest. Compared are the
pipeline (`max_lag_steps` 5), `schedule=conventional` with 1 and 8 steps per phase, and a conventional run that would
use both cores perfectly in both phases: its generation takes the measured run's time but the gap, by as much less as
decoding with half of the sequences on each core is faster at the measured rates; half the measured time of each train
step and of what actor and preprocessor do; no push (`perfect`: computed, not run; it learns as the measured run did).

The model of docs/algorithms.md §8 gets what each side does alone and predicts the seconds per step. `calibrations`,
one per seed: decoding rates by concurrency, with sequences so long that a token has as many before it as it has on
average among these lengths, and from a short conventional run with constant lengths the gap, the pause and what the
trainer's core does beside training, per token. The training time per token is that of the conventional runs
(`train_time`). `together` is how much slower either core is while the other one works: in conventional runs only one
does. It comes from decoding beside plain forward and backward passes, so that nothing of the project is in it.

`--ratios` repeats the comparison where generation could give a quarter to four times of what training takes: with
fewer sequences at a time, or with longer prompts, which attempts of a group share and the trainer computes for each.
Beside it stands the planner's choice, the schedule with the least predicted seconds per step.
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import schedules_runs as runs
from benchmarks import schedules_task as task
from benchmarks.provenance import machine
from pipelinerl.plan.speed import measured_rates
from pipelinerl.plan.throughput import PipelinePlan, Workload, conventional_rate, pipeline_plan
from pipelinerl.world import Job, WorldMap

BATCH_SIZE, CONCURRENCY, MAX_LAG = 64, 64, 5
STEPS, FIRST_COUNTED = 16, 8
"""Seconds per step are those of the steps from FIRST_COUNTED on: whole phases, and the pipeline is full."""
HEIGHTS = (1, 4, 16, 32, 64)
SCHEDULES = {
    "pipeline": (f"max_lag_steps={MAX_LAG}",),
    "G=1": ("schedule=conventional", "steps_per_phase=1", "max_lag_steps=0"),
    "G=8": ("schedule=conventional", "steps_per_phase=8", "max_lag_steps=7"),
}
RATIO_ROWS = [f"heavy {schedule}" for schedule in SCHEDULES]
ROWS = {f"{lengths} {schedule}": (lengths, schedule) for lengths in task.LENGTHS for schedule in SCHEDULES}

BALANCED = 1.1
"""Generation may be so much faster or slower than training in a run that counts as balanced."""
WIDTHS, WIDTH_UNIT, WIDTH_TRIES = (128, 8192), 64, 5


def find_width(ratio_of: Callable[[int], float]) -> list[tuple[int, float]]:
    """Return (width, ratio) of every width that was tried. The best one is the last.

    A wider model slows training more than decoding, whose steps have a fixed cost, so the ratio grows with the width.
    The next width is where the line through the two best ones, in logarithms, meets a ratio of 1.

    Args:
        ratio_of: measures what generation could give over what training could take.
    """
    tried = [(task.WIDTH, ratio_of(task.WIDTH))]
    while abs(math.log(tried[-1][1])) > math.log(BALANCED) and len(tried) < WIDTH_TRIES:
        (width, ratio), *others = sorted(tried, key=lambda one: abs(math.log(one[1])))
        slope = 0.5  # of a model whose decoding step is half fixed cost
        if others:
            slope = min(max(math.log(ratio / others[0][1]) / math.log(width / others[0][0]), 0.2), 2.0)
        wanted = width * math.exp(-math.log(ratio) / slope)
        wanted = round(min(max(wanted, WIDTHS[0]), WIDTHS[1]) / WIDTH_UNIT) * WIDTH_UNIT
        if wanted in (width for width, _ in tried):
            break
        tried.append((wanted, ratio_of(wanted)))
    best = min(tried, key=lambda one: abs(math.log(one[1])))
    return [*(one for one in tried if one != best), best]


PACK_OF_LONG_PROMPTS = 768
"""Tokens, of the trainer's packs."""


def make_run(row: str, seed: int, data: Mapping[str, Any]) -> runs.Run:
    lengths, schedule = ROWS[row]
    steps = STEPS + (MAX_LAG + 1 if schedule == "pipeline" else 0)  # a pipeline runs empty at its end
    return runs.Run(
        lengths=lengths,
        steps=steps,
        overrides=(*SCHEDULES[schedule], *overrides(data)),
        seed=seed,
        filler=data.get("filler", 0),
    )


def overrides(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a run off balance."""
    longer = (f"finetune.seq_length={PACK_OF_LONG_PROMPTS}",) if data.get("filler") else ()
    return (f"actor.llm_max_rollouts={concurrency(data)}", *longer)


def concurrency(data: Mapping[str, Any]) -> int:
    """Sequences at a time of these runs."""
    return int(data.get("concurrency", CONCURRENCY))


def calibrate(
    model: Path, folder: Path, server: Job, data: Mapping[str, Any], heights: Sequence[int] = HEIGHTS
) -> dict[str, Any]:
    """Each side alone: the server with constant lengths, the trainer in a short conventional run."""
    filler = data.get("filler", 0)
    run = runs.Run(
        lengths="constant", steps=7, overrides=(*SCHEDULES["G=1"], *overrides(data)), seed=1000, filler=filler
    )
    runs.execute(run, model, folder, server)
    result = runs.measured(run, model, folder)
    (trainer,) = WorldMap.load(folder).get("finetune")
    rates = {
        name: runs.in_child(
            runs.decoding_rates, server, model, heights, round(lengths.mean_square / lengths.mean), 2, filler
        )
        for name, lengths in task.LENGTHS.items()
    }
    step_s, ends = result["step_s"][2:], result["step_ends_s"]
    steps, train_s = len(step_s), statistics.mean(step_s)
    tokens = BATCH_SIZE * task.MEAN
    busy_s = (result["core_busy_s"][-1][1] - result["core_busy_s"][1][1]) / steps
    known = measured_rates(rates["constant"], 1.0)
    in_flight = min(BATCH_SIZE, concurrency(data))
    decode_s = tokens / float(known.decode(min(in_flight, known.max_concurrency)))
    return {
        "decode_tokens_per_s": {
            name: {str(height): round(rate, 1) for height, rate in by_height.items()}
            for name, by_height in rates.items()
        },
        "train_s_per_token": train_s / tokens,
        "beside_s_per_token": max(busy_s - train_s, 0.0) / tokens,
        "gap_s": (ends[-1] - ends[1]) / steps - train_s - decode_s,
        "pause_s": statistics.mean(result["pause_ms"][2:]) / 1000,
        "together": runs.slowdown_together(server, trainer, model, in_flight, task.MEAN),
    }


ALONE = {"decode": 1.0, "train": 1.0}


def calibration(data: dict[str, Any], lengths_name: str) -> dict[str, Any]:
    """The mean of all."""
    every = list(data["calibrations"].values())
    rates = [one["decode_tokens_per_s"][lengths_name] for one in every]
    factors = [one.get("together", ALONE) for one in every]  # recorded results of before have none
    mean = {key: statistics.mean(one[key] for one in every) for key in every[0] if isinstance(every[0][key], float)}
    return mean | {
        "decode_tokens_per_s": {height: statistics.mean(r[height] for r in rates) for height in rates[0]},
        "together": {side: statistics.mean(one[side] for one in factors) for side in ALONE},
    }


def train_time(data: dict[str, Any], lengths_name: str) -> float:
    """Seconds per generated token of the trainer alone, as in the conventional runs; it depends on the packing."""
    step_s = [s for result in data["runs"].get(f"{lengths_name} G=1", {}).values() for s in result["step_s"]]
    if not step_s:
        return float(calibration(data, lengths_name)["train_s_per_token"])
    return statistics.mean(step_s) / (BATCH_SIZE * task.MEAN)


def workload(data: dict[str, Any], lengths_name: str, devices: int, schedule: str) -> Workload:
    """What the model knows. In the pipeline both cores work, the trainer's for pushes, actor and preprocessor too."""
    known = calibration(data, lengths_name)
    slower, beside = (known["together"], known["beside_s_per_token"]) if schedule == "pipeline" else (ALONE, 0.0)
    points = {float(h): rate / slower["decode"] for h, rate in known["decode_tokens_per_s"].items()}
    rates = measured_rates(points, 1.0)
    return Workload(
        devices=devices,
        batch_size=BATCH_SIZE,
        lengths=task.LENGTHS[lengths_name],
        train_time=train_time(data, lengths_name) * slower["train"] + beside,
        utilisation=rates.decode,
        max_concurrency=concurrency(data),
        update_pause=known["pause_s"],
        phase_gap=known["gap_s"],
    )


def predicted_pipeline(data: dict[str, Any], lengths_name: str) -> PipelinePlan:
    work = workload(data, lengths_name, 2, "pipeline")
    return pipeline_plan(work, 1, min(concurrency(data), MAX_LAG * BATCH_SIZE))


def predicted_step_s(data: dict[str, Any], lengths_name: str, schedule: str) -> float:
    """Seconds per optimizer step by docs/algorithms.md §8."""
    lengths = task.LENGTHS[lengths_name]
    if schedule == "pipeline":
        return BATCH_SIZE * lengths.mean / predicted_pipeline(data, lengths_name).rate
    work = workload(data, lengths_name, 1, schedule)
    return BATCH_SIZE * lengths.mean / conventional_rate(work, phase_steps(schedule))


def predicted_ratio(data: dict[str, Any], lengths_name: str) -> float:
    """What generation could give over what training could take."""
    plan = predicted_pipeline(data, lengths_name)
    return plan.generation_rate / plan.training_rate


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


def summarise_ratios(data: Mapping[str, Any]) -> dict[str, Any]:
    """For each ratio that was wanted and all of whose rows were run, the measured one and what came of it."""
    whole = {wanted: one for wanted, one in data.get("ratios", {}).items() if one["runs"].keys() >= set(RATIO_ROWS)}
    return {wanted: summarise_ratio(one) for wanted, one in whole.items()}


def summarise_ratio(one: dict[str, Any]) -> dict[str, Any]:
    predicted = {schedule: predicted_step_s(one, "heavy", schedule) for schedule in SCHEDULES}
    step_s = {
        schedule: statistics.mean(
            step_seconds(result["step_ends_s"]) for result in one["runs"][f"heavy {schedule}"].values()
        )
        for schedule in SCHEDULES
    }
    perfect = {
        schedule: statistics.mean(
            step_seconds(perfect_step_ends(result, one, "heavy", schedule))
            for result in one["runs"][f"heavy {schedule}"].values()
        )
        for schedule in ("G=1", "G=8")
    }
    choice = min(predicted, key=predicted.__getitem__)
    pipelines = one["runs"]["heavy pipeline"].values()
    return {
        "ratio": round(predicted_ratio(one, "heavy"), 2),
        "step_s": {schedule: round(value, 3) for schedule, value in step_s.items()},
        "predicted_step_s": {schedule: round(value, 3) for schedule, value in predicted.items()},
        "times_the_pipelines": {schedule: round(value / step_s["pipeline"], 2) for schedule, value in step_s.items()},
        "perfect_times_the_pipelines": {
            schedule: round(value / step_s["pipeline"], 2) for schedule, value in perfect.items()
        },
        "planners_choice": choice,
        "best_times_the_choices": round(min(step_s.values()) / step_s[choice], 2),
        "trainer_waits": mean_of(result.get("trainer_waits") for result in pipelines),
        "slots_held": mean_of(result.get("slots_held") for result in pipelines),
    }


def mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), 3) if known else None


def print_ratios(table: Mapping[str, Any]) -> None:
    if table:
        print("generation could give RATIO of what training takes; steps in × of the pipeline's; the planner's choice")
    for wanted, line in table.items():
        times, perfect = line["times_the_pipelines"], line["perfect_times_the_pipelines"]
        print(
            f"wanted {wanted:>4s} measured {line['ratio']:.2f}  G=1 {times['G=1']:.2f}×  G=8 {times['G=8']:.2f}×  "
            f"perfect {perfect['G=1']:.2f}×, {perfect['G=8']:.2f}×  choice {line['planners_choice']} "
            f"({line['best_times_the_choices']:.2f} of the best)  trainer waits {line['trainer_waits']}  "
            f"slots held {line['slots_held']}"
        )


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


def measure(args: argparse.Namespace, data: dict[str, Any], save: Callable[[], None]) -> None:
    runs.environment()
    runs.preload()
    with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
        folder = Path(scratch)
        model = args.model or balanced_model(folder, data)
        save()
        with runs.running_server(model, folder / "server") as server:
            for seed in args.seeds:
                measure_seed(seed, args.rows, model, folder / str(seed), server, data, save)
            for wanted in args.ratios:
                one = data["ratios"].setdefault(f"{wanted:g}", off_balance(data, wanted, model))
                for seed in args.seeds:
                    print(f"generation : training {wanted:g}", flush=True)
                    measure_seed(seed, RATIO_ROWS, model, folder / f"{wanted:g}-{seed}", server, one, save)


def measure_seed(
    seed: int,
    rows: Sequence[str],
    model: Path,
    folder: Path,
    server: Job,
    data: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Calibrate, then run every row once, and keep the results in ``data``."""
    data["calibrations"][str(seed)] = calibrate(model, folder / "calibration", server, data)
    save()
    for row in rows:
        run, started = make_run(row, seed, data), time.monotonic()
        place = folder / row.replace(" ", "-").replace("=", "")
        runs.execute(run, model, place, server)
        data["runs"].setdefault(row, {})[str(seed)] = runs.measured(run, model, place)
        shutil.rmtree(place)
        save()
        print(f"{row} seed {seed}: {time.monotonic() - started:.0f} s", flush=True)


def balanced_model(folder: Path, data: dict[str, Any]) -> Path:
    """A model of the width that balances both sides. Where none does, sequences or prompts do the rest.

    What ``data`` has already is taken.
    """
    known: dict[int, dict[str, Any]] = {}

    def model_of(width: int) -> Path:
        return runs.ensure_model(folder / f"width-{width}", width)

    def ratio_of(width: int) -> float:
        place = folder / f"server-{width}"
        with runs.running_server(model_of(width), place) as server:
            alone = calibrate(model_of(width), folder / f"calibration-{width}", server, {}, heights=(16, CONCURRENCY))
        known[width] = {"calibrations": {"": alone}, "runs": {}}
        ratio = predicted_ratio(known[width], "heavy")
        print(f"width {width}: generation could give {ratio:.2f} of what training takes", flush=True)
        return ratio

    if "width" not in data:
        data["tried_widths"] = find_width(ratio_of)
        data["width"], ratio = data["tried_widths"][-1]
        if abs(math.log(ratio)) > math.log(BALANCED):
            rest = off_balance(known[data["width"]], 1.0, model_of(data["width"]))
            data |= {key: rest[key] for key in ("concurrency", "filler")}
    return model_of(data["width"])


def off_balance(data: dict[str, Any], wanted: float, model: Path) -> dict[str, Any]:
    """What fewer sequences at a time or longer prompts make of the task of ``data``. Nothing is measured yet."""
    now, filler = concurrency(data), data.get("filler", 0)
    start = {"calibrations": {}, "runs": {}, "concurrency": now, "filler": filler}
    ratio = predicted_ratio(data, "heavy")
    if wanted > ratio:
        prompt = runs.in_child(runs.prompt_length, model)
        return start | {"filler": filler + round((wanted / ratio - 1) * (prompt + filler + task.MEAN))}
    fewer = (predicted_ratio({**data, "concurrency": height}, "heavy") for height in range(1, now + 1))
    place = min(enumerate(fewer, 1), key=lambda one: abs(math.log(one[1] / wanted)))[0]
    return start | {"concurrency": place}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="results; what it holds already is kept")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(5, 10)))
    parser.add_argument(
        "--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW", help=f"of {list(ROWS)}"
    )
    parser.add_argument("--model", type=Path, help="folder of the model. Without one its width is found")
    parser.add_argument("--ratios", type=float, nargs="*", default=[], help="generation : training, off balance")
    parser.add_argument("--target", type=float, default=0.5, help="held-out success")
    parser.add_argument("--summary", type=Path, help="print the table of this file, measure nothing")
    args = parser.parse_args()
    path = args.summary or args.json
    data: dict[str, Any] = {"calibrations": {}, "runs": {}, "ratios": {}}
    if path and path.exists():
        data |= json.loads(path.read_text())
        for derived in ("summary", "ratio_summary"):
            data.pop(derived, None)

    def save() -> None:
        if args.json:
            described = {"benchmark": "schedules", "machine": machine(), "target": args.target}
            tables = {"summary": summarise(data, args.target), "ratio_summary": summarise_ratios(data)}
            args.json.write_text(json.dumps({**described, **tables, **data}, indent=1) + "\n")

    if args.summary is None:
        measure(args, data, save)
    print_table(summarise(data, args.target), args.target)
    print_ratios(summarise_ratios(data))


if __name__ == "__main__":
    main()
