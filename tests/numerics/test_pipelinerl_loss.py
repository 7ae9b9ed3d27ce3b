"""A migrated experiment has PipelineRL's loss: both on one batch of recorded rollouts, PipelineRL's by its formulas.

PipelineRL's in words: a text's advantage is its reward minus the mean reward of the group's other texts at the same
step. A trained token weighs 1 / texts of the batch, or 0 in a text that its limit cut, with overlong filtering.
`reinforce` weighs log π · A by the ratio π/μ up to 1 + ε. `ppo` takes the smaller of ratio · A and clipped ratio · A.
`gspo` does so with the ratio's geometric mean over a text, for each of its tokens. A k3 term keeps to the reference.
"""

from itertools import count
from math import exp, fsum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pipelinerl.config.load import compose, validate
from pipelinerl.config.migrate.migration import migrate
from pipelinerl.config.sections import Config
from pipelinerl.finetune.data import index_tokens
from pipelinerl.finetune.rl.objective import PolicyObjective, settings_at
from pipelinerl.finetune.rl.tokens import TokenInputs
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.records import Rollout, RolloutGroup, TrainingSequence

EXPERIMENTS: dict[str, tuple[list[Any], dict[str, Any], bool]] = {
    "guessing": ([], {}, True),
    "counting": ([], {}, False),
    "counting as grpo": ([{"override finetune": "grpo"}], {}, False),
    "miniwob_grpo": ([{"override finetune": "grpo"}], {}, True),
    "gspo": ([], {"rl": {"policy_loss": "gspo"}}, True),
    "gspo with overlong filtering": ([], {"rl": {"policy_loss": "gspo", "overlong_filtering": True}}, False),
    "deepscaler": ([], {"rl": {"kl_coef": 0.001, "aggregate_loss": "mean"}}, False),
    "ppo with two bounds": ([], {"rl": {"policy_loss": "ppo", "epsilon_high": 0.3}}, True),
}
"""Name → PipelineRL's files, its `finetune`, and whether a rollout has several texts."""


def config_of(name: str, folder: Path) -> Config:
    defaults, finetune, several = EXPERIMENTS[name]
    policy = "os.getcwd" if several else "pipelinerl.domains.math.generate_math_rollout"
    old = {"defaults": ["base", *defaults, "_self_"], "actor": {"rollout_policy": policy}}
    old |= {"finetune": finetune} if finetune else {}
    old |= {"world": {"preprocessor_fraction": 1}} if name == "deepscaler" else {}
    new = migrate(old)
    (folder / "new.yaml").write_text(yaml.safe_dump(new.document()))
    return validate(compose("new", ["output_dir=x"], config_dir=folder))


def groups_of(rng: np.random.Generator, mode: Any) -> list[RolloutGroup]:
    """Groups of four rollouts with up to five texts. About one text in five is cut by its limit."""
    groups = []
    for g in range(3):
        rollouts = []
        for attempt in range(4):
            texts = int(rng.integers(1, 6)) if mode == "texts" else 1
            reward, cut = float(rng.normal()), rng.random(texts) < 0.2
            rewards = [reward] * texts if attempt % 2 else rng.normal(size=texts).tolist()
            sequences = []
            for turn in range(texts):
                prompt, answer = rng.integers(2, 6), rng.integers(1, 9)
                sequences.append(
                    TrainingSequence(
                        token_ids=rng.integers(0, 50, prompt + answer).astype(np.int32),
                        spans=np.array([[prompt, prompt + answer, 0]], np.int32),
                        logprobs=-rng.exponential(1.0, answer).astype(np.float32),
                        turn=turn,
                        finish_reason="length" if cut[turn] else "stop",
                    )
                )
            rollouts.append(
                Rollout(
                    attempt=attempt,
                    reward=rewards[0],
                    sequences=tuple(sequences),
                    metrics={},
                    latency_s=0.0,
                    num_llm_calls=texts,
                    rewards=mode,
                    text_rewards=tuple(rewards) if mode == "texts" else (),
                )
            )
        groups.append(
            RolloutGroup(
                group_id=f"0-{g}",
                epoch=0,
                position=g,
                problem_index=g,
                actor=0,
                domain="d",
                dataset="train",
                attempts=4,
                settled_before=0,
                dispatch_index=g,
                dispatched_version=0,
                rollouts=tuple(rollouts),
            )
        )
    return groups


Policy = dict[bytes, tuple[np.ndarray, np.ndarray]]
"""Tokens of a text → log-probabilities of its trained tokens under the policy and under the reference."""


