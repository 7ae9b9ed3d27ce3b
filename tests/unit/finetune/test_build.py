"""What is checked of an engine before it trains."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from pipelinerl.errors import ConfigError
from pipelinerl.finetune import build


@pytest.mark.parametrize(("error", "is_isolated"), [(0.9e-4, True), (1.1e-4, False), (float("nan"), False)])
def test_packed_documents_are_isolated_if_states_move_by_at_most_a_ten_thousandth(
    monkeypatch: pytest.MonkeyPatch, error: float, is_isolated: bool
) -> None:
    monkeypatch.setattr(build, "isolation_error", lambda *_: error)
    policy = SimpleNamespace(lm=SimpleNamespace(config=Qwen2Config()))
    engine: Any = SimpleNamespace(policy=policy, evaluate=None, device=torch.device("cpu"))
    with nullcontext() if is_isolated else pytest.raises(ConfigError, match=r"finetune\.attn_implementation"):
        build.verify_isolation(engine, "flash_attention_2")
