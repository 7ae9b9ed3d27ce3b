"""Mixtures of experts on a real vLLM server: updates land in its fused experts, and it reports whom it chose."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.finetune.checkpoint_names import CheckpointNames
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import exported_parameters
from pipelinerl.finetune.model import decoder_layers
from pipelinerl.records import MicroBatch, topics
from pipelinerl.records.answers import Completion
from pipelinerl.records.batches import NOT_ROUTED
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend
from tests.launches import run_experiment
from tests.models import save_mixture
from tests.sender_kit import Senders
from tests.served import Served, engine_of, largest_error, sample, weight_check

pytestmark = pytest.mark.slow
TOLERANCE = 5e-5
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


@torch.no_grad()
def chosen_experts(lm: Any, token_ids: list[int]) -> torch.Tensor:
    """The experts of every token but the last in every layer, sorted, [T − 1, layers, experts per token]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2]))
        for layer in decoder_layers(lm)
    ]
    lm(torch.tensor([token_ids[:-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort(dim=-1).values


def test_server_reports_the_experts_that_a_forward_pass_chooses(serving: Any, tmp_path: Path) -> None:
    """Prompts are computed in pieces of 96 tokens, and the later ones are found in the cache but for their end."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **(SHARED | MODELS["qwen3_moe"]))
    engine = engine_of(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path / "model", serving)
    prompts = [list(range(40, 240)), list(range(40, 200)) + list(range(20, 60)), list(range(40, 240)), PROMPT]
    overrides = ("finetune.router_replay=true", "vllm_config.vllm_kwargs.max-num-batched-tokens=96")
    with serving.running(tmp_path / "run", tmp_path / "model", overrides=overrides) as server:
        for prompt in prompts:
            for completion in sample(server.job.url, prompt, 30, n=3):
                ids = [*prompt, *completion.token_ids.tolist()]
                assert completion.routed_experts is not None
                reported = torch.from_numpy(completion.routed_experts.astype(int)).view(len(ids) - 1, 2, 2)
                assert torch.equal(reported.sort(dim=-1).values, chosen_experts(engine.policy.lm, ids))


@pytest.mark.timeout(600)
def test_trainer_gets_the_experts_that_the_server_chose(tmp_path: Path) -> None:
    """A whole run, in which no weight changes by more than its rounding."""
    lm = save_mixture(tmp_path / "model")
    run_dir = tmp_path / "run"
    overrides = (
        "tiny_model=null",
        f"model_path={tmp_path / 'model'}",
        "finetune.router_replay=true",
        "finetune.learning_rate=1e-12",
    )
    sizes = ("finetune.max_train_steps=2", "eval.at_start=false", "eval.at_end=false")
    run_experiment("quickstart", run_dir, *overrides, *sizes, timeout_s=540)
    set_streams_backend("files")
    with open_reader(SingleStreamSpec(run_dir, topics.TRAINING_DATA), MicroBatch, name=None) as reader:
        batches = [batch for _, batch in reader.read_all() if batch.step < 2]
    assert {batch.step for batch in batches} == {0, 1}
    for batch in batches:
        assert batch.routed_experts is not None
        places = np.cumsum(batch.segment_lengths)[:-1]
        ids, routed = np.split(batch.token_ids, places), np.split(batch.routed_experts, places)
        for ids_T, routed_T in zip(ids, routed, strict=True):
            reported = torch.from_numpy(routed_T[:-1].astype(int)).view(-1, 2, 2).sort(dim=-1).values
            assert torch.equal(reported, chosen_experts(lm, ids_T.tolist()))
            assert (routed_T[-1] == NOT_ROUTED).all()


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
