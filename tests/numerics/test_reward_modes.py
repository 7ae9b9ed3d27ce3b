"""Reward modes (docs/algorithms.md §1): worked examples, float64 oracles in plain loops, and a toy that must converge.

`texts` is compared with PipelineRL's definition: one row per text, grouped by (group, step index), advantage = reward −
mean of the other rows of its cell, and 0 for a row that is alone in its cell.
"""

import math
from collections import defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.errors import RecordError
from pipelinerl.preprocess.samples import Shaping, prepare_group, sequence_advantages
from pipelinerl.records import Rollout, RolloutGroup
from pipelinerl.records.check import check_group
from pipelinerl.rollouts import BaseMetrics, RewardMode, RolloutResult, TrainingText


def text(turn: int, reward: float | None, *, trained: bool = True) -> TrainingText:
    """A turn of a growing conversation: with one reward per rollout its texts would merge into one sequence."""
    ids = list(range(3 * turn + 3))
    fields = {} if reward is None else {"reward": reward}
    labels = [-100] * (len(ids) - 1) + [ids[-1] if trained else -100]
    return TrainingText(text="t", n_predicted=1, input_ids=ids, labels=labels, logprobs=[-0.5] * trained, **fields)


def played(
    rewards: list[float | None], mode: RewardMode | None, *, attempt: int = 0, default: RewardMode = "rollout"
) -> Rollout:
    total = sum(reward or 0.0 for reward in rewards)
    result = RolloutResult(
        training_texts=[text(turn, reward) for turn, reward in enumerate(rewards)],
        metrics=BaseMetrics(reward=total, success=True, no_error=True, no_answer=False),
        latency=0.0,
        rewards=mode,
    )
    return to_rollout(
        result, attempt=attempt, latency_s=0.0, num_llm_calls=1, fallback_version=0, seq_length=10**6, rewards=default
    )


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(
        group_id="4-17",
        epoch=4,
        position=17,
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


def advantages(members: list[list[float]], mode: RewardMode, kind: str = "loo", discount: float = 1.0) -> list:
    rollouts = [played(rewards, mode, attempt=i) for i, rewards in enumerate(members)]
    check_group(group(*rollouts), vocab_size=10**6, attempts=len(rollouts))
    found = sequence_advantages(rollouts, Shaping(seq_length=10**6, advantage=kind, step_discount=discount))
    return [member.tolist() for member in found]


def test_steps_equal_rewards_do_not_count_once() -> None:
    """Returns 3, 2, 1 against 2, 1, 0: the perfect rollout is one better from every turn on."""
    assert advantages([[1, 1, 1], [1, 1, 0]], "steps") == [[1, 1, 1], [-1, -1, -1]]


def test_steps_one_penalised_text_costs_its_tenth() -> None:
    """Returns from turn 0: 3, 3, 3, 2.9; turn 1: 2, 2, 2, 1.9; turn 2: 1, 1, 1, 0.9."""
    found = advantages([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0.9]], "steps")
    np.testing.assert_allclose(found, [[0.1 / 3] * 3] * 3 + [[-0.1] * 3], atol=1e-12)


def test_steps_ended_members_stay_in_the_baseline_with_a_return_of_zero() -> None:
    assert advantages([[1, 2], [0, 1, 3], [2]], "steps") == [[0, 0], [1.5, 3, 3], [-1.5]]


def test_steps_are_discounted_per_step() -> None:
    """γ = ½: a's returns 1 + ½·2 + ¼·4 = 3, 4, 4; b's 2 + ½·0 = 2, 0 and, after its end, 0."""
    assert advantages([[1, 2, 4], [2, 0]], "steps", discount=0.5) == [[1, 4, 4], [-1, -4]]


def test_texts_by_hand() -> None:
    """Step 0: 1, 0, 2; step 1: 4 and 1; step 2 has one row, which has nothing to be compared with."""
    assert advantages([[1, 4], [0, 1, 3], [2]], "texts") == [[0, 3], [-1.5, -3, 0], [1.5]]


def pipelinerl(members: list[list[float]]) -> list[list[float]]:
    rows = [(rollout, step, r) for rollout, rewards in enumerate(members) for step, r in enumerate(rewards)]
    cells: dict[int, list[float]] = defaultdict(list)
    for _, step, reward in rows:
        cells[step].append(reward)
    found: list[list[float]] = [[] for _ in members]
    for rollout, step, reward in rows:
        cell = cells[step]
        baseline = (math.fsum(cell) - reward) / (len(cell) - 1) if len(cell) > 1 else reward
        found[rollout].append(reward - baseline)
    return found


def test_texts_equal_pipelinerl_on_200_groups_with_unequal_rewards() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        members = [rng.normal(size=rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 17))]
        for found, expected in zip(advantages(members, "texts"), pipelinerl(members), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-12)


def oracle_steps(members: list[list[float]], kind: str, discount: float) -> list[list[float]]:
    """Member by member and turn by turn, sums written out."""

    def from_turn(rewards: list[float], turn: int) -> float:
        return math.fsum(discount ** (k - turn) * rewards[k] for k in range(turn, len(rewards)))

    found = []
    for i, rewards in enumerate(members):
        row = []
        for turn in range(len(rewards)):
            own, others = (
                from_turn(rewards, turn),
                [from_turn(m, turn) for j, m in enumerate(members) if j != i],
            )
            if not others:
                row.append(own if kind == "value" else 0.0)
            elif kind == "value":
                row.append(own)
            elif kind == "loo":
                row.append(own - math.fsum(others) / len(others))
            else:
                mean = math.fsum([own, *others]) / (1 + len(others))
                deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in [own, *others]) / len(others))
                row.append((own - mean) / (1.0 if kind == "group_mean" else deviation + 1e-4))
        found.append(row)
    return found


