"""Optimizer batches with advantages and weights from raw groups, written from docs/algorithms.md §1, §4 and §5 alone.

The code that implements these sections was read only where the two disagreed and the document said too little.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import stdev

from pipelinerl.config.sections import Config
from pipelinerl.records import Rollout, RolloutGroup, TrainingSequence


@dataclass
class Text:
    """A training sequence with all that its loss needs, except the policy."""

    sequence: TrainingSequence
    positions: list[int]
    """Of the trained tokens."""
    versions: list[int]
    mu: list[float]
    """log μ of the trained tokens."""
    reward: float
    """The return that the advantage is about."""
    advantage: float
    weighs: bool
    """False: overlong filtering gives it weight 0."""
    weight: float = 0.0


@dataclass
class Member:
    """A rollout that may be trained."""

    mode: str
    reward: float
    texts: list[Text]
    group_size: int = 0
    """Members of its group that can be trained at its step."""
    group_tokens: int = 0
    """Sampled tokens of those members that weigh, whether they are masked or not."""

    @property
    def tokens(self) -> int:
        """Those that weigh."""
        return sum(len(text.positions) for text in self.texts if text.weighs)


# ---- §1: returns and advantages


def completions(sequence: TrainingSequence) -> Iterator[int]:
    """Lengths: spans that touch each other are one completion, sampled by several versions."""
    length, previous_end = 0, None
    for start, end, _ in sequence.spans.tolist():
        if previous_end is not None and start != previous_end:
            yield length
            length = 0
        length, previous_end = length + end - start, end
    yield length


def penalty(sequences: Sequence[TrainingSequence], cfg: Config) -> float:
    """DAPO's soft penalty of the longest completion."""
    buffer = cfg.preprocess.overlong_buffer_tokens
    if not buffer:
        return 0.0
    longest = max(length for sequence in sequences for length in completions(sequence))
    return min(max((cfg.llm.parameters["max_tokens"] - longest) / buffer - 1, -1.0), 0.0)


def earned(rollout: Rollout, cfg: Config) -> list[float]:
    """Rewards of its texts, or its one reward, with the penalty of §5."""
    if rollout.rewards == "rollout":
        return [rollout.reward + penalty(rollout.sequences, cfg)]
    rewards = list(rollout.text_rewards)
    for sequence in rollout.sequences:
        rewards[sequence.turn] += penalty([sequence], cfg)
    return rewards


def returns_of(group: RolloutGroup, cfg: Config) -> list[list[float | None]]:
    """[n][steps]: what each member's text at a step is worth. None: it is not compared there."""
    rewards = [earned(rollout, cfg) for rollout in group.rollouts]
    steps = max(map(len, rewards))
    if group.rollouts[0].rewards != "steps":
        return [[*own, *[None] * (steps - len(own))] for own in rewards]
    gamma = cfg.finetune.rl.step_discount
    return [[sum(gamma ** (k - t) * own[k] for k in range(t, len(own))) for t in range(steps)] for own in rewards]


def advantage(own: float, members: Sequence[float], name: str) -> float:
    """Of one member's return among those of all members."""
    n, total = len(members), sum(members)
    if n == 1:
        return 0.0
    if name == "group_mean":
        return own - total / n
    if name == "group_std":
        return (own - total / n) / (stdev(members) + 1e-4)
    return own - (total - own) / (n - 1)


def members_of(group: RolloutGroup, cfg: Config) -> list[Member]:
    worth = returns_of(group, cfg)
    found: list[Member] = []
    for rollout, own in zip(group.rollouts, worth, strict=True):
        texts, cut = [], [sequence.finish_reason == "length" for sequence in rollout.sequences]
        for sequence, is_cut in zip(rollout.sequences, cut, strict=True):
            left_out = cfg.preprocess.overlong_filtering and (is_cut if rollout.rewards == "texts" else any(cut))
            step = 0 if rollout.rewards == "rollout" else sequence.turn
            here = own[step]
            assert here is not None
            compared = [other[step] for other in worth if other[step] is not None]
            positions = [p for start, end, _ in sequence.spans.tolist() for p in range(start, end)]
            versions = [version for start, end, version in sequence.spans.tolist() for _ in range(start, end)]
            adv = advantage(here, compared, cfg.finetune.rl.advantage)
            texts.append(Text(sequence, positions, versions, sequence.logprobs.tolist(), here, adv, not left_out))
        found.append(Member(rollout.rewards, rollout.reward, texts))
    return found


# ---- §4 and §5: optimizer batches and weights


def batches_of(groups: Sequence[RolloutGroup], cfg: Config, first_step: int) -> dict[int, list[Member]]:
    """Complete optimizer batches by step, with weights."""
    batches: dict[int, list[Member]] = defaultdict(list)
    step = first_step
    for group in groups:
        members = members_of(group, cfg)
        if cfg.preprocess.filter_zero_advantage_groups and all(
            abs(text.advantage) <= 1e-6 for member in members for text in member.texts
        ):
            continue
        sampled = [(copy.deepcopy(member), member.tokens) for member in members]
        for member in members:
            if not within_lag(member, step, cfg):
                continue
            peers = [tokens for peer, tokens in sampled if within_lag(copy.deepcopy(peer), step, cfg)]
            member.group_size, member.group_tokens = len(peers), sum(peers)
            batches[step].append(member)
            if len(batches[step]) == cfg.batch_size:
                set_weights(batches[step], cfg)
                step += 1
    batches.pop(step, None)
    return dict(batches)


def within_lag(member: Member, step: int, cfg: Config) -> bool:
    """Whether the member can be trained at the step. Masks too old tokens if the configuration says so."""
    if cfg.token_lag_bound is None:
        return True
    oldest = step - cfg.token_lag_bound
    if cfg.preprocess.lag_drop != "token":
        return all(version >= oldest for text in member.texts for version in text.versions)
    for text in member.texts:
        kept = [k for k, version in enumerate(text.versions) if version >= oldest]
        text.positions, text.versions, text.mu = (
            [values[k] for k in kept] for values in (text.positions, text.versions, text.mu)
        )
    member.texts = [text for text in member.texts if text.positions]
    return bool(member.texts)


def set_weights(batch: Sequence[Member], cfg: Config) -> None:
    """A rollout or text of weight 0 is a member of the batch and of its group, but no denominator counts its tokens."""
    rollouts, tokens = len(batch), sum(member.tokens for member in batch)
    groups = sum(1 / member.group_size for member in batch)
    for member in batch:
        denominator = {
            "sum_over_batch": rollouts,
            "sum_over_texts": sum(len(other.texts) for other in batch),
            "token_mean": tokens,
            "sample_mean": rollouts * member.tokens,
            "prompt_mean": groups * member.group_tokens,
        }[cfg.finetune.rl.aggregation]
        for text in member.texts:
            text.weight = 1 / denominator if text.weighs else 0.0
    if cfg.finetune.rl.advantage == "batch_std":
        scale_by_deviation(batch)


def scale_by_deviation(batch: Sequence[Member]) -> None:
    """One advantage per rollout, or per text where texts have rewards of their own."""
    counted = [text for member in batch for text in (member.texts[:1] if member.mode == "rollout" else member.texts)]
    deviation = stdev(text.advantage for text in counted)
    for member in batch:
        for text in member.texts:
            text.advantage = text.advantage / deviation if deviation else 0.0
