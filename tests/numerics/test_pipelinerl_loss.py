"""A migrated experiment has PipelineRL's loss: both on one batch of recorded rollouts, PipelineRL's by its formulas.

PipelineRL's in words: a text's advantage is its reward minus the mean reward of the group's other texts at the same
step, or minus the value before the token, which learns the reward by half its square. A trained token weighs 1 / texts
of the batch, or 0 in a text that its limit cut, with overlong filtering. `reinforce` weighs log π · A by the ratio π/μ
up to 1 + ε. `ppo` takes the smaller of ratio · A and clipped ratio · A. `gspo` does so with the ratio's geometric mean
over a text, for each of its tokens. A k3 term keeps to the reference. Logits are divided by the temperature.
"""

from dataclasses import dataclass, field, replace
from itertools import count
from math import exp, fsum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml

from pipelinerl.config.load import compose, validate
from pipelinerl.config.migrate.migration import migrate
from pipelinerl.config.sections import Config
from pipelinerl.finetune.data import index_tokens, packed, to_batch
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.objective import settings_at
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.records import Rollout, RolloutGroup, TrainingSequence
from tests.models import make_qwen2

VOCAB = 50


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What PipelineRL's file says about the loss."""

    finetune: str = "base"
    """Its file of `finetune`."""
    rl: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    has_texts: bool = False
    """Whether a rollout may have several texts."""

    @property
    def has_values(self) -> bool:
        return self.finetune in ("ppo", "actor_critic")

    @property
    def settings(self) -> dict[str, Any]:
        loss = "ppo" if self.finetune in ("ppo", "grpo") else "reinforce"
        return {"policy_loss": loss, "epsilon_low": 0.02, "epsilon_high": 0.02} | self.rl


EXPERIMENTS = {
    "math, coding, logic, ifeval, fn_calling, counting": Experiment(),
    "guessing, counting_tapeagent, multi_domain": Experiment(has_texts=True),
    "chartqa": Experiment(temperature=0.7),
    "miniwob, miniwob_uic_ppo": Experiment(finetune="ppo", has_texts=True),
    "miniwob_grpo, miniwob_uic_grpo": Experiment(finetune="grpo", has_texts=True),
    "tir": Experiment(rl={"policy_loss": "gspo", "overlong_filtering": True}, has_texts=True),
    "deepscaler15b": Experiment(rl={"kl_coef": 0.001, "aggregate_loss": "mean"}),
    "own: actor_critic": Experiment(finetune="actor_critic"),
    "own: two bounds": Experiment(rl={"policy_loss": "ppo", "epsilon_high": 0.3}, has_texts=True),
}


def config_of(experiment: Experiment, folder: Path) -> Config:
    files = [] if experiment.finetune == "base" else [{"override finetune": experiment.finetune}]
    policy = "os.getcwd" if experiment.has_texts else "pipelinerl.domains.math.generate_math_rollout"
    old: dict[str, Any] = {"defaults": ["base", *files, "_self_"], "actor": {"rollout_policy": policy}}
    old["llm"] = {"parameters": {"temperature": experiment.temperature}}
    if experiment.rl:
        old["finetune"] = {"rl": experiment.rl}
    if experiment.rl.get("kl_coef"):
        old["world"] = {"preprocessor_fraction": 1}
    (folder / "new.yaml").write_text(yaml.safe_dump(migrate(old).document()))
    return validate(compose("new", ["output_dir=x"], config_dir=folder))


class Scores(NamedTuple):
    """Of the trained tokens of a text, float64."""

    policy: np.ndarray
    values: np.ndarray


class Recorded:
    """Three groups with up to five texts in a rollout, and what the policy and the reference say about each text."""

    def __init__(self, config: Config, policy: Policy, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.config, self.policy = config, policy
        self.scores: dict[bytes, Scores] = {}
        self.reference: dict[bytes, np.ndarray] = {}
        self.groups = [self._group(number) for number in range(3)]

    def _group(self, number: int) -> RolloutGroup:
        attempts = min(4, self.config.attempts)
        rollouts = tuple(self._rollout(attempt, self.config.actor.rewards == "texts") for attempt in range(attempts))
        return RolloutGroup(
            group_id=f"0-{number}",
            epoch=0,
            position=number,
            problem_index=number,
            actor=0,
            domain="d",
            dataset="train",
            attempts=attempts,
            settled_before=0,
            dispatch_index=number,
            dispatched_version=0,
            rollouts=rollouts,
        )

    def _rollout(self, attempt: int, has_texts: bool) -> Rollout:
        """Every other rollout gives each of its texts the same reward. About one text in five is cut by its limit."""
        texts = int(self.rng.integers(1, 6)) if has_texts else 1
        rewards = [float(self.rng.normal())] * texts if attempt % 2 else self.rng.normal(size=texts).tolist()
        return Rollout(
            attempt=attempt,
            reward=rewards[0],
            sequences=tuple(self._sequence(turn) for turn in range(texts)),
            metrics={},
            latency_s=0.0,
            num_llm_calls=texts,
            rewards=self.config.actor.rewards,
            text_rewards=tuple(rewards) if has_texts else (),
        )

    def _sequence(self, turn: int) -> TrainingSequence:
        prompt, answer = self.rng.integers(2, 6), self.rng.integers(1, 9)
        token_ids = self.rng.integers(0, VOCAB, prompt + answer).astype(np.int32)
        scores = self.scores[token_ids.tobytes()] = self._score(token_ids, prompt)
        near = (scores.policy + self.rng.normal(0, 0.3, (2, answer))).astype(np.float32)
        self.reference[token_ids.tobytes()] = near[1]
        return TrainingSequence(
            token_ids=token_ids,
            spans=np.array([[prompt, prompt + answer, 0]], np.int32),
            logprobs=near[0],
            turn=turn,
            finish_reason="length" if self.rng.random() < 0.2 else "stop",
        )

    @torch.no_grad()
    def _score(self, token_ids: np.ndarray, prompt: int) -> Scores:
        """One text alone, with the whole vocabulary: of every token after the prompt, from the state before it."""
        ids = torch.tensor(token_ids.astype(np.int64))
        states = self.policy.lm.model(input_ids=ids[None]).last_hidden_state[0, prompt - 1 : -1]
        logits = states @ self.policy.lm.get_output_embeddings().weight.T / self.config.llm.parameters["temperature"]
        chosen = logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]
        head = self.policy.value_head
        values = torch.zeros(len(states)) if head is None else states @ head.weight[0] + head.bias
        return Scores(chosen.numpy(), values.numpy())


