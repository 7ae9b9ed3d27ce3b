"""A micro-batch never waits for the device. On the meta device tensors have no values, so reading one is an error."""

import contextlib

import pytest
import torch

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.diagnostics import StepDiagnostics
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.objective import LossSettings
from tests.models import make_qwen2

META = torch.device("meta")
VOCAB = 64


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast does not know the meta device."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


@pytest.mark.parametrize("layout", ["packed", "rows"])
@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(policy_loss="reinforce", kl_coef=0.1, entropy_bonus=0.01, sequence_mis=2.0),
        LossSettings(policy_loss="ppo", token_mis=2.0),
        LossSettings(policy_loss="gspo", entropy_bonus=0.01),
    ],
    ids=lambda settings: settings.policy_loss,
)
def test_forward_and_backward_pass_and_diagnostics_read_no_value(settings: LossSettings, layout: str) -> None:
    register_attention(PACKED, packed_attention)
    model = make_qwen2(VOCAB, attn_implementation=PACKED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(model, chunk=16, value_loss_coef=0.5).to(META).train()
    rules = BatchRules(vocab_size=VOCAB, max_lag_steps=2, layout=layout, tokens_per_attention_unit=0)
    samples = make_samples(0, 6, vocab_size=VOCAB, lengths=(5, 20), step=2, max_lag=2)
    diagnostics = StepDiagnostics(META)
    for record in pack(samples, [range(3), range(3, 6)], step=2):
        batch = prepare_batch(record, rules, META)
        output = policy(batch, settings)
        output.loss.backward()
        altered_K = diagnostics.add(output, batch, settings)
        assert altered_K.shape == output.logprobs_K.shape
    assert all(p.grad is not None for p in policy.parameters())


def test_reading_a_value_on_the_meta_device_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="meta tensors"):
        torch.ones(1, device=META).item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(2, device=META)[torch.ones(2, device=META) > 0]
