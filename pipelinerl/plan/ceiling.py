"""What a world needs in addition to devices: worker processes, actors, preprocessors, verifiers, stream bandwidth.

Pure. `benchmarks/ceiling.py` measured the costs on one core of the machine named there. A test compares the two.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from pipelinerl.config.sections import Config

CPU_MS: Mapping[int, Mapping[str, float]] = {
    1000: {"worker": 2.355, "server": 1.658, "actor": 0.064, "preprocessor": 0.17, "check": 3.316},
    8000: {"worker": 4.68, "server": 2.656, "actor": 0.125, "preprocessor": 0.412, "check": 3.316},
    32_000: {"worker": 10.368, "server": 5.728, "actor": 0.745, "preprocessor": 1.038, "check": 3.316},
}
"""CPU milliseconds of a rollout in each component, by the number of tokens of its completion."""
LOAD = 0.7
"""Share of a core that a process may use. Beyond it queues grow."""
STREAM_BYTES = 8 + 16
"""Bytes per token in a group and in a micro-batch."""
LARGE_WORLD = 1000
"""Devices of a second estimate, which shows what grows out of one process."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Processes and stream bandwidth for a rate of rollouts."""

    rollouts_per_s: float
    workers: int
    """Rollout workers of all actors together."""
    replicas: int
    """Number of actors, and of preprocessors."""
    verifier_processes: int
    """If the verifier service checks every rollout once."""
    api_cores: int
    """Cores for the API processes of all servers together."""
    stream_mb_per_s: float


def cost_ms(component: str, tokens: float) -> float:
    """CPU milliseconds of one rollout with a completion of `tokens` tokens, linear between the measured lengths."""
    lengths = sorted(CPU_MS)
    measured = [CPU_MS[length][component] for length in lengths]
    beyond = 1.0 if component == "check" else max(1.0, tokens / lengths[-1])
    return float(np.interp(tokens, lengths, measured)) * beyond


def needs(tokens_per_s: float, mean_length: float, prompt_length: float) -> Needs:
    """Compute the needs of a rate of trained completion tokens. Lengths are the means of completion and prompt."""
    rollouts = tokens_per_s / mean_length

    def processes(component: str) -> int:
        return max(1, math.ceil(rollouts * cost_ms(component, mean_length) / 1e3 / LOAD))

    return Needs(
        rollouts_per_s=rollouts,
        workers=processes("worker"),
        replicas=max(processes("actor"), processes("preprocessor")),
        verifier_processes=processes("check"),
        api_cores=processes("server"),
        stream_mb_per_s=rollouts * (mean_length + prompt_length) * STREAM_BYTES / 1e6,
    )


def shortages(wanted: Needs, cfg: Config) -> list[str]:
    """Return one warning for each key of the configuration that gives fewer processes than wanted."""
    replicas = max(cfg.world.replicas, wanted.replicas)
    per_actor = math.ceil(wanted.workers / replicas)
    verifiers = math.ceil(wanted.verifier_processes / cfg.verifier.workers)
    found = []
    for key, given, needed in (
        ("world.replicas", cfg.world.replicas, wanted.replicas),
        ("actor.rollout_workers", cfg.actor.rollout_workers, per_actor),
        ("world.verifier_replicas", cfg.world.verifier_replicas, verifiers),
    ):
        if given and given < needed:
            found.append(f"{key}={given} is short for {wanted.rollouts_per_s:,.0f} rollouts/s: set {key}={needed}")
    return found


def lines(cfg: Config, tokens_per_s: float, devices: int, mean_length: float, prompt_length: float) -> list[str]:
    """Describe what this many devices ask of the CPUs, and `LARGE_WORLD` devices at the same speed.

    ``tokens_per_s``: trained completion tokens per second of all devices.
    """
    here = needs(tokens_per_s, mean_length, prompt_length)
    large = needs(tokens_per_s / devices * LARGE_WORLD, mean_length, prompt_length)
    return [
        f"Beside {devices} device(s): {_described(here)}.",
        f"Beside {LARGE_WORLD:,} devices: {_described(large)}.",
        *(f"warning: {line}" for line in shortages(here, cfg)),
    ]


def _described(need: Needs) -> str:
    return (
        f"{need.rollouts_per_s:,.1f} rollouts/s need {need.workers} rollout worker(s), {need.replicas} actor(s) and "
        f"preprocessor(s), {need.verifier_processes} verifier process(es), {need.api_cores} core(s) for the servers' "
        f"APIs and {need.stream_mb_per_s:,.1f} MB/s of streams"
    )
