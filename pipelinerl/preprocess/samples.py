"""Turns a group into samples: each is a rollout with its advantages, or with the reason why it is dropped. Pure.

`sample_id` = `<group_id>/<attempt>`. Samples keep the order in which the actor published them. Filters and reward
shaping are those of docs/algorithms.md §5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pipelinerl.errors import RecordError
from pipelinerl.preprocess.advantages import group_advantages, step_returns, text_advantages
from pipelinerl.records import BatchUnit, Rollout, RolloutGroup, TrainingSequence
from pipelinerl.records.drops import DropReason
from pipelinerl.rollouts import check_named_rewards

ZERO_TOLERANCE = 1e-6
"""Advantages of equal rewards differ from 0 by rounding."""


def soft_overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's penalty (arXiv:2503.14476, eq. 13): 0 up to ``max_tokens − buffer_tokens``, then linear to −1.

    ``num_tokens`` is |y|, ``max_tokens`` is L_max, and ``buffer_tokens`` > 0 is L_buffer.
    """
    return float(np.clip((max_tokens - num_tokens) / buffer_tokens - 1.0, -1.0, 0.0))


def longest_completion(sequences: Sequence[TrainingSequence]) -> int:
    """Tokens of the longest completion. A completion is a run of adjacent spans, which may differ in version."""
    return max((_longest_run(sequence.spans) for sequence in sequences), default=0)


def _longest_run(spans_R3: np.ndarray) -> int:
    if not len(spans_R3):
        return 0
    starts, ends = spans_R3[:, 0], spans_R3[:, 1]
    first = np.concatenate(([True], starts[1:] != ends[:-1]))
    return int((ends[np.append(first[1:], True)] - starts[first]).max())


def cut_texts(rollout: Rollout) -> frozenset[int]:
    """The sequences that overlong filtering takes out of the loss: the server ended a completion for its length.

    Texts with rewards of their own count for themselves. Else one such completion takes out the whole rollout.
    """
    cut = [index for index, sequence in enumerate(rollout.sequences) if sequence.has_cut]
    return frozenset(cut if rollout.rewards == "texts" or not cut else range(len(rollout.sequences)))


def all_advantages_zero(advantages: np.ndarray) -> bool:
    """Whether a group gives no gradient: |A| ≤ 1e-6 for every member."""
    return bool((np.abs(advantages) <= ZERO_TOLERANCE).all())


Source = tuple[int, int]
"""Place of a sample in the run: (offset of its group in topic `actor`, index of the rollout in the group)."""

