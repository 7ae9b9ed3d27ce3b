"""Intervals that may be given in samples, as in PipelineRL: `eval_every_n_versions: 20000 samples`."""

import re
from collections.abc import Callable, Mapping
from math import ceil, floor
from typing import Any

from pipelinerl.config.nested import value_at, with_settings
from pipelinerl.errors import ConfigError

IN_SAMPLES: Mapping[str, Callable[[float], int]] = {
    "eval_every_n_versions": ceil,
    "finetune.weight_update_interval": ceil,
    "max_lag_steps": floor,
}
"""Keys in optimizer steps, and how a part of a step is rounded: an interval has passed when all of it has, and a
bound is not exceeded."""
BATCH = ("finetune.train_batch_size", "finetune.gradient_accumulation_passes")
_AMOUNT = re.compile(r"\s*([\d_]+)\s*samples?\s*")


def in_steps(container: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration with every interval in optimizer steps.

    Raises:
        ConfigError: an interval is text and not `<number> samples`.
    """
    steps = dict(container)
    for name, whole in IN_SAMPLES.items():
        value = value_at(container, name)
        if isinstance(value, str):
            steps = with_settings(steps, {name: whole(_samples(name, value) / _batch(container))})
    return steps


def _samples(name: str, value: str) -> int:
    amount = _AMOUNT.fullmatch(value)
    if not amount:
        raise ConfigError(f"`{name}` is {value!r}: write a number of optimizer steps, or e.g. '20000 samples'")
    return int(amount[1].replace("_", ""))


def _batch(container: Mapping[str, Any]) -> int:
    sizes = [value_at(container, name) for name in BATCH]
    wrong = [name for name, size in zip(BATCH, sizes, strict=True) if not isinstance(size, int) or size < 1]
    if wrong:
        raise ConfigError(f"`{wrong[0]}` is {value_at(container, wrong[0])!r}: it must be a whole number of at least 1")
    return sizes[0] * sizes[1]
