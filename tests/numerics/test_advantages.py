"""Advantages and aggregation weights against hand computation and an independent float64 oracle (fractions, loops)."""

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import RecordError
from pipelinerl.preprocess.advantages import batch_std_scale, group_advantages, step_returns, text_advantages
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, Members, collate, rollout_weights
from pipelinerl.preprocess.samples import Shaping, prepare_group, sequence_advantages, soft_overlong_penalty
from pipelinerl.records import Rollout, RolloutGroup, TrainingSequence
from tests.says import says

KINDS = ("loo", "group_mean", "group_std", "batch_std", "gdpo", "value")


def sequence(turn: int = 0, completion: int = 3, finish_reason: str = "stop") -> TrainingSequence:
    return TrainingSequence(
        token_ids=np.arange(completion + 2, dtype=np.int32),
        logprobs=np.full(completion, -0.5, np.float32),
        spans=np.array([[2, 2 + completion, 0]], np.int32),
        finish_reason=finish_reason,
        turn=turn,
    )


def rollout(attempt: int, reward: float, *sequences: TrainingSequence) -> Rollout:
    return Rollout(
        attempt=attempt,
        reward=reward,
        sequences=sequences or (sequence(),),
        metrics={},
        latency_s=0.0,
        num_llm_calls=max(1, len(sequences)),
    )


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(
        group_id="0-7",
        epoch=0,
        position=7,
        problem_index=0,
        actor=0,
        domain="d",
        dataset="train",
        attempts=len(rollouts),
        rollouts=rollouts,
        dispatched_version=0,
        settled_before=0,
        dispatch_index=0,
    )


def oracle(kind: str, rewards: list[float]) -> list[float]:
    """The formulas of docs/algorithms.md §1, one member at a time, in exact fractions (square root aside)."""
    exact = [Fraction(r) for r in rewards]
    n = len(exact)
    mean = sum(exact) / n
    if kind == "value":
        return [float(r) for r in exact]
    if kind == "group_mean":
        return [float(r - mean) for r in exact]
    if kind in ("group_std", "gdpo"):
        if n == 1:
            return [0.0]
        std = math.sqrt(sum((r - mean) ** 2 for r in exact) / (n - 1))
        return [float(r - mean) / (std + 1e-4) for r in exact]
    return [float(r - (sum(exact) - r) / (n - 1)) if n > 1 else 0.0 for r in exact]


@given(
    kind=st.sampled_from(KINDS),
    rewards=st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=1, max_size=16),
)
@settings(max_examples=300, deadline=None)
def test_group_advantages_any_rewards_equal_the_exact_formula(kind, rewards):
    actual = group_advantages(np.array(rewards, np.float64), kind)
    np.testing.assert_allclose(actual, oracle(kind, rewards), rtol=1e-9, atol=1e-9)


def test_group_advantages_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(group_advantages(rewards, "loo"), [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-12)
    np.testing.assert_allclose(group_advantages(rewards, "group_mean"), [0.5, -0.5, -0.5, 0.5], rtol=1e-12)
    std = math.sqrt(1 / 3)
    np.testing.assert_allclose(
        group_advantages(rewards, "group_std"), np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-4), rtol=1e-12
    )


def test_batch_std_scale_gives_unit_deviation_with_ddof_1():
    advantages = np.array([2.0, -1.0, 0.5, 4.0, -3.0])
    mean = advantages.sum() / 5
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / 4)
    assert batch_std_scale(advantages) == pytest.approx(1 / std, rel=1e-12)


@pytest.mark.parametrize("advantages", [[], [0.7], [0.0, 0.0, 0.0], [1e-9, -1e-9]])
def test_batch_std_scale_nothing_to_normalise_is_one(advantages):
    assert batch_std_scale(np.array(advantages)) == 1.0


def test_batch_std_scale_normalises_from_a_deviation_of_a_millionth_on():
    """±x has the deviation x·√2 with ddof 1: 0.8e-6·√2 is above 1e-6, 0.7e-6·√2 is not."""
    assert batch_std_scale(np.array([0.8e-6, -0.8e-6])) == pytest.approx(1 / (0.8e-6 * math.sqrt(2)), rel=1e-9)
    assert batch_std_scale(np.array([0.7e-6, -0.7e-6])) == 1.0


