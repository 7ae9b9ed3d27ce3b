"""Tokens per second and device, and the share of a GPU's peak, by hand."""

from typing import Any

import pytest
import torch

from pipelinerl.finetune.speed import mfu, peak_flops, speed_metrics
from tests.models import make_qwen2

SEVEN_B = {
    **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
}


def test_mfu_of_a_7b_model_at_ten_thousand_tokens_per_second() -> None:
    """6 · 7.615e9 · 10,000 operations per second are 46.2 % of an H100's 989e12."""
    assert mfu(SEVEN_B, 10_000, 989e12) == pytest.approx(0.462, abs=5e-4)
    assert mfu({"model_type": "mamba"}, 10_000, 989e12) is None


def test_peak_is_that_of_the_gpu_in_the_name() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("Tesla T4") is None


def test_a_cpu_has_tokens_per_second_alone() -> None:
    config: Any = make_qwen2(8).config
    found = speed_metrics(config, torch.device("cpu"), tokens=600.0, seconds=2.0, ranks=3)
    assert found == {"input_tokens_per_s_per_device": 100.0}
