"""The RL step on a GPU: numerics in float32 and bfloat16, memory of the head at full size, packed attention."""

import pytest
import torch
from torch import nn

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.model import Policy, PolicyOutput, isolation_error
from pipelinerl.finetune.rl.head import OutputHead, head_loss
from pipelinerl.finetune.rl.objective import LossSettings, PolicyObjective
from pipelinerl.finetune.rl.tokens import TokenInputs
from tests.gpu.device import DEVICE, needs_kernels
from tests.models import make_qwen2

pytestmark = pytest.mark.gpu
VOCAB = 512


def make_policy(device: torch.device, dtype: torch.dtype) -> Policy:
    shape = {"hidden": 128, "intermediate": 256, "layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Policy(make_qwen2(VOCAB, **shape, **heads, attn_implementation="sdpa"), chunk=64).to(device, dtype)


def step(policy: Policy, device: torch.device, settings: LossSettings) -> PolicyOutput:
    samples = make_samples(0, 12, vocab_size=VOCAB, lengths=(20, 60), step=2, max_lag=2)
    rules = BatchRules(vocab_size=VOCAB, max_lag_steps=2, layout="packed", tokens_per_attention_unit=0)
    output = policy(prepare_batch(pack(samples, [range(12)], step=2)[0], rules, device), settings)
    output.loss.backward()
    return output


@pytest.mark.parametrize("policy_loss", ["reinforce", "ppo", "gspo"])
def test_float32_step_equals_the_cpu(policy_loss: str) -> None:
    settings = LossSettings(policy_loss=policy_loss, kl_coef=0.1, entropy_bonus=0.01)
    ours, reference = make_policy(DEVICE, torch.float32), make_policy(torch.device("cpu"), torch.float32)
    output, expected = step(ours, DEVICE, settings), step(reference, torch.device("cpu"), settings)
    assert (output.logprobs_K.cpu() - expected.logprobs_K).abs().max() <= 2e-5
    torch.testing.assert_close(output.loss.cpu(), expected.loss, rtol=1e-4, atol=1e-5)
    for (name, mine), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad.cpu() - theirs.grad).norm() <= 1e-4 * theirs.grad.norm() + 1e-7, name


def test_bfloat16_step_is_near_float32() -> None:
    settings = LossSettings(entropy_bonus=0.01)
    narrow, reference = make_policy(DEVICE, torch.bfloat16), make_policy(DEVICE, torch.float32)
    output, expected = step(narrow, DEVICE, settings), step(reference, DEVICE, settings)
    assert output.logprobs_K.dtype == torch.float32
    assert (output.logprobs_K - expected.logprobs_K).abs().mean() <= 0.02
    mine = torch.cat([p.grad.float().flatten() for p in narrow.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) >= 0.99


def test_bfloat16_head_multiplies_into_float32() -> None:
    """Products of bfloat16 numbers are exact in float32: only the order of summation may differ."""
    torch.manual_seed(0)
    head = OutputHead.wrap(nn.Linear(1024, 4096, bias=False, dtype=torch.bfloat16, device=DEVICE))
    hidden = torch.randn(64, 1024, dtype=torch.bfloat16, device=DEVICE)
    targets = torch.randint(0, 4096, (64,), device=DEVICE)
    objective = PolicyObjective(_inputs(64), LossSettings())
    output = head_loss(head, hidden, targets, objective, temperature=1.0, chunk=16, fp32=True)
    exact = (hidden.double() @ head.weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (output.logprobs_K - exact).abs().max() <= 1e-4


def test_bfloat16_head_adds_the_gradient_of_its_chunks_in_float32() -> None:
    torch.manual_seed(0)
    head = OutputHead.wrap(nn.Linear(1024, 4096, bias=False, dtype=torch.bfloat16, device=DEVICE))
    wide = OutputHead.wrap(nn.Linear(1024, 4096, bias=False, device=DEVICE))
    wide.weight.data = head.weight.data.float()
    hidden = torch.randn(64, 1024, dtype=torch.bfloat16, device=DEVICE)
    targets = torch.randint(0, 4096, (64,), device=DEVICE)
    objective = PolicyObjective(_inputs(64), LossSettings())
    for each in (head, wide):
        states = hidden.to(each.weight.dtype)
        head_loss(each, states, targets, objective, temperature=1.0, chunk=16, fp32=True).loss.backward()
    expected = wide.weight.grad
    assert (head.weight.grad.float() - expected).norm() <= 2**-8 * expected.norm()


def test_packed_documents_do_not_attend_to_each_other() -> None:
    policy = make_policy(DEVICE, torch.float32)
    with torch.no_grad():
        assert isolation_error(policy, VOCAB, DEVICE, length=64) <= 1e-4


@needs_kernels
@pytest.mark.parametrize("policy_loss", ["reinforce", "gspo"])
def test_head_at_16k_tokens_and_152k_words_needs_an_eighth_of_the_logits(policy_loss: str) -> None:
    tokens, vocab, width, chunk = 16_384, 152_064, 896, 256
    head = OutputHead.wrap(nn.Linear(width, vocab, bias=False, dtype=torch.bfloat16, device=DEVICE))
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
    settings = LossSettings(policy_loss=policy_loss, entropy_bonus=0.01)
    objective = PolicyObjective(_inputs(tokens), settings)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = head_loss(head, hidden, targets, objective, temperature=1.0, chunk=chunk, fp32=True)
    output.loss.backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * tokens * vocab / 8


def _inputs(count: int) -> TokenInputs:
    return TokenInputs(
        sampler_logprobs_K=torch.full((count,), -9.0, device=DEVICE),
        advantages_K=torch.randn(count, device=DEVICE),
        weights_K=torch.full((count,), 1 / count, device=DEVICE),
        segments_K=torch.arange(count, device=DEVICE) // 64,
        num_segments=-(-count // 64),
    )