@given(
    members=st.lists(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6), min_size=1, max_size=64),
    kind=st.sampled_from(["loo", "group_mean", "group_std", "value"]),
    discount=st.sampled_from([1.0, 0.9, 0.5]),
)
@settings(max_examples=40, deadline=None)
def test_steps_equal_the_oracle(members: list[list[float]], kind: str, discount: float) -> None:
    for found, expected in zip(
        advantages(members, "steps", kind, discount), oracle_steps(members, kind, discount), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_rollout_mode_refuses_unequal_rewards_and_names_the_others() -> None:
    with pytest.raises(RecordError, match=r"training_texts\[2\].reward is 0.9 .*'texts'.*'steps'"):
        played([1, 1, 0.9], None)
    assert len(played([1, 1, 1], None).sequences) == 1


def test_rollout_mode_looks_at_texts_that_are_not_trained_too() -> None:
    result = RolloutResult(
        training_texts=[text(0, 1.0), text(1, 0.0, trained=False)],
        metrics=BaseMetrics(reward=1.0, success=True, no_error=True, no_answer=False),
        latency=0.0,
    )
    with pytest.raises(RecordError, match="rewards"):
        to_rollout(result, attempt=0, latency_s=0.0, num_llm_calls=1, fallback_version=0, seq_length=100)


def test_steps_reward_of_a_masked_text_is_part_of_the_return() -> None:
    """Turn 1 is an observation that trains nothing and earns 5: the return from turn 0 is 1 + 5."""
    result = RolloutResult(
        training_texts=[text(0, 1.0), text(1, 5.0, trained=False), text(2, 0.0)],
        metrics=BaseMetrics(reward=6.0, success=True, no_error=True, no_answer=False),
        latency=0.0,
        rewards="steps",
    )
    first = to_rollout(result, attempt=0, latency_s=0.0, num_llm_calls=1, fallback_version=0, seq_length=100)
    second = played([0, 0, 0], "steps", attempt=1)
    found = sequence_advantages([first, second], Shaping(seq_length=100))
    assert [member.tolist() for member in found] == [[6, 0], [-6, -5, 0]]


@pytest.mark.parametrize("mode", ["texts", "steps"])
def test_reward_left_unset_is_refused_where_every_text_has_its_own(mode: RewardMode) -> None:
    with pytest.raises(RecordError, match=rf"training_texts\[1\].reward is not set.*{mode}"):
        played([1.0, None], mode)


def test_result_wins_over_the_configured_mode() -> None:
    assert played([1.0, 2.0], None, default="texts").rewards == "texts"
    assert played([1.0, 2.0], "steps", default="texts").rewards == "steps"


def test_group_of_mixed_modes_is_refused_with_its_identity() -> None:
    mixed = group(played([1, 0], "steps", attempt=0), played([1, 1], None, attempt=1))
    with pytest.raises(RecordError, match=r"4-17.*attempt 0 .*'steps'.*attempt 1 .*'rollout'"):
        check_group(mixed, vocab_size=100, attempts=2)


def test_overlong_penalty_falls_on_the_step_that_was_too_long() -> None:
    """Completions of one token of at most 2, buffer 2: penalty −½ for every step, in the return from it on."""
    rollouts = [played([1, 1], "steps", attempt=0), played([0], "steps", attempt=1)]
    shaping = Shaping(seq_length=100, overlong_buffer_tokens=2, max_tokens=2)
    found = sequence_advantages(rollouts, shaping)
    np.testing.assert_allclose(found[0], [1.0 - -0.5, 0.5], atol=1e-12)
    np.testing.assert_allclose(found[1], [-0.5 - 1.0], atol=1e-12)


def test_batch_std_counts_a_rollout_once_and_a_step_each() -> None:
    """Said by the mode: a rollout whose steps have equal advantages still has as many as it has steps."""
    steps = prepare_group(0, group(played([1, 0], "steps"), played([0, 0], "steps", attempt=1)), Shaping(seq_length=99))
    rollout = prepare_group(0, group(played([1, 1], None), played([0, 0], None, attempt=1)), Shaping(seq_length=99))
    assert [sample.members for sample in steps] == [(1.0, 0.0), (-1.0, 0.0)]
    assert [sample.members for sample in rollout] == [(1.0,), (-1.0,)]


def toy(mode: RewardMode, start: float, *, steps: int = 500, attempts: int = 8, groups: int = 4) -> np.ndarray:
    """Three turns, one point per right turn; a policy of three logits under REINFORCE with the real advantages."""
    rng = np.random.default_rng(1)
    logits = np.full(3, math.log(start / (1 - start)))
    shaping = Shaping(seq_length=100)
    outline = played([0.0, 0.0, 0.0], mode)
    for _ in range(steps):
        p = 1 / (1 + np.exp(-logits))
        gradient = np.zeros(3)
        for _ in range(groups):
            right = rng.random((attempts, 3)) < p
            members = [
                msgspec.structs.replace(outline, text_rewards=tuple(row)) for row in right.astype(float).tolist()
            ]
            gradient += (np.array(sequence_advantages(members, shaping)) * (right - p)).sum(0)
        logits += 0.5 * gradient / (groups * attempts)
    return 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize("start", [0.5, 0.9])
def test_steps_toy_learns_every_turn(start: float) -> None:
    assert toy("steps", start).min() >= 0.97


def test_texts_toy_learns_every_turn_where_nobody_ends_early() -> None:
    assert toy("texts", 0.5).min() >= 0.97
