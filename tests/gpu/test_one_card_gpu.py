"""A world of four GPUs on one: tensor-parallel server, FSDP2 over two ranks, NCCL groups, swaps under CUDA graphs.

Its commands and verdicts are tested without a GPU in `tests/unit/benchmarks/test_one_card.py`.
"""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.one_card.world import problems, run, with_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(700),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize("strike", ["", "finetune_1"])
def test_world_of_four_parts_of_a_card_takes_updates_over_nccl(strike: str, tmp_path: Path) -> None:
    found = run(tmp_path, ["finetune.max_train_steps=60", "finetune.save_checkpoint_steps=10"], strike=strike)
    assert problems(found, strike) == [], found
    assert found["has_graphs"]


def test_world_that_divides_experts_on_both_sides_copies_them_in_place(tmp_path: Path) -> None:
    found = run(tmp_path, ["finetune.max_train_steps=15", *with_experts(tmp_path)])
    assert problems(found) == [], found
    assert found["weights_are_reloaded"] == 0
