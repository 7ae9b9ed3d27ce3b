"""Mixtures of experts on a real vLLM server: updates land in its fused experts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.finetune.checkpoint_names import CheckpointNames
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import exported_parameters
from pipelinerl.records.answers import Completion
from tests.sender_kit import Senders
from tests.served import Served, engine_of, largest_error, sample, weight_check

pytestmark = pytest.mark.slow
TOLERANCE = 2e-5
PROMPT = list(range(40, 60))
SHARED = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2},
    **{"max_position_embeddings": 4096, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None},
}
MODELS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 32},
    "mixtral": {"num_local_experts": 8, "head_dim": 32},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 32, "head_dim": 32, "first_k_dense_replace": 1},
}
"""Experts of three forms: Qwen's, Mixtral's, and those of DeepSeek-V3 (shared expert, bias of the choice)."""


@pytest.fixture(
    scope="module",
    params=["qwen3_moe", "mixtral", "glm4_moe"],
)
def served(request: Any, serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **(SHARED | MODELS[request.param]))
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for _, buffer in CheckpointNames(lm).buffers():
        buffer.normal_(0, 0.1)
    engine = engine_of(lm, folder / "model", serving)
    with serving.running(folder / "run", folder / "model") as server:
        yield Served(server, engine)


def error_of(engine: ReplicatedEngine, completion: Completion) -> float:
    """Largest difference of the server's log-probabilities from the trainer's."""
    lm = AutoModelForCausalLM.from_config(engine.policy.lm.config, dtype=torch.float32).eval()
    lm.load_state_dict(engine.policy.lm.state_dict())
    return largest_error(lm, PROMPT, completion)


def test_updates_land_in_fused_experts_to_the_bit(served: Served) -> None:
    """The second update too: vLLM packs experts at their first load and takes them for packed afterwards."""
    server, engine = served
    senders = Senders(server, timeout_s=60, secret=server.secret)
    try:
        assert error_of(engine, *sample(server.job.url, PROMPT, 20)) <= TOLERANCE
        for version in (1, 2):
            with torch.no_grad():
                for parameter in engine.policy.lm.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.03)
            (outcome,) = senders.send(version, dict(exported_parameters(engine, torch.float32))).values()
            assert outcome.error == ""
            assert senders.sender.wait_live(version, 60)
            (completion,) = sample(server.job.url, PROMPT, 100)
            assert completion.version_spans is not None
            assert completion.version_spans[:, 2].tolist() == [version]
            assert error_of(engine, completion) <= TOLERANCE
            check = weight_check(server, version)
            assert (check.is_checked, check.differing, check.unlearned) == (True, (), ())
    finally:
        senders.sender.close()
