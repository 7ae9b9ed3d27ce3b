"""Compiled layers compute the same, and their code does not grow with layers or lengths of micro-batches."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.build import compile_layers
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.objective import LossSettings
from tests.models import make_qwen2

VOCAB = 64


def make_policy(*, layers: int, checkpointing: bool) -> Policy:
    model = make_qwen2(VOCAB, layers=layers, attn_implementation=PACKED)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model, chunk=16).train()


def losses_and_gradients(policy: Policy) -> list[Tensor]:
    """Of three micro-batches of different lengths."""
    rules = BatchRules(vocab_size=VOCAB, max_lag_steps=2, layout="packed", tokens_per_attention_unit=0)
    found = []
    for seed, documents in enumerate((2, 5, 3)):
        samples = make_samples(seed, documents, vocab_size=VOCAB, lengths=(5, 20), step=2, max_lag=2)
        batch = prepare_batch(pack(samples, [range(documents)], step=2)[0], rules, torch.device("cpu"))
        loss = policy(batch, LossSettings()).loss
        found += [loss.detach(), *torch.autograd.grad(loss, list(policy.parameters()))]
    return found


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # of Dynamo's guards
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_layers_compute_the_same_from_code_that_they_share(checkpointing: bool) -> None:
    """`aot_eager` traces, differentiates and shares as `inductor` does, and then runs torch's own kernels."""
    register_attention(PACKED, packed_attention)
    expected = losses_and_gradients(make_policy(layers=4, checkpointing=checkpointing))
    compiled = make_policy(layers=4, checkpointing=checkpointing)
    compile_layers(compiled.lm, backend="aot_eager")
    torch._dynamo.reset()
    counters.clear()
    try:
        torch.testing.assert_close(losses_and_gradients(compiled), expected, rtol=1e-5, atol=1e-6)
        assert 0 < counters["stats"]["unique_graphs"] <= 4
    finally:
        register_attention(PACKED, packed_attention)
        torch._dynamo.reset()
