"""A step reports progress from within, so that a micro-batch of long answers is not taken for one that hangs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.model import Policy, Tokens
from pipelinerl.finetune.progress import report_progress
from pipelinerl.finetune.rl.objective import LossSettings
from tests.models import make_qwen2

VOCAB, LAYERS, CHUNK = 64, 3, 8


def counting() -> tuple[list[None], Callable[[], object]]:
    reports: list[None] = []
    return reports, lambda: reports.append(None)


def make_policy(*, checkpointing: bool = False) -> Policy:
    model = make_qwen2(VOCAB, layers=LAYERS)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model, chunk=CHUNK).train()


def gradients(policy: Policy) -> tuple[int, list[Any]]:
    """Trained tokens of a micro-batch, and the gradients of its loss."""
    rules = BatchRules(vocab_size=VOCAB, max_lag_steps=2, layout="rows", tokens_per_attention_unit=0)
    samples = make_samples(0, 3, vocab_size=VOCAB, lengths=(5, 20), step=2, max_lag=2)
    batch = prepare_batch(pack(samples, [range(3)], step=2)[0], rules, torch.device("cpu"))
    loss = policy(batch, LossSettings()).loss
    return len(batch.targets_K), list(torch.autograd.grad(loss, list(policy.parameters())))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_step_reports_each_layer_twice_and_each_chunk_and_computes_the_same(checkpointing: bool) -> None:
    _, expected = gradients(make_policy(checkpointing=checkpointing))
    policy = make_policy(checkpointing=checkpointing)
    reports, report = counting()
    report_progress(policy, report)
    trained, found = gradients(policy)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(reports) >= 2 * LAYERS + -(-trained // CHUNK)


def test_scoring_reports_each_layer_and_chunk() -> None:
    policy = make_policy()
    reports, report = counting()
    report_progress(policy, report)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        policy(Tokens(ids, torch.arange(20)[None], ids.roll(-1, 1).flatten()))
    assert len(reports) == LAYERS + 3
