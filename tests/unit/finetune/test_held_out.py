"""The loss of held-out conversations: the mean of their own tokens, and weights that do not change."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.finetune.accumulate import BatchRules, held_out_loss
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.model import Policy
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate, with_held_out
from pipelinerl.preprocess.conversation_rows import Conversation
from pipelinerl.preprocess.supervised import SupervisedData
from pipelinerl.records.check import check_micro_batch
from pipelinerl.testing import byte_tokenizer
from tests.models import make_qwen2

VOCAB = 512
TOKENIZER = byte_tokenizer()


def batch_of(answers: list[str], ranks: int, **options: Any) -> tuple[OptimizerBatch, list[list[Any]]]:
    asked = {"role": "user", "content": "hi"}
    rows = [
        Conversation(messages=[asked, {"role": "assistant", "content": text}], weights={1: 0.5 + index})
        for index, text in enumerate(answers)
    ]
    data = SupervisedData(rows, ChatRenderer(TOKENIZER), per_step=len(rows), seed=None, seq_length=64, **options)
    batch = OptimizerBatch(step=3, samples=data.samples(3), next_source=(0, 0))
    return batch, collate(batch, Collation(data_parallel_size=ranks, seq_length=64))


def test_held_out_micro_batches_come_behind_the_others_on_every_rank() -> None:
    _, trained = batch_of(["a", "bb", "c" * 9], 2)
    _, tests = batch_of(["d"], 2, held_out=True)
    ranks = with_held_out(trained, tests)
    for own, before in zip(ranks, trained, strict=True):
        assert [one.index for one in own] == list(range(len(before) + 1))
        assert {one.count for one in own} == {len(before) + 1}
        assert [one.is_held_out for one in own] == [False] * len(before) + [True]
        for one, same in zip(own, before, strict=False):
            assert msgspec.structs.replace(one, count=same.count).token_ids is same.token_ids
            assert np.array_equal(one.segment_weights, same.segment_weights)
        for one in own:
            check_micro_batch(one, vocab_size=VOCAB)
    assert sum(one.sentinel for own in ranks for one in own if one.is_held_out) == 1, "a rank without work is in step"


def test_held_out_loss_is_the_weighted_mean_of_every_token_alone() -> None:
    batch, ((*records,),) = batch_of(["a", "bb", "c" * 9], 1, held_out=True)
    torch.manual_seed(0)
    policy = Policy(make_qwen2(VOCAB, initializer_range=0.2).train(), chunk=7)
    finetune = SimpleNamespace(
        dtype="float32",
        gradient_clipping_threshold=None,
        learning_rate=1e-2,
        optimizer=SimpleNamespace(name="adamw", kwargs={}, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    )
    engine = ReplicatedEngine(policy, SimpleNamespace(finetune=finetune), torch.device("cpu"))
    rules = BatchRules(vocab_size=VOCAB, max_lag_steps=None, layout="packed", tokens_per_attention_unit=0)
    found = held_out_loss(engine, with_held_out([[]], [records])[0], rules)
    total = weight_of_all = 0.0
    for sample in batch.samples:
        ((_, sequence),), (weights_K,) = sample.sequences, sample.token_weights or ()
        ids = torch.from_numpy(sequence.token_ids).long()
        with torch.no_grad():
            hidden = policy.lm.model(input_ids=ids[None], use_cache=False)[0][0]
            logs = policy.lm.lm_head(hidden).double().log_softmax(-1)
        trained = [t for start, end, _ in sequence.spans.tolist() for t in range(start, end)]
        for position, weight in zip(trained, weights_K.tolist(), strict=True):
            total -= weight * logs[position - 1, ids[position]].item()
            weight_of_all += weight
    assert found == pytest.approx(total / weight_of_all, rel=1e-5)
    assert policy.training
    assert all(parameter.grad is None for parameter in policy.parameters())