SCORES = ("ref_logprobs", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs", "teacher_versions")
"""Fields of a sample with other models' scores of its trained tokens."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)


class Peer(NamedTuple):
    """A rollout of a group that can be trained."""

    oldest_version: int
    newest_version: int
    num_counted: int
    """As `Sample.num_counted`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One rollout, prepared for a micro-batch. K trained tokens of a sequence."""

    sample_id: str
    group_id: str
    domain: str
    source: Source
    reward: float
    """The rollout's reward as the domain gave it. NaN in a refused group."""
    sequences: tuple[tuple[int, TrainingSequence], ...] = ()
    """(index in the rollout, sequence) of every sequence with trained tokens."""
    advantages: tuple[float, ...] = ()
    """One per entry of ``sequences``."""
    images: tuple[bytes, ...] = ()
    """The images that ``sequences`` show."""
    members: tuple[float, ...] = ()
    """The advantages without repetition: one per rollout, or one per sequence if each text has its own reward."""
    ref_logprobs: tuple[np.ndarray, ...] | None = None
    """float32 [K] per entry of ``sequences``. None without a KL term."""
    teacher_logprobs: tuple[np.ndarray, ...] | None = None
    """Likewise, of the teacher of the sample's domain. None without teachers."""
    teacher_top_ids: tuple[np.ndarray, ...] | None = None
    """int32 [K, J] per entry of ``sequences``: the teacher's most likely tokens. None: `teacher_top_k` is 0."""
    teacher_top_logprobs: tuple[np.ndarray, ...] | None = None
    """float32 [K, J]: their log-probabilities."""
    teacher_versions: tuple[np.ndarray, ...] | None = None
    """int32 [K]: the policy's version up to which the teacher was its average. None: the teacher is frozen."""
    token_weights: tuple[np.ndarray, ...] | None = None
    """float32 [K] per entry of ``sequences``: the weights of a conversation's tokens. None: it is a rollout."""
    unweighted: frozenset[int] = frozenset()
    """Indices in the rollout of the sequences whose weight in the loss is zero (overlong filtering)."""
    size: int = 1
    """What it counts in a batch: 1, or the rollout's texts, trained or not (`finetune.batch_unit`)."""
    num_tokens: int = 0
    num_trained: int = 0
    num_masked: int = 0
    """Sampled tokens that are not trained because they are too old (`preprocess.lag_drop=token`)."""
    group_size: int = 1
    """Rollouts of the group that can be trained, including this one."""
    group_tokens: int = 0
    """Trained tokens of those rollouts whose weight is not zero."""
    peers: tuple[Peer, ...] = ()
    """Those rollouts, of which some may be too old when a batch takes this one."""
    oldest_version: int = 0
    newest_version: int = 0
    drop_reason: DropReason | None = None
    group: RolloutGroup | None = None
    """The rollout's group, for the archive."""

    @property
    def num_counted(self) -> int:
        """Trained tokens whose weight in the loss is not zero."""
        return sum(len(sequence.logprobs) for index, sequence in self.sequences if index not in self.unweighted)

    @property
    def after(self) -> Source:
        """The place directly behind this sample."""
        return (self.source[0], self.source[1] + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shaping:
    """The part of the configuration that determines how a group becomes samples."""

    advantage: str = "loo"
    seq_length: int
    filter_zero_advantage_groups: bool = False
    overlong_filtering: bool = False
    overlong_buffer_tokens: int = 0
    advantage_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Named rewards and their weights (`finetune.rl.reward_weights`). Empty: the rollout's one reward."""
    step_discount: float = 1.0
    """Discount of returns per step (`finetune.rl.step_discount`)."""
    max_tokens: int = field(default=0)
    """`llm.parameters.max_tokens`. Only used with ``overlong_buffer_tokens``."""
    unit: BatchUnit = "rollouts"
    """What a batch counts."""


def prepare_group(offset: int, group: RolloutGroup, shaping: Shaping) -> list[Sample]:
    """Make the samples of a group that passed `records.check`.

    Args:
        offset: of the group in topic `actor`.
    Raises:
        RecordError: a reward or advantage is not finite in float32, a named reward is missing, or a first token is
            marked as trained.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        advantages = sequence_advantages(group.rollouts, shaping)
    _check_numbers(group, advantages)
    zero = shaping.filter_zero_advantage_groups and shaping.advantage != "value"
    drop_group = DropReason.ZERO_ADVANTAGE if zero and all_advantages_zero(np.concatenate(advantages)) else None
    return count_peers(
        [
            _prepare_rollout(group, rollout, (offset, i), member, drop_group, shaping)
            for i, (rollout, member) in enumerate(zip(group.rollouts, advantages, strict=True))
        ]
    )


def count_peers(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a whole group, each with those of them that can be trained as its peers."""
    peers = tuple(
        Peer(sample.oldest_version, sample.newest_version, sample.num_counted)
        for sample in samples
        if sample.drop_reason is None
    )
    return [with_peers(sample, peers) for sample in samples]


def with_peers(sample: Sample, peers: tuple[Peer, ...]) -> Sample:
    tokens = sum(peer.num_counted for peer in peers)
    return replace(sample, peers=peers, group_size=max(len(peers), 1), group_tokens=tokens)


def refused_group(offset: int, group: RolloutGroup, unit: BatchUnit = "rollouts") -> list[Sample]:
    """Make the samples, all dropped as malformed, of a group that `records.check` refuses.

    ``offset``: in topic `actor`.
    """
    return [
        Sample(
            sample_id=f"{group.group_id}/{rollout.attempt}",
            group_id=group.group_id,
            domain=group.domain,
            source=(offset, i),
            reward=float("nan"),
            size=rollout.size(unit),
            drop_reason=DropReason.MALFORMED,
            group=group,
        )
        for i, rollout in enumerate(group.rollouts)
    ]


def sequence_advantages(rollouts: Sequence[Rollout], shaping: Shaping) -> list[np.ndarray]:
    """Advantage of each sequence of each rollout of a group, from shaped rewards."""
    kind, kwargs = shaping.advantage, shaping.advantage_kwargs
    for rollout in rollouts:
        check_named_rewards(rollout.metrics, rollout.rewards, shaping.reward_weights)
    if rollouts[0].rewards == "rollout":
        advantages_n = _rollout_advantages(rollouts, shaping)
        return [np.full(len(r.sequences), a) for r, a in zip(rollouts, advantages_n, strict=True)]
    rewards = [_shaped_text_rewards(rollout, shaping) for rollout in rollouts]
    if rollouts[0].rewards == "steps":
        advantages = list(group_advantages(step_returns(rewards, shaping.step_discount), kind, kwargs))
    else:
        advantages = text_advantages(rewards, kind, kwargs)
    return [
        a[[s.turn for s in r.sequences]] if r.sequences else a[:0] for r, a in zip(rollouts, advantages, strict=True)
    ]


def _rollout_advantages(rollouts: Sequence[Rollout], shaping: Shaping) -> np.ndarray:
    """float64 [n]: of the one reward, or Σ weight · advantage of each named reward on its own."""
    kind, kwargs = shaping.advantage, shaping.advantage_kwargs
    if not shaping.reward_weights:
        rewards_n = np.array([r.reward + _penalty(r.sequences, shaping) for r in rollouts], np.float64)
        return group_advantages(rewards_n, kind, kwargs)
    advantages_n = np.zeros(len(rollouts))
    for name, weight in shaping.reward_weights.items():
        rewards_n = np.array([rollout.metrics[name] for rollout in rollouts], np.float64)
        advantages_n += weight * group_advantages(rewards_n, kind, kwargs)
    return advantages_n


def _penalty(sequences: Sequence[TrainingSequence], shaping: Shaping) -> float:
    if not shaping.overlong_buffer_tokens:
        return 0.0
    return soft_overlong_penalty(longest_completion(sequences), shaping.max_tokens, shaping.overlong_buffer_tokens)


def _shaped_text_rewards(rollout: Rollout, shaping: Shaping) -> np.ndarray:
    """Reward of every text, plus the length penalty of the text's own completion."""
    rewards = np.array(rollout.text_rewards, np.float64)
    for sequence in rollout.sequences:
        rewards[sequence.turn] += _penalty([sequence], shaping)
    return rewards


def _check_numbers(group: RolloutGroup, advantages: Sequence[np.ndarray]) -> None:
    """Check that rewards and advantages are finite in float32, and that no first token is trained."""
    for rollout, member in zip(group.rollouts, advantages, strict=True):
        for name, values in (("advantage", member), ("reward", np.array([rollout.reward]))):
            if not (np.abs(values) < MAX_FLOAT32).all():
                raise RecordError(
                    f"{group.group_id}/{rollout.attempt}: {name} {values.tolist()} is not finite in float32"
                )
        for i, sequence in enumerate(rollout.sequences):
            if len(sequence.spans) and sequence.spans[0, 0] < 1:
                raise RecordError(
                    f"{group.group_id}/{rollout.attempt}/{i}: its first token is marked as trained, "
                    "but nothing predicts it"
                )


def _prepare_rollout(
    group: RolloutGroup,
    rollout: Rollout,
    source: Source,
    advantages: np.ndarray,
    drop_reason: DropReason | None,
    shaping: Shaping,
) -> Sample:
    trained = [(i, sequence) for i, sequence in enumerate(rollout.sequences) if len(sequence.logprobs)]
    lengths = [len(sequence.token_ids) for _, sequence in trained]
    if not trained:
        drop_reason = DropReason.NO_TRAINED_TOKENS
    elif max(lengths) > shaping.seq_length:
        drop_reason = DropReason.TOO_LONG
    return Sample(
        sample_id=f"{group.group_id}/{rollout.attempt}",
        group_id=group.group_id,
        domain=group.domain,
        source=source,
        reward=rollout.reward,
        sequences=tuple(trained),
        images=rollout.images,
        advantages=(own := tuple(float(advantages[i]) for i, _ in trained)),
        members=own[:1] if rollout.rewards == "rollout" else own,
        unweighted=cut_texts(rollout) if shaping.overlong_filtering else frozenset(),
        size=rollout.size(shaping.unit),
        num_tokens=sum(lengths),
        num_trained=sum(len(sequence.logprobs) for _, sequence in trained),
        oldest_version=min((int(sequence.spans[:, 2].min()) for _, sequence in trained), default=0),
        newest_version=max((int(sequence.spans[:, 2].max()) for _, sequence in trained), default=0),
        drop_reason=drop_reason,
        group=group,
    )
