"""Verdicts on the facts of the checks: one finding for each row of the page. Pure.

`PASSED`: as planned or better. `FAILED`: something is broken. `SLOW`: it works, far below the prediction. `NOTED`: a
fact without a bound. `NOT_RUN`: no time, or no second card.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.inspect.finding import Finding, Level
from pipelinerl.launcher.gpu_check.machine import Machine
from pipelinerl.plan.speed import GPUS, TRAINED_FLOPS, find_gpu, training_rate

Facts = Mapping[str, Any]

ENOUGH_SPEED = 0.5
"""Share of a predicted rate below which a verdict is `slow`. Predictions are rooflines."""
MOST_MEMORY = 1.15
"""Measured over planned memory above which a plan is wrong: it would start runs that then fail for memory."""
LEAST_GAIN = 0.2
"""Held-out success that the quickstart must gain. It gains 0.5 and more."""
SLOW_PAUSE = 2.0
"""Measured over planned pause above which a verdict is `slow`."""
LEARNING_STEPS = 160
"""Optimizer steps after which the quickstart has learned."""
WORDS_STEPS = 60
"""Optimizer steps of `words` after which its recorded seeds had gained .28 of reward and more, beyond `LEAST_GAIN`."""


def verdict(level: Level, title: str, measured: str = "", planned: str = "", note: str = "") -> Finding:
    """One row of the page: what was measured, beside what was planned."""
    parts = (measured, planned and f"planned {planned}", note)
    return Finding(level, title, "; ".join(part for part in parts if part))


def failed(check: str, facts: Facts) -> Finding | None:
    """The verdict on a check whose process failed or was not run. None: it ended well."""
    if "not_run" in facts:
        return verdict(Level.NOT_RUN, check, note=facts["not_run"])
    return verdict(Level.FAILED, check, note=facts["problem"]) if facts.get("problem") else None


def judge_imports(facts: Facts) -> list[Finding]:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    missing = facts["missing"]
    note = "; ".join([*missing[:3], *facts["unsupported"]]) + (f"; {len(missing)} missing" if missing[3:] else "")
    level = Level.FAILED if missing else Level.NOTED if facts["unsupported"] else Level.PASSED
    return [verdict(level, "imports", measured=versions, note=note)]


def judge_trainer(machine: Machine, facts: Facts) -> list[Finding]:
    """Speed and memory of an optimizer step. On a CPU neither is compared."""
    name = f"trainer, {facts['tokens'] // 1000}k tokens" if facts["tokens"] >= 1000 else f"trainer, {facts['tokens']}"
    label, sane = find_gpu(machine.name), facts["loss_is_finite"]
    measured, planned, level = f"{facts['tokens_per_s']:,.0f} tokens/s", "", Level.NOTED
    note = f"{facts['attention']}, {facts['engine']}" + ("" if sane else "; the loss is not finite")
    if label is not None:
        gpu = GPUS[label]
        predicted = training_rate(machine.shape, gpu, facts["document_tokens"], recomputed=True)
        used = TRAINED_FLOPS * machine.shape.active_parameters * facts["tokens_per_s"] / gpu.flops
        measured, planned = f"{measured}, MFU {used:.1%}", f"{predicted:,.0f} tokens/s ({label})"
        level = Level.SLOW if facts["tokens_per_s"] < ENOUGH_SPEED * predicted else Level.PASSED
    elif not machine.is_rehearsal:
        note += f"; the data sheet of {machine.name} is not known"
    level = level if sane else Level.FAILED
    speed = verdict(level, f"{name}: speed", measured=measured, planned=planned, note=note)
    return [speed, judge_memory(f"{name}: memory", facts["peak_bytes"], facts["planned_bytes"])]


def judge_memory(check: str, measured: int | None, planned: int) -> Finding:
    """`failed` where the plan is too small."""
    if measured is None:
        return verdict(Level.NOTED, check, planned=gib(planned), note="this device counts no tensors")
    level = Level.PASSED if measured <= MOST_MEMORY * planned else Level.FAILED
    return verdict(level, check, measured=gib(measured), planned=gib(planned), note=f"{measured / planned:.2f} ×")


def judge_quickstart(machine: Machine, facts: Facts) -> list[Finding]:
    """Whether it learned, and every version was swapped in."""
    before, after = facts["success_before"], facts["success_after"]
    is_long = facts["steps"] >= LEARNING_STEPS
    known = before is not None and after is not None
    learned = known and after - before >= LEAST_GAIN
    return [
        verdict(
            Level.NOTED if not is_long else Level.PASSED if learned else Level.FAILED,
            facts["name"],
            measured=f"success {before:.2f} → {after:.2f}" if known else "no evaluation",
            planned=f"+{LEAST_GAIN}" if is_long else "",
            note=f"{facts['steps']} steps; {facts['attention_backend'] or 'attention backend not named'}",
        ),
        judge_swaps(f"{facts['name']}: swaps", facts),
    ]


def judge_words(machine: Machine, facts: Facts) -> list[Finding]:
    """Whether a pretrained model learned, with its curve on held-out problems."""
    points = facts["curve"]
    is_long = facts["steps"] >= WORDS_STEPS
    learned = len(points) > 1 and points[-1][2] - points[0][2] >= LEAST_GAIN
    shown = ", ".join(f"{version}: {reward:.2f} ({success:.2f})" for version, success, reward in points)
    return [
        verdict(
            Level.NOTED if not is_long else Level.PASSED if learned else Level.FAILED,
            "words",
            measured=f"reward (success) after steps {shown}" if points else "no evaluation",
            planned=f"+{LEAST_GAIN}" if is_long else "",
            note=f"{facts['steps']} steps",
        ),
        judge_swaps("words: swaps", facts),
    ]


def judge_swaps(check: str, facts: Facts) -> Finding:
    """Every update must go live in place: no failed swap, no missed probe, no pointer that moved under a CUDA graph."""
    faults, live = facts["faults"], facts["swaps"]
    return verdict(
        Level.FAILED if faults or not live else Level.PASSED,
        check,
        measured=f"{live} live" + (", CUDA graphs captured" if facts["has_graphs"] else ", no CUDA graphs"),
        note=faults[0] if faults else "" if live else "no update went live",
    )


def judge_serving(machine: Machine, facts: Facts) -> list[Finding]:
    """Swaps, pause, decoding, probe noise and device memory of the run with random weights."""
    return [
        judge_swaps("serving: swaps", facts),
        judge_pause(facts["pauses_ms"], None if machine.is_rehearsal else facts["planned_pause_ms"]),
        judge_decoding(machine, facts["generated_per_s"], facts["predicted_per_s"]),
        judge_noise(facts["noise"], facts["noise_limit"]),
        judge_device(machine, facts["device_bytes"], facts["planned_device_bytes"]),
    ]


def judge_pause(pauses_ms: Sequence[float], planned_ms: float | None) -> Finding:
    if not pauses_ms:
        return verdict(Level.FAILED, "serving: pause", note="no update was measured")
    middle = statistics.median(pauses_ms)
    measured = f"{middle:.0f} ms, at most {max(pauses_ms):.0f}"
    if planned_ms is None:
        return verdict(Level.NOTED, "serving: pause", measured=measured, note=f"{len(pauses_ms)} updates")
    is_slow = middle > SLOW_PAUSE * planned_ms
    return verdict(
        Level.SLOW if is_slow else Level.PASSED,
        "serving: pause",
        measured=measured,
        planned=f"{planned_ms:.0f} ms",
        note=f"{len(pauses_ms)} updates",
    )


def judge_decoding(machine: Machine, rates: Sequence[float], predicted: float | None) -> Finding:
    if not rates:
        return verdict(Level.FAILED, "serving: decoding", note="no rate was measured")
    best = max(rates)
    if predicted is None or machine.is_rehearsal:
        return verdict(Level.NOTED, "serving: decoding", measured=f"{best:,.0f} tokens/s")
    return verdict(
        Level.PASSED if best >= ENOUGH_SPEED * predicted else Level.SLOW,
        "serving: decoding",
        measured=f"{best:,.0f} tokens/s",
        planned=f"{predicted:,.0f} tokens/s",
        note="beside a trainer on the same card",
    )


def judge_noise(noise: Sequence[float], limit: float) -> Finding:
    """Differences of log-probabilities between server and trainer at equal weights, one per scored version."""
    if not noise:
        return verdict(Level.FAILED, "serving: probe noise", note="no version was scored")
    middle, largest = statistics.median(noise), max(noise)
    return verdict(
        Level.PASSED if largest <= limit else Level.FAILED,
        "serving: probe noise",
        measured=f"median {middle:.2g}, largest {largest:.2g} nats",
        planned=f"≤ {limit:.2g}",
        note=f"{len(noise)} versions",
    )


def judge_device(machine: Machine, measured: int | None, planned: int) -> Finding:
    if measured is None or machine.is_rehearsal:
        return verdict(Level.NOTED, "serving: device memory", planned=gib(planned), note="not measured here")
    return judge_memory("serving: device memory", measured, planned)


def judge_communicators(machine: Machine, facts: Facts) -> list[Finding]:
    """Memory of a further communicator of two ranks, at NCCL's default number of channels."""
    further = statistics.median(facts["further_bytes"])
    measured = f"{further / 2**20:,.0f} MiB each, the first {facts['first_bytes'] / 2**20:,.0f}"
    return [verdict(Level.NOTED, "communicators", measured=measured, note=f"NCCL {facts['nccl']}")]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