def policy_of(groups: list[RolloutGroup], rng: np.random.Generator) -> Policy:
    return {
        sequence.token_ids.tobytes(): tuple(
            (sequence.logprobs + rng.normal(0, 0.3, len(sequence.logprobs))).astype(np.float32) for _ in range(2)
        )
        for group in groups
        for rollout in group.rollouts
        for sequence in rollout.sequences
    }


def theirs(groups: list[RolloutGroup], policy: Policy, name: str) -> float:
    """PipelineRL's loss of the batch, in float64."""
    defaults, finetune, _ = EXPERIMENTS[name]
    rl = {"policy_loss": "ppo" if defaults else "reinforce", "epsilon_low": 0.02, "epsilon_high": 0.02}
    rl |= finetune.get("rl", {})
    texts = []
    for group in groups:
        rewards = [rollout.text_rewards or (rollout.reward,) for rollout in group.rollouts]
        for rollout, own in zip(group.rollouts, rewards, strict=True):
            for step, sequence in enumerate(rollout.sequences):
                peers = [other[step] for other in rewards if len(other) > step]
                mean = (fsum(peers) - own[step]) / (len(peers) - 1) if len(peers) > 1 else own[step]
                texts.append((sequence, own[step] - mean))
    total = 0.0
    for sequence, advantage in texts:
        if rl.get("overlong_filtering") and sequence.finish_reason == "length":
            continue
        new, ref = (values.astype(np.float64) for values in policy[sequence.token_ids.tobytes()])
        ratios = np.exp(new - sequence.logprobs.astype(np.float64))
        if rl["policy_loss"] == "gspo":
            ratios = np.full_like(ratios, exp(fsum(np.log(ratios)) / len(ratios)))
        low, high = 1 - rl["epsilon_low"], 1 + rl["epsilon_high"]
        if rl["policy_loss"] == "reinforce":
            gains = new * advantage * np.minimum(ratios, high)
        else:
            gains = np.minimum(ratios * advantage, np.clip(ratios, low, high) * advantage)
        apart = np.clip(ref - new, -5, 5)
        gains -= rl.get("kl_coef", 0.0) * (np.exp(apart) - apart - 1)
        total -= fsum(gains) / len(texts)
    return total


def ours(groups: list[RolloutGroup], policy: Policy, config: Config) -> float:
    """The loss of the optimizer batch, by the preprocessor and the objective."""
    rl, offset = config.finetune.rl, count()
    shaping = Shaping(
        advantage=rl.advantage,
        seq_length=100,
        filter_zero_advantage_groups=rl.filter_zero_advantage_groups,
        overlong_filtering=config.preprocess.overlong_filtering,
    )
    samples = [sample for group in groups for sample in prepare_group(next(offset), group, shaping)]
    assert all(sample.drop_reason is None for sample in samples)
    batch = OptimizerBatch(step=0, samples=tuple(samples), next_source=(9, 0))
    total = 0.0
    for record in collate(batch, Collation(data_parallel_size=1, seq_length=100, aggregation=rl.aggregation))[0]:
        index = index_tokens(record)
        ends = np.cumsum(record.segment_lengths)
        texts = [policy[part.tobytes()] for part in np.split(record.token_ids, ends[:-1])]
        new, ref = (torch.tensor(np.concatenate(values), dtype=torch.float64) for values in zip(*texts, strict=True))
        inputs = TokenInputs(
            sampler_logprobs_K=torch.tensor(record.logprobs[index.positions_K], dtype=torch.float64),
            advantages_K=torch.tensor(record.advantages[index.positions_K], dtype=torch.float64),
            weights_K=torch.tensor(record.segment_weights[index.segments_K], dtype=torch.float64),
            segments_K=torch.tensor(index.segments_K),
            num_segments=len(record.segment_lengths),
            ref_logprobs_K=ref,
        )
        total += float(PolicyObjective(inputs, settings_at(config, 0))(new, torch.zeros_like(new), 0))
    return total


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_loss_of_a_recorded_batch_is_pipelinerls(name: str, seed: int, tmp_path: Path) -> None:
    config, rng = config_of(name, tmp_path), np.random.default_rng(seed)
    groups = groups_of(rng, config.actor.rewards)
    policy = policy_of(groups, rng)
    expected = theirs(groups, policy, name)
    assert ours(groups, policy, config) == pytest.approx(expected, rel=1e-6, abs=1e-6)
