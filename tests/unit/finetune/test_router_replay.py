"""Router replay: tokens visit the recorded experts, with the trainer's own scores and their gradient."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.model import Policy, Tokens, decoder_layers
from pipelinerl.finetune.router_replay import RouterReplay
from pipelinerl.finetune.small_copy import small_copy
from tests.models import make_qwen2
from tests.says import says

LENGTH = 12
IDS = torch.arange(3, 3 + LENGTH)[None]
TOKENS = Tokens(IDS, torch.arange(LENGTH)[None], IDS.roll(-1, 1).flatten())


def choices(lm: nn.Module, k: int) -> Tensor:
    """int16 [N, layers · k]: what the model chooses itself."""
    layers, found = decoder_layers(lm), []
    for layer in layers:
        routers = [m for m in layer.modules() if "Router" in type(m).__name__]
        chosen = torch.zeros(LENGTH, k, dtype=torch.int16)
        found.append(chosen)
        for router in routers:
            router.register_forward_hook(partial(record, chosen))
    with torch.no_grad():
        lm(IDS, use_cache=False)
    return torch.cat(found, 1)


def record(chosen: Tensor, _router: nn.Module, _inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    chosen.copy_(outputs[2])


def announce_always(policy: Policy, chosen: Tensor) -> None:
    """``Tokens`` carry no experts: set them as a batch would."""
    assert policy.routing is not None
    announce = policy.routing.announce
    policy.routing.announce = lambda _: announce(chosen)  # type: ignore[method-assign]


def make_policy(model_type: str, **options: Any) -> tuple[Policy, Tensor]:
    torch.manual_seed(0)
    lm = small_copy(AutoConfig.for_model(model_type)).lm.eval()
    own = choices(lm, lm.config.num_experts_per_tok)
    return Policy(lm, chunk=8, routing=RouterReplay(decoder_layers(lm)), **options), own


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_replay_of_the_models_own_choice_changes_nothing_and_of_another_does(model_type: str) -> None:
    policy, own = make_policy(model_type)
    with torch.no_grad():
        plain = policy(TOKENS)
        announce_always(policy, own)
        assert torch.equal(policy(TOKENS), plain)
        policy, own = make_policy(model_type)
        announce_always(policy, (own + 1) % 8)
        assert (policy(TOKENS) - plain).abs().max() > 1e-3
        policy, own = make_policy(model_type)
        announce_always(policy, torch.full_like(own, -1))
        assert torch.equal(policy(TOKENS), plain)


def test_replay_of_a_router_that_takes_topks_result_by_name_sends_tokens_there() -> None:
    """DeepSeek-V4's first layers look their experts up in a table, and are left as they are."""
    policy, own = make_policy("deepseek_v4")
    with torch.no_grad():
        plain = policy(TOKENS)
        announce_always(policy, (own + 1) % 4)
        assert (policy(TOKENS) - plain).abs().max() > 1e-4


def test_replay_that_a_model_does_not_take_is_refused() -> None:
    """Phi-MoE takes one maximum after the other: it would choose by itself, unnoticed."""
    policy, own = make_policy("phimoe")
    announce_always(policy, own)
    with torch.no_grad(), pytest.raises(ConfigError, match=says("finetune.router_replay", "true", "experts", "false")):
        policy(TOKENS)


def test_a_replayed_layer_is_the_sum_over_the_recorded_experts() -> None:
    """Against Qwen3's definition written out: softmax over all experts, renormalised over the chosen ones."""
    lm = small_copy(AutoConfig.for_model("qwen3_moe", norm_topk_prob=True)).lm.eval()
    layers = decoder_layers(lm)
    block: Any = layers[1].mlp
    replay = RouterReplay(layers)
    k = block.gate.top_k
    chosen = torch.stack([torch.randperm(block.gate.num_experts)[:k] for _ in range(5)])
    replay.announce(torch.cat([torch.zeros_like(chosen), chosen], 1).to(torch.int16))
    states = torch.randn(1, 5, lm.config.hidden_size)
    found = block(states)[0]

    x, gate_up, down = (t.double() for t in (states[0], block.experts.gate_up_proj, block.experts.down_proj))
    probabilities = (x @ block.gate.weight.double().T).softmax(-1).gather(1, chosen)
    weights = probabilities / probabilities.sum(1, keepdim=True)
    expected = torch.zeros_like(x)
    for token in range(5):
        for place, expert in enumerate(chosen[token].tolist()):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weights[token, place] * (down[expert] @ (F.silu(gate) * up))
    assert (found.double() - expected).abs().max() <= 1e-5


def test_recomputed_activations_replay_the_same_experts() -> None:
    """With gradient checkpointing the backward pass routes again."""
    gradients = []
    for checkpointing in (False, True):
        policy, own = make_policy("qwen3_moe")
        if checkpointing:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
            policy.lm.train()
        announce_always(policy, (own + 3) % 8)
        policy(Tokens(IDS, TOKENS.position_ids)).square().mean().backward()
        gradients.append([p.grad for p in policy.lm.model.parameters() if p.grad is not None])
    assert gradients[0]
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-7)


def test_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("finetune.router_replay", "no experts")):
        RouterReplay(decoder_layers(make_qwen2(8)))


def test_shapes_of_records_fit_the_layers() -> None:
    lm = small_copy(AutoConfig.for_model("qwen3_moe")).lm
    replay = RouterReplay(layers := decoder_layers(lm))
    k = lm.config.num_experts_per_tok
    replay.announce(torch.from_numpy(np.zeros((7, len(layers) * k), dtype=np.int16)))
    assert replay._chosen is not None
    assert replay._chosen.shape == (7, len(layers), k)
