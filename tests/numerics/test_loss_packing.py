"""The gradient of an optimizer batch does not depend on how it is packed, laid out, or cut into micro-batches."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.data import check_record, in_rows, packed, to_batch
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.model import Policy, Tokens, isolation_error
from pipelinerl.finetune.recomputation import keeping_products
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.records import Rollout, RolloutGroup, TrainingSequence
from tests.models import make_qwen2

SAMPLES, VOCAB = 7, 48
SETTINGS = {
    "reinforce": LossSettings(kl_coef=0.1, entropy_bonus=0.05),
    "gspo": LossSettings(policy_loss="gspo", sequence_mis=2.0, entropy_bonus=0.05),
    "gspo with a proximal policy": LossSettings(policy_loss="gspo", proximal=True, sequence_tis=2.0, kl_coef=0.1),
    "decoupled_ppo": LossSettings(policy_loss="decoupled_ppo", sequence_tis=2.0, veto=1e-3),
}


def make_policy(dtype: torch.dtype = torch.float32, **checkpointing: Any) -> Policy:
    lm = make_qwen2(VOCAB, initializer_range=0.2, attn_implementation="sdpa").to(dtype).train()
    if checkpointing:
        lm.gradient_checkpointing_enable(checkpointing)
    return Policy(lm, chunk=5, value_loss_coef=0.5)


def gradients(
    bins: Sequence[Sequence[int]], settings: LossSettings, *, rows: bool, policy: Policy | None = None
) -> dict[str, Tensor]:
    policy = policy or make_policy()
    samples = make_samples(2, SAMPLES, vocab_size=VOCAB, lengths=(3, 14), step=3, max_lag=2)
    for record in pack(samples, bins, step=3):
        index = check_record(record, VOCAB, max_lag_steps=2)
        batch = to_batch(record, index, layout=(in_rows if rows else packed)(record.segment_lengths))
        policy(batch, settings).loss.backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert ((actual[name] - wanted).abs().max() / wanted.abs().max()).item() <= tolerance, name


WAYS = {
    "all packed": ([range(SAMPLES)], False),
    "all in rows": ([range(SAMPLES)], True),
    "three packs": ([[0, 4], [5, 2, 1], [3, 6]], False),
    "reversed": ([range(SAMPLES - 1, -1, -1)], False),
    "two row grids": ([[6, 1, 3], [0, 2, 4, 5]], True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", SETTINGS)
def test_gradient_is_that_of_seven_single_sequences(way: str, loss: str) -> None:
    expected = gradients([[i] for i in range(SAMPLES)], SETTINGS[loss], rows=False)
    bins, rows = WAYS[way]
    assert_close(gradients(bins, SETTINGS[loss], rows=rows), expected)


def conversation(merged: bool, reward: float, attempt: int) -> Rollout:
    """Three turns whose tokens extend each other, as one training sequence or as one per turn."""
    rng = np.random.default_rng(attempt)
    ids = rng.integers(0, VOCAB, 23).astype(np.int32)
    answers = [(5, 9, 2), (12, 18, 3), (20, 23, 3)]
    logprobs = [rng.normal(-3.8, 0.3, end - start).astype(np.float32) for start, end, _ in answers]
    parts = [range(3)] if merged else [[0], [1], [2]]
    sequences = tuple(
        TrainingSequence(
            token_ids=ids[: answers[part[-1]][1]],
            logprobs=np.concatenate([logprobs[turn] for turn in part]),
            spans=np.array([answers[turn] for turn in part], np.int32),
            finish_reason="stop",
            turn=part[0],
        )
        for part in parts
    )
    return Rollout(attempt=attempt, reward=reward, sequences=sequences, metrics={}, latency_s=0.0, num_llm_calls=3)


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
def test_merged_and_unmerged_turns_give_the_same_gradient(name: str) -> None:
    """Under `sum_over_batch`, for losses of single tokens: through advantages, collation and the trainer."""
    found = []
    for merged in (True, False):
        group = RolloutGroup(
            group_id="0-0",
            epoch=0,
            position=0,
            problem_index=0,
            actor=0,
            domain="d",
            dataset="train",
            attempts=2,
            rollouts=tuple(conversation(merged, reward, attempt) for attempt, reward in enumerate((1.5, -0.5))),
            dispatched_version=2,
            settled_before=0,
            dispatch_index=0,
        )
        batch = OptimizerBatch(
            step=3, samples=tuple(prepare_group(0, group, Shaping(seq_length=64))), next_source=(1, 0)
        )
        assert len(batch.samples) == 2
        policy = make_policy()
        ((record,),) = collate(batch, Collation(data_parallel_size=1, seq_length=256, aggregation="sum_over_batch"))
        assert len(record.segment_lengths) == (2 if merged else 6)
        rows = to_batch(record, check_record(record, VOCAB, max_lag_steps=2), layout=packed(record.segment_lengths))
        policy(rows, LossSettings(policy_loss=name, entropy_bonus=0.05)).loss.backward()
        found.append({key: p.grad for key, p in policy.lm.named_parameters() if p.grad is not None})
    assert_close(found[1], found[0])


@pytest.mark.parametrize("selecting", [{}, {"context_fn": keeping_products}], ids=["everything", "selective"])
def test_gradient_checkpointing_gives_the_same_gradient(selecting: dict[str, Any]) -> None:
    expected = gradients([range(SAMPLES)], SETTINGS["reinforce"], rows=False)
    policy = make_policy(use_reentrant=False, **selecting)
    assert_close(gradients([range(SAMPLES)], SETTINGS["reinforce"], rows=False, policy=policy), expected, 1e-6)


def test_selective_checkpointing_computes_no_product_twice() -> None:
    def operations(**checkpointing: Any) -> int:
        policy = make_policy(**checkpointing)
        with FlopCounterMode(display=False) as counted:
            gradients([range(SAMPLES)], SETTINGS["reinforce"], rows=False, policy=policy)
        return counted.get_total_flops()

    assert operations(use_reentrant=False, context_fn=keeping_products) == operations()
    assert operations(use_reentrant=False) > operations()


def test_packed_documents_do_not_attend_to_each_other() -> None:
    assert isolation_error(make_policy(), VOCAB, torch.device("cpu")) <= 1e-6


def test_isolation_error_sees_documents_that_do() -> None:
    policy = make_policy()
    hidden_states = policy.hidden_states
    policy.hidden_states = lambda batch: hidden_states(
        batch._replace(position_ids=torch.arange(batch.input_ids.shape[1])[None])
    )
    assert isolation_error(policy, VOCAB, torch.device("cpu")) > 0.05


def test_trained_logprobs_are_those_of_the_separate_sequences() -> None:
    policy = make_policy(torch.float64)
    samples = make_samples(2, SAMPLES, vocab_size=VOCAB, lengths=(3, 14))
    rules = BatchRules(
        vocab_size=VOCAB, max_lag_steps=0, layout="cheaper", tokens_per_attention_unit=0, float_dtype=torch.float64
    )
    batch = prepare_batch(pack(samples, [range(SAMPLES)])[0], rules, torch.device("cpu"))
    ours = policy(batch, LossSettings()).logprobs_K
    expected = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()[None]
        hidden = policy(Tokens(ids, torch.arange(ids.shape[1])[None]))
        logprobs = policy.lm.lm_head(hidden)[0].log_softmax(-1)
        for start, end, _ in sample.spans.tolist():
            expected += [logprobs[t - 1, ids[0, t]] for t in range(start, end)]
    assert (ours - torch.stack(expected)).abs().max() <= 1e-9


def test_value_head_learns_from_the_reward_and_gives_the_advantage() -> None:
    """V starts at 0, so the first advantage is the reward; the value gradient is Σ w·coef·(V − r) on the bias."""
    policy = make_policy()
    samples = make_samples(2, SAMPLES, vocab_size=VOCAB, lengths=(3, 14))
    record = pack(samples, [range(SAMPLES)])[0]
    batch = to_batch(record, check_record(record, VOCAB, 0), layout=packed(record.segment_lengths))
    output = policy(batch, LossSettings())
    output.loss.backward()
    rewards, weights = batch.inputs.advantages_K, batch.inputs.weights_K
    assert torch.equal(output.inputs.advantages_K, rewards)
    assert policy.value_head is not None
    torch.testing.assert_close(policy.value_head.bias.grad, (weights * 0.5 * -rewards).sum()[None])
    torch.testing.assert_close(output.value_loss, (weights * 0.25 * rewards.square()).sum())


def test_value_head_reaches_the_reward(tmp_path: object) -> None:
    policy = make_policy()
    finetune = SimpleNamespace(
        dtype="float32",
        gradient_clipping_threshold=None,
        learning_rate=1e-2,
        optimizer=SimpleNamespace(name="adamw", kwargs={}, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
    )
    engine = ReplicatedEngine(policy, SimpleNamespace(finetune=finetune), torch.device("cpu"))
    samples = make_samples(2, SAMPLES, vocab_size=VOCAB, lengths=(3, 14))
    record = pack(samples, [range(SAMPLES)])[0]
    batch = to_batch(record, check_record(record, VOCAB, 0), layout=packed(record.segment_lengths))
    losses = []
    for _ in range(60):
        output = engine.forward(batch, LossSettings(ratio_clamp=1e-6))
        engine.backward(output.loss, last=True)
        engine.step(1e-2)
        losses.append(output.value_loss.item())
    assert losses[-1] < 0.05 * losses[0]
