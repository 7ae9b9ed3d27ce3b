"""The memory plan is within a tenth of what a step allocates, by engine, at sizes that no formula was fitted to."""

from pathlib import Path

import pytest

from benchmarks.step_memory import UNFITTED, compare

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 0.1
SIZES = {name: UNFITTED[name] for name in ("narrow and deep", "broad and flat", "many words")}


@pytest.mark.parametrize(
    ("engine", "ranks", "precisions"),
    [
        ("ddp", 1, ("float32", "bfloat16")),
        *[(engine, 2, ("float32", "bfloat16, recomputed")) for engine in ("fsdp2", "zero3")],
        ("zero1", 2, ("float32", "float32, adapters")),
        ("zero2", 1, ("float32",)),
        ("zero2", 2, ("bfloat16, recomputed",)),
    ],
)
def test_plan_is_within_a_tenth_of_the_measured_peak(
    engine: str, ranks: int, precisions: tuple[str, ...], tmp_path: Path
) -> None:
    lines = compare(engine, ranks, tmp_path, SIZES, precisions)
    assert len(lines) == len(SIZES) * len(precisions)
    off = [line for line in lines if abs(line["ratio"] - 1) > TOLERANCE]
    assert off == [], [(line["size"], line["precision"], line["ratio"]) for line in off]
