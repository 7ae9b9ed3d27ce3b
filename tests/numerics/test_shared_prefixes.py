"""The gradient with every common prefix computed once is that of segments that are computed whole."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.data import GridLayout, check_record, packed, to_batch, with_shared_prefixes
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.interface import PolicyTokens
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.records import MicroBatch
from pipelinerl.records.prefixes import MIN_SHARED, prefixes_of, sort_by_prefix
from tests.models import make_qwen2

VOCAB = 48
SETTINGS = LossSettings(policy_loss="gspo", kl_coef=0.1, entropy_bonus=0.05)


def draw_tree(rng: np.random.Generator) -> list[np.ndarray]:
    """Token ids of segments: up to three prompts, whose attempts branch, end within each other, or are equal."""
    segments = []
    for _ in range(rng.integers(1, 4)):
        grown = [rng.integers(0, VOCAB, rng.integers(4, 30))]
        for _ in range(rng.integers(1, 6)):
            parent = grown[rng.integers(len(grown))]
            cut = rng.integers(2, len(parent) + 1)
            grown.append(np.concatenate([parent[:cut], rng.integers(0, VOCAB, rng.integers(0, 20))]))
        segments += grown[1:] if rng.random() < 0.5 else grown
    return [segment for segment in segments if len(segment) > 1]


def make_record(segments: list[np.ndarray], rng: np.random.Generator) -> MicroBatch:
    """One or two trained spans per segment, each of random log-probabilities and weights."""
    spans, start = [], 0
    for segment in segments:
        marks = np.sort(rng.choice(np.arange(1, len(segment) + 1), 2)) + start
        spans += [[*marks, rng.integers(0, 3)]] if marks[0] < marks[1] else []
        start += len(segment)
    trained = np.zeros(start, dtype=np.float32)
    for first, end, _ in spans:
        trained[first:end] = 1
    lengths = np.array([len(segment) for segment in segments], dtype=np.int32)
    return MicroBatch(
        step=2,
        index=0,
        count=1,
        token_ids=np.concatenate(segments).astype(np.int32),
        segment_lengths=lengths,
        segment_weights=rng.random(len(segments)).astype(np.float32),
        spans=np.array(spans, dtype=np.int32).reshape(-1, 3),
        logprobs=-rng.random(start).astype(np.float32) * trained,
        advantages=rng.standard_normal(start).astype(np.float32) * trained,
        ref_logprobs=-rng.random(start).astype(np.float32) * trained,
        num_samples=len(segments),
        num_tokens=int(trained.sum()),
        sequence_ids=tuple(f"0-0/{i}/0" for i in range(len(segments))),
        rewards=rng.random(len(segments)).astype(np.float32),
        next_source=(1, 0),
    )


def shared_layout(record: MicroBatch) -> GridLayout:
    """Even a prefix of one token is computed once."""
    segments = np.split(record.token_ids, np.cumsum(record.segment_lengths)[:-1])
    return with_shared_prefixes(record.segment_lengths, *sort_by_prefix(segments, fewest=1))


def gradients(
    policy: Policy, record: MicroBatch, *, shared: bool, dtype: torch.dtype, settings: LossSettings = SETTINGS
) -> Tensor:
    policy.zero_grad()
    layout = shared_layout(record) if shared else packed(record.segment_lengths)
    batch = to_batch(record, check_record(record, VOCAB, 2), layout=layout, float_dtype=dtype)
    policy(batch, settings).loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def norm_in_float64(self: Qwen2RMSNorm, states: Tensor) -> Tensor:
    return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)


def random_records(number: int) -> Iterator[tuple[int, np.random.Generator, MicroBatch]]:
    """(seed, its generator, record) of random trees with a trained token."""
    for seed in range(number):
        rng = np.random.default_rng(seed)
        record = make_record(draw_tree(rng), rng)
        if record.num_tokens:
            yield seed, rng, record


@pytest.mark.parametrize(
    ("dtype", "norms", "tolerance"),
    [(torch.float64, "float64", 1e-12), (torch.float64, "float32", 1e-6), (torch.float32, "float32", 1e-4)],
)
def test_gradient_of_random_trees_is_that_of_whole_segments(
    dtype: torch.dtype, norms: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if norms == "float64":
        monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_float64)
    register_attention(PACKED, packed_attention)
    lm = make_qwen2(VOCAB, initializer_range=0.2, attn_implementation=PACKED).to(dtype).train()
    policy = Policy(lm, chunk=5)
    saved = 0
    for seed, _, record in random_records(200):
        saved += len(record.token_ids) - shared_layout(record).grid[1]
        expected = gradients(policy, record, shared=False, dtype=dtype)
        assert relative(gradients(policy, record, shared=True, dtype=dtype), expected) <= tolerance, seed
    assert saved > 1000


def loss_of_gae(logprobs_K: Tensor, tokens: PolicyTokens, *, values: Tensor, rewards: Tensor) -> Tensor:
    return -logprobs_K * tokens.gae(values, rewards, discount=0.9, decay=0.8)[0]


def test_gradient_with_generalised_advantages_is_that_of_whole_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the answers are cut: the value of their last state counts, which may lie in another one's prefix."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_float64)
    register_attention(PACKED, packed_attention)
    lm = make_qwen2(VOCAB, initializer_range=0.2, attn_implementation=PACKED).double().train()
    policy = Policy(lm, chunk=5, value_loss_coef=0.5)
    assert policy.value_head is not None
    torch.nn.init.normal_(policy.value_head.weight, std=0.3)
    settings = LossSettings(policy_loss=f"{__name__}.loss_of_gae")
    ends_inside = 0
    for seed, rng, record in random_records(60):
        record = msgspec.structs.replace(record, cut=rng.random(len(record.segment_lengths)) < 0.5)
        layout = shared_layout(record)
        ends = to_batch(record, check_record(record, VOCAB, 2), layout=layout).ends_S
        assert ends is not None
        ends_inside += int((np.bincount(layout.flat_T)[ends[ends > 0].numpy()] > 1).sum())
        expected = gradients(policy, record, shared=False, dtype=torch.float64, settings=settings)
        found = gradients(policy, record, shared=True, dtype=torch.float64, settings=settings)
        assert relative(found, expected) <= 1e-12, seed
    assert ends_inside > 10


def test_sequences_are_sorted_so_that_each_follows_its_longest_prefix() -> None:
    prompt = np.arange(MIN_SHARED, dtype=np.int32)
    sequences = [np.append(prompt, [5, 6]), np.append(prompt, [2]), prompt[1:], np.append(prompt, [5, 6]), prompt]
    order, shared = sort_by_prefix([s.astype(np.int32) for s in sequences])
    assert order.tolist() == [4, 1, 0, 3, 2]
    assert shared.tolist() == [0, MIN_SHARED, MIN_SHARED, MIN_SHARED + 2, 0]


def test_prefixes_shorter_than_the_bound_are_computed_again() -> None:
    segments = [np.append(np.arange(MIN_SHARED - 1), last).astype(np.int32) for last in (30, 40)]
    assert sort_by_prefix(segments)[1].tolist() == [0, 0]


def test_segments_with_images_share_nothing() -> None:
    """The second of three equal segments shows an image."""
    rng = np.random.default_rng(0)
    segments = [np.arange(MIN_SHARED)] * 3
    record = msgspec.structs.replace(
        make_record(segments, rng), images=(b"",), image_spans=np.array([[0, MIN_SHARED + 2, MIN_SHARED + 3]])
    )
    order, shared = prefixes_of(record)
    assert order.tolist() == [0, 2, 1]
    assert shared.tolist() == [0, MIN_SHARED, 0]