def reporting(attempt: int, **metrics: float) -> Rollout:
    return msgspec.structs.replace(rollout(attempt, 9.0), metrics=metrics)


def test_named_rewards_are_scaled_apart_by_hand():
    """The example of docs/algorithms.md §1. `correct` has the deviation √(1/3), `style` as well, whatever its scale."""
    members = [reporting(i, correct=c, style=s) for i, (c, s) in enumerate([(1, 0), (1, 1), (0, 0), (0, 1)])]
    shaping = Shaping(advantage="group_std", seq_length=100, reward_weights={"correct": 1.0, "style": 0.5})
    unit = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    found = np.concatenate(sequence_advantages(members, shaping))
    np.testing.assert_allclose(found, [0.5 * unit, 1.5 * unit, -1.5 * unit, -0.5 * unit], rtol=1e-12)
    assert found.round(3).tolist() == [0.433, 1.299, -1.299, -0.433]


def test_named_rewards_of_a_linear_advantage_are_one_weighted_reward():
    rng = np.random.default_rng(0)
    rewards_n2 = rng.normal(size=(5, 2))
    members = [reporting(i, a=float(a), b=float(b)) for i, (a, b) in enumerate(rewards_n2)]
    shaping = Shaping(advantage="loo", seq_length=100, reward_weights={"a": 2.0, "b": -0.7})
    summed = group_advantages(rewards_n2 @ [2.0, -0.7], "loo")
    np.testing.assert_allclose(np.concatenate(sequence_advantages(members, shaping)), summed, rtol=1e-12, atol=1e-12)


def test_gdpo_batch_of_groups_equals_a_float64_oracle():
    """Three groups of four, three rewards, one of which is constant in one group: loops over the paper's equations."""
    rng = np.random.default_rng(1)
    weights = {"correct": 1.0, "short": -0.3, "style": 0.2}
    shaping = Shaping(advantage="gdpo", seq_length=100, reward_weights=weights)
    groups = [
        [{n: 1.0 if (g, n) == (1, "correct") else float(rng.normal(scale=10**g)) for n in weights} for _ in range(4)]
        for g in range(3)
    ]
    sums = []
    for members in groups:
        apart = {name: oracle("group_std", [member[name] for member in members]) for name in weights}
        sums += [sum(weights[name] * apart[name][i] for name in weights) for i in range(4)]
    mean = sum(sums) / 12
    assert mean == pytest.approx(0, abs=1e-12)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in sums) / 11)
    samples = []
    for g, members in enumerate(groups):
        samples += prepare_group(g, group(*(reporting(i, **m) for i, m in enumerate(members))), shaping)
    batch = OptimizerBatch(step=0, samples=tuple(samples), next_source=(3, 0))
    ((mb,),) = collate(batch, Collation(data_parallel_size=1, seq_length=100, advantage="gdpo"))
    np.testing.assert_allclose(mb.advantages[2::5], [a / deviation for a in sums], rtol=1e-6)


def test_named_reward_that_a_rollout_lacks_is_refused_by_name():
    shaping = Shaping(seq_length=100, reward_weights={"correct": 1.0, "style": 1.0})
    members = group(reporting(0, correct=1.0, style=1.0), reporting(1, correct=1.0))
    with pytest.raises(RecordError, match=says("style", "correct")):
        prepare_group(0, members, shaping)


REWARDS = [np.array([1.0, 2.0]), np.array([0.0, 1.0, 3.0]), np.array([2.0])]


def test_step_returns_by_hand():
    """The example of the module's text. With discount 1/2: 1 + 2/2 and 2; 0 + (1 + 3/2)/2, 1 + 3/2 and 3; 2."""
    np.testing.assert_array_equal(step_returns(REWARDS), [[3, 2, 0], [4, 4, 3], [2, 0, 0]])
    np.testing.assert_array_equal(step_returns(REWARDS, 0.5), [[2, 2, 0], [1.25, 2.5, 3], [2, 0, 0]])
    assert step_returns([]).shape == (0, 0)


