"""Verdicts on the facts of the checks. Pure.

`passed`: as planned or better. `failed`: something is broken. `slow`: it works, far below the prediction. `noted`: a
fact without a bound. `not run`: no time, or no second card.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from pipelinerl.launcher.gpu_check.machine import Machine
from pipelinerl.plan.speed import TRAINED_FLOPS, gpu_named, training_rate

Facts = Mapping[str, Any]
Outcome = Literal["passed", "failed", "slow", "noted", "not run"]

ENOUGH_SPEED = 0.5
"""Share of a predicted rate below which a verdict is `slow`. Predictions are rooflines."""
MOST_MEMORY = 1.15
"""Measured over planned memory above which a plan is wrong: it would have let a run start that dies."""
LEAST_GAIN = 0.2
"""Held-out success that the quickstart must gain. It gains 0.5 and more."""
SLOW_PAUSE = 2.0
"""Measured over planned pause above which a verdict is `slow`."""
LEARNING_STEPS = 160
"""Optimizer steps after which the quickstart has learned."""


class GpuVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the page."""

    check: str
    outcome: Outcome
    measured: str = ""
    planned: str = ""
    note: str = ""


def failed(check: str, facts: Facts) -> GpuVerdict | None:
    """The verdict on a check whose process failed or was not run. None: it ended well."""
    if "not_run" in facts:
        return GpuVerdict(check=check, outcome="not run", note=facts["not_run"])
    return GpuVerdict(check=check, outcome="failed", note=facts["problem"]) if facts.get("problem") else None


def judge_imports(machine: Machine, facts: Facts) -> list[GpuVerdict]:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    missing = facts["missing"]
    note = "; ".join([*missing[:3], *facts["unsupported"]]) + (f"; {len(missing)} missing" if missing[3:] else "")
    outcome: Outcome = "failed" if missing else "noted" if facts["unsupported"] else "passed"
    return [GpuVerdict(check="imports", outcome=outcome, measured=versions, note=note)]


def judge_trainer(machine: Machine, facts: Facts) -> list[GpuVerdict]:
    """Speed and memory of an optimizer step. On a CPU neither is compared."""
    name = f"trainer, {facts['tokens'] // 1000}k tokens" if facts["tokens"] >= 1000 else f"trainer, {facts['tokens']}"
    label, gpu = gpu_named(machine.name)
    predicted = training_rate(machine.shape, gpu, facts["document_tokens"], recomputed=True)
    used = TRAINED_FLOPS * machine.shape.active_parameters * facts["tokens_per_s"] / gpu.flops
    measured = f"{facts['tokens_per_s']:,.0f} tokens/s" + ("" if machine.is_rehearsal else f", MFU {used:.1%}")
    planned = "" if machine.is_rehearsal else f"{predicted:,.0f} tokens/s ({label})"
    is_slow = not machine.is_rehearsal and facts["tokens_per_s"] < ENOUGH_SPEED * predicted
    sane = facts["loss_is_finite"]
    speed = GpuVerdict(
        check=f"{name}: speed",
        outcome="failed" if not sane else "slow" if is_slow else "noted" if machine.is_rehearsal else "passed",
        measured=measured,
        planned=planned,
        note=f"{facts['attention']}, {facts['engine']}" + ("" if sane else "; the loss is not finite"),
    )
    return [speed, judge_memory(f"{name}: memory", facts["peak_bytes"], facts["planned_bytes"])]


def judge_memory(check: str, measured: int | None, planned: int) -> GpuVerdict:
    """`failed` where the plan is too small."""
    if measured is None:
        return GpuVerdict(check=check, outcome="noted", planned=gib(planned), note="this device counts no tensors")
    outcome: Outcome = "passed" if measured <= MOST_MEMORY * planned else "failed"
    return GpuVerdict(
        check=check, outcome=outcome, measured=gib(measured), planned=gib(planned), note=f"{measured / planned:.2f} ×"
    )


def judge_quickstart(machine: Machine, facts: Facts) -> list[GpuVerdict]:
    """Whether it learned, and every version was swapped in."""
    before, after = facts["success_before"], facts["success_after"]
    is_long = facts["steps"] >= LEARNING_STEPS
    known = before is not None and after is not None
    learned = known and after - before >= LEAST_GAIN
    return [
        GpuVerdict(
            check=facts["name"],
            outcome="noted" if not is_long else "passed" if learned else "failed",
            measured=f"success {before:.2f} → {after:.2f}" if known else "no evaluation",
            planned=f"+{LEAST_GAIN}" if is_long else "",
            note=f"{facts['steps']} steps; {facts['attention_backend'] or 'attention backend not named'}",
        ),
        judge_swaps(f"{facts['name']}: swaps", facts),
    ]


