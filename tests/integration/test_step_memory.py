"""The memory plan is within a tenth of what a step allocates, by engine, at sizes that no formula was fitted to."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.step_memory import UNFITTED, compare

TOLERANCE = 0.1
TRIES = 3
"""Gloo's threads release tensors unseen. What is not used again until the peak is counted, never too few bytes."""
SIZES = ("narrow and deep", "broad and flat", "many words")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("engine", "ranks", "sizes", "precisions"),
    [
        ("ddp", 1, SIZES[:1], ("float32", "bfloat16")),
        slow("ddp", 1, SIZES[1:], ("float32", "bfloat16")),
        slow("ddp", 1, SIZES, ("bfloat16, selective",)),
        slow("zero2", 2, SIZES, ("bfloat16, recomputed",)),
        *[
            slow(engine, 2, SIZES, ("float32", "bfloat16, recomputed", "bfloat16, selective"))
            for engine in ("fsdp2", "zero3")
        ],
        slow("zero1", 2, SIZES, ("float32", "float32, adapters")),
        slow("zero2", 1, SIZES, ("float32",)),
    ],
)
def test_plan_is_within_a_tenth_of_the_measured_peak(
    engine: str, ranks: int, sizes: tuple[str, ...], precisions: tuple[str, ...], tmp_path: Path
) -> None:
    lines = compare(engine, ranks, tmp_path, {name: UNFITTED[name] for name in sizes}, precisions)
    assert len(lines) == len(sizes) * len(precisions)
    for number in range(1, TRIES):
        folder = tmp_path / f"again {number}"
        folder.mkdir()
        lines = [measured_again(line, folder) if line["ratio"] < 1 - TOLERANCE else line for line in lines]
    off = [line for line in lines if abs(line["ratio"] - 1) > TOLERANCE]
    assert off == [], [(line["size"], line["precision"], line["ratio"]) for line in off]


def measured_again(line: dict[str, Any], folder: Path) -> dict[str, Any]:
    size = {line["size"]: UNFITTED[line["size"]]}
    return compare(line["engine"], line["ranks"], folder, size, [line["precision"]])[0]
