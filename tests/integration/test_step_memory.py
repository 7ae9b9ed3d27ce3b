"""The memory plan is within a tenth of what a step allocates, by engine, at sizes that no formula was fitted to."""

from pathlib import Path

import pytest

from benchmarks.step_memory import compare

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 0.1
SIZES = {
    "narrow and deep": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 14,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 5120,
        "max_position_embeddings": 640,
    },
    "broad and flat": {
        "hidden_size": 384,
        "intermediate_size": 1056,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "vocab_size": 1280,
        "max_position_embeddings": 1280,
    },
    "many words": {
        "hidden_size": 208,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 16384,
        "max_position_embeddings": 512,
    },
}
"""No line of `benchmarks/step_memory.py` has these depths, widths, vocabularies, shares of key heads or lengths."""


@pytest.mark.parametrize(
    ("engine", "ranks", "precisions"),
    [
        ("ddp", 1, ("float32", "bfloat16")),
        *[(engine, 2, ("float32", "bfloat16, recomputed")) for engine in ("fsdp2", "zero3")],
        ("zero1", 2, ("float32",)),
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