def judge_swaps(check: str, facts: Facts) -> GpuVerdict:
    """Every update must go live in place: no failed swap, no missed probe, no pointer that moved under a CUDA graph."""
    faults, live = facts["faults"], facts["swaps"]
    return GpuVerdict(
        check=check,
        outcome="failed" if faults or not live else "passed",
        measured=f"{live} live" + (", CUDA graphs captured" if facts["has_graphs"] else ", no CUDA graphs"),
        note=faults[0] if faults else "" if live else "no update went live",
    )


def judge_serving(machine: Machine, facts: Facts) -> list[GpuVerdict]:
    """Swaps, pause, decoding, probe noise and device memory of the run with random weights."""
    return [
        judge_swaps("serving: swaps", facts),
        judge_pause(facts["pauses_ms"], None if machine.is_rehearsal else facts["planned_pause_ms"]),
        judge_decoding(machine, facts["generated_per_s"], facts["predicted_per_s"]),
        judge_noise(facts["noise"], facts["noise_limit"]),
        judge_device(machine, facts["device_bytes"], facts["planned_device_bytes"]),
    ]


def judge_pause(pauses_ms: Sequence[float], planned_ms: float | None) -> GpuVerdict:
    if not pauses_ms:
        return GpuVerdict(check="serving: pause", outcome="failed", note="no update was measured")
    middle = statistics.median(pauses_ms)
    measured = f"{middle:.0f} ms, at most {max(pauses_ms):.0f}"
    if planned_ms is None:
        return GpuVerdict(check="serving: pause", outcome="noted", measured=measured, note=f"{len(pauses_ms)} updates")
    is_slow = middle > SLOW_PAUSE * planned_ms
    return GpuVerdict(
        check="serving: pause",
        outcome="slow" if is_slow else "passed",
        measured=measured,
        planned=f"{planned_ms:.0f} ms",
        note=f"{len(pauses_ms)} updates",
    )


def judge_decoding(machine: Machine, rates: Sequence[float], predicted: float | None) -> GpuVerdict:
    if not rates:
        return GpuVerdict(check="serving: decoding", outcome="failed", note="no rate was measured")
    best = max(rates)
    if predicted is None or machine.is_rehearsal:
        return GpuVerdict(check="serving: decoding", outcome="noted", measured=f"{best:,.0f} tokens/s")
    return GpuVerdict(
        check="serving: decoding",
        outcome="passed" if best >= ENOUGH_SPEED * predicted else "slow",
        measured=f"{best:,.0f} tokens/s",
        planned=f"{predicted:,.0f} tokens/s",
        note="beside a trainer on the same card",
    )


def judge_noise(noise: Sequence[float], limit: float) -> GpuVerdict:
    """Differences of log-probabilities between server and trainer at equal weights, one per scored version."""
    if not noise:
        return GpuVerdict(check="serving: probe noise", outcome="failed", note="no version was scored")
    middle, largest = statistics.median(noise), max(noise)
    return GpuVerdict(
        check="serving: probe noise",
        outcome="passed" if largest <= limit else "failed",
        measured=f"median {middle:.2g}, largest {largest:.2g} nats",
        planned=f"≤ {limit:.2g}",
        note=f"{len(noise)} versions",
    )


def judge_device(machine: Machine, measured: int | None, planned: int) -> GpuVerdict:
    if measured is None or machine.is_rehearsal:
        return GpuVerdict(
            check="serving: device memory", outcome="noted", planned=gib(planned), note="not measured here"
        )
    return judge_memory("serving: device memory", measured, planned)


def judge_communicators(machine: Machine, facts: Facts) -> list[GpuVerdict]:
    """Memory of a further communicator of two ranks, at NCCL's default number of channels."""
    further = statistics.median(facts["further_bytes"])
    measured = f"{further / 2**20:,.0f} MiB each, the first {facts['first_bytes'] / 2**20:,.0f}"
    return [GpuVerdict(check="communicators", outcome="noted", measured=measured, note=f"NCCL {facts['nccl']}")]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