def test_advantages_of_steps_by_hand():
    """Every column is a group of its own, of all three members: of step 2, 3 − 0 and 0 − 3/2."""
    returns_nK = step_returns(REWARDS)
    loo = group_advantages(returns_nK, "loo")
    np.testing.assert_allclose(loo, [[0, 0, -1.5], [1.5, 3, 3], [-1.5, -3, -1.5]], rtol=1e-12, atol=1e-12)
    mean = group_advantages(returns_nK, "group_mean")
    np.testing.assert_allclose(mean, [[0, 0, -1], [1, 2, 2], [-1, -2, -1]], rtol=1e-12, atol=1e-12)
    std = group_advantages(returns_nK, "group_std")
    deviations = np.array([1, 2, math.sqrt(3)]) + 1e-4
    np.testing.assert_allclose(std, [[0, 0, -1], [1, 2, 2], [-1, -2, -1]] / deviations, rtol=1e-12, atol=1e-12)


def test_advantages_of_texts_by_hand():
    """Step 0: 1, 0, 2, which all have; step 1: 2 and 1; step 2: one alone, so no advantage."""
    found = text_advantages(REWARDS, "loo")
    assert [member.tolist() for member in found] == [[0.0, 1.0], [-1.5, -1.0, 0.0], [1.5]]
    assert text_advantages([], "group_mean") == []


def per_sequence(*rollouts: Rollout, kind: str = "loo") -> list[list[float]]:
    shaping = Shaping(advantage=kind, seq_length=100)
    return [[float(a) for a in member] for member in sequence_advantages(rollouts, shaping)]


def test_multi_turn_rollouts_are_one_member_each_whatever_their_sequences():
    """Guessing: rewards 1.8, −1.9 and 0.4 after 1, 3 and 2 turns. Baselines: (−1.9+0.4)/2, (1.8+0.4)/2, (1.8−1.9)/2."""
    a = rollout(0, 1.8, sequence(0))
    b = rollout(1, -1.9, sequence(0), sequence(1), sequence(2))
    c = rollout(2, 0.4, sequence(0), sequence(1))
    actual = per_sequence(a, b, c)
    assert [len(member) for member in actual] == [1, 3, 2]
    for member, expected in zip(actual, [1.8 + 0.75, -1.9 - 1.1, 0.4 + 0.05], strict=True):
        assert member == pytest.approx([expected] * len(member), rel=1e-12)