def theirs(recorded: Recorded, experiment: Experiment) -> float:
    """PipelineRL's loss of the batch, in float64."""
    rl = experiment.settings
    texts = []
    for group in recorded.groups:
        rewards = [rollout.text_rewards or (rollout.reward,) for rollout in group.rollouts]
        for rollout, own in zip(group.rollouts, rewards, strict=True):
            for step, sequence in enumerate(rollout.sequences):
                peers = [other[step] for other in rewards if len(other) > step]
                mean = (fsum(peers) - own[step]) / (len(peers) - 1) if len(peers) > 1 else own[step]
                texts.append((sequence, own[step], own[step] - mean))
    total = 0.0
    for sequence, reward, advantage in texts:
        if rl.get("overlong_filtering") and sequence.finish_reason == "length":
            continue
        new, values = recorded.scores[sequence.token_ids.tobytes()]
        ref = recorded.reference[sequence.token_ids.tobytes()].astype(np.float64)
        ratios = np.exp(new - sequence.logprobs.astype(np.float64))
        if rl["policy_loss"] == "gspo":
            ratios = np.full_like(ratios, exp(fsum(np.log(ratios)) / len(ratios)))
        advantages = reward - values if experiment.has_values else np.full_like(new, advantage)
        low, high = 1 - rl["epsilon_low"], 1 + rl["epsilon_high"]
        if rl["policy_loss"] == "reinforce":
            gains = new * advantages * np.minimum(ratios, high)
        else:
            gains = np.minimum(ratios * advantages, np.clip(ratios, low, high) * advantages)
        apart = np.clip(ref - new, -5, 5)
        gains = gains - rl.get("kl_coef", 0.0) * (np.exp(apart) - apart - 1)
        if experiment.has_values:
            gains = gains - 0.1 * 0.5 * (values - reward) ** 2
        total -= fsum(gains) / len(texts)
    return total


def ours(recorded: Recorded) -> float:
    """The loss of the optimizer batch, by the preprocessor and the trainer's policy."""
    config, rl, offset = recorded.config, recorded.config.finetune.rl, count()
    shaping = Shaping(
        advantage=rl.advantage,
        seq_length=100,
        filter_zero_advantage_groups=rl.filter_zero_advantage_groups,
        overlong_filtering=config.preprocess.overlong_filtering,
    )
    samples = [sample for group in recorded.groups for sample in prepare_group(next(offset), group, shaping)]
    assert all(sample.drop_reason is None for sample in samples)
    scored = tuple(
        replace(
            sample, ref_logprobs=tuple(recorded.reference[text.token_ids.tobytes()] for _, text in sample.sequences)
        )
        for sample in samples
    )
    collation = Collation(
        data_parallel_size=1,
        seq_length=100,
        advantage=rl.advantage,
        aggregation=rl.aggregation,
        with_reference=rl.kl_coef > 0,
    )
    total = 0.0
    for record in collate(OptimizerBatch(step=0, samples=scored, next_source=(9, 0)), collation)[0]:
        batch = to_batch(record, index_tokens(record), layout=packed(record.segment_lengths), float_dtype=torch.float64)
        total += float(recorded.policy(batch, settings_at(config, 0)).loss.detach())
    return total


def policy_of(config: Config) -> Policy:
    lm = make_qwen2(VOCAB, initializer_range=0.2, attn_implementation="sdpa").double()
    has_values = config.finetune.rl.advantage == "value"
    coefficient = config.finetune.rl.value_loss_coef if has_values else None
    policy = Policy(lm, temperature=config.llm.temperature, value_loss_coef=coefficient)
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head.weight, std=0.3)
    return policy


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("seed", range(2))
def test_loss_of_a_recorded_batch_is_pipelinerls(name: str, seed: int, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    config = config_of(experiment, tmp_path)
    recorded = Recorded(config, policy_of(config), seed)
    assert ours(recorded) == pytest.approx(theirs(recorded, experiment), rel=1e-6, abs=1e-6)