def test_multi_turn_survivors_of_a_turn_are_no_baseline():
    """Only b reached turn 1: over the survivors its advantage there would be 0, over all members it is 1 − 0 = 1."""
    a = rollout(0, 0.0, sequence(0))
    b = rollout(1, 1.0, sequence(0), sequence(1))
    assert per_sequence(a, b) == [[-1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(10, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_soft_overlong_penalty_falls_linearly_over_the_buffer(tokens, expected):
    assert soft_overlong_penalty(tokens, max_tokens=100, buffer_tokens=20) == pytest.approx(expected, abs=1e-12)


def test_soft_overlong_penalty_enters_the_baseline_by_the_longest_completion():
    """Rewards 1 and 1; the second has completions of 3 and 9 of at most 10 tokens, buffer 4: penalty (10−9)/4 − 1."""
    shaping = Shaping(seq_length=100, overlong_buffer_tokens=4, max_tokens=10)
    a, b = rollout(0, 1.0), rollout(1, 1.0, sequence(0, 3), sequence(1, 9))
    first, second = sequence_advantages([a, b], shaping)
    np.testing.assert_allclose(first, [0.75], rtol=1e-12)
    np.testing.assert_allclose(second, [-0.75, -0.75], rtol=1e-12)


def test_prepare_group_infinite_advantage_is_refused_with_the_samples_identity():
    with pytest.raises(RecordError, match=says("0-7/0", "advantage", "not finite")):
        prepare_group(0, group(rollout(0, 1e300), rollout(1, -1e300)), Shaping(seq_length=100))


TOKENS = np.array([10, 30, 20, 40])
TEXTS = np.array([1, 3, 2, 2])
KINDS = ("sum_over_batch", "sum_over_texts", "token_mean", "sample_mean", "prompt_mean")


def members(weighted: list[bool]) -> Members:
    """Two groups of two rollouts."""
    counted = np.where(weighted, TOKENS, 0)
    sums = counted.reshape(2, 2).sum(1).repeat(2)
    return Members(
        counted_N=counted,
        texts_N=TEXTS,
        group_sizes_N=np.full(4, 2),
        group_tokens_N=sums,
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum_over_batch", [1 / 4] * 4),
        ("sum_over_texts", [1 / 8] * 4),
        ("token_mean", [1 / 100] * 4),
        ("sample_mean", [1 / 40, 1 / 120, 1 / 80, 1 / 160]),
        ("prompt_mean", [1 / 80, 1 / 80, 1 / 120, 1 / 120]),
    ],
)
def test_rollout_weights_by_hand(kind, expected):
    actual = rollout_weights(kind, members([True] * 4))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum_over_batch", [1 / 4, 0, 1 / 4, 1 / 4]),
        ("sum_over_texts", [1 / 8, 0, 1 / 8, 1 / 8]),
        ("token_mean", [1 / 70, 0, 1 / 70, 1 / 70]),
        ("sample_mean", [1 / 40, 0, 1 / 80, 1 / 160]),
        ("prompt_mean", [1 / 20, 0, 1 / 120, 1 / 120]),
    ],
)
def test_rollout_weights_zero_weight_rollouts_stay_members_but_their_tokens_count_nowhere(kind, expected):
    actual = rollout_weights(kind, members([True, False, True, True]))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_weights_nothing_weighted_is_all_zero(kind):
    assert rollout_weights(kind, members([False] * 4)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_weights_single_token_has_all_the_weight(kind):
    one = np.ones(1, dtype=np.int64)
    alone = Members(counted_N=one, texts_N=one, group_sizes_N=one, group_tokens_N=one)
    assert rollout_weights(kind, alone).tolist() == [1.0]


def test_prompt_mean_rollout_left_alone_in_a_batch_weighs_an_eighth_of_its_group():
    """A batch of one whole group of 8 and one rollout of the next group of 8, ten tokens each.

    1 + 1/8 groups; each has 80 tokens: 1/90 per token, whoever they belong to. As a group of its own the lone rollout
    would get 1/(2·10): eight times the 1/(2·80) of the others.
    """
    lone = Members(
        counted_N=np.full(9, 10),
        texts_N=np.ones(9, int),
        group_sizes_N=np.full(9, 8),
        group_tokens_N=np.full(9, 80),
    )
    np.testing.assert_allclose(rollout_weights("prompt_mean", lone), np.full(9, 1 / 90), rtol=1e-12)


def test_prompt_mean_cut_anywhere_gives_every_token_the_weight_of_the_whole_group():
    """Three groups of different sizes, equal batches cut across them: within a batch, tokens of a group weigh as
    1/(its tokens), and the batch's weights add up to 1."""
    sizes, tokens = [4, 2, 6], [7, 30, 5]
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    for first in range(0, 12, 3):
        part = groups[first : first + 3]
        batch = Members(
            counted_N=np.array([tokens[g] for g in part]),
            texts_N=np.ones(3, int),
            group_sizes_N=np.array([sizes[g] for g in part]),
            group_tokens_N=np.array([sizes[g] * tokens[g] for g in part]),
        )
        weights = rollout_weights("prompt_mean", batch)
        assert (weights * batch.counted_N).sum() == pytest.approx(1.0)
        np.testing.assert_allclose(weights * batch.group_tokens_N, weights[0] * batch.group_tokens_N[0], rtol=1e-12)


def test_prepare_group_knows_its_size_without_the_members_that_cannot_be_trained():
    untrained = msgspec.structs.replace(rollout(1, 0.0), sequences=())
    samples = prepare_group(
        0, group(rollout(0, 1.0), untrained, rollout(2, 0.0, sequence(0, 7))), Shaping(seq_length=99)
    )
    assert [(sample.group_size, sample.group_tokens) for sample in samples] == [(2, 10)] * 3
