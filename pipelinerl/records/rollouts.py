"""The actor's records: one complete group per record, or the reason why there will be no group.

Shapes: T tokens of a sequence, K ≤ T of them trained (sampled by the policy), R spans.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

from pipelinerl.records.order import DataOrder, GroupOutcome

PROBLEM_CHARS = 4096
"""Longest problem in a record, which people read in tables and on pages."""

RewardMode = Literal["rollout", "texts", "steps"]
"""Rewards of a rollout's texts (docs/algorithms.md §1). `rollout`: one reward for all texts. `texts`: one per text,
compared between texts at the same step. `steps`: increments, whose sum from a step on is compared."""
BatchUnit = Literal["rollouts", "texts"]
"""What an optimizer batch counts: rollouts, or their training texts."""


class TrainingSequence(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that one rollout trains on: a prompt, completions, and the tokens between them.

    ``spans`` defines what is trained: a token is trained exactly if a span covers it. The span's version is the weight
    version that sampled the token.
    """

    token_ids: np.ndarray
    """int32 [T], as the server saw and sampled them."""
    logprobs: np.ndarray
    """float32 [K], natural log, after temperature, one per trained token in order."""
    spans: np.ndarray
    """int32 [R, 3]: (start, end exclusive, weight version), ascending, disjoint, non-empty."""
    finish_reason: str
    """The server's finish reason of the last completion: "stop", "length", "tool_calls", …"""
    turn: int = 0
    """Index of the rollout's first text in this sequence."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [T − 1, layers × experts per token]: the experts that the server chose (`finetune.router_replay`)
    for every token but the last. None: it did not say."""
    images: np.ndarray | None = None
    """int32 [I, 3]: (index in the rollout's ``images``, start, end exclusive) of the tokens that stand for each image,
    ascending, disjoint. None: there are none."""
    hinted_prompt: np.ndarray | None = None
    """int32 [H]: what a teacher that sees the problem's hint reads in the place of all tokens before the first trained
    one. None: no teacher does."""
    earlier_cut: bool = False
    """Whether the server ended a completion before the last one for its length."""

    @property
    def has_cut(self) -> bool:
        """Whether the server ended any of its completions for its length."""
        return self.earlier_cut or self.finish_reason == "length"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one problem. It is ONE member of its group, however many sequences it has."""

    attempt: int
    """0 … attempts − 1 within the group."""
    reward: float
    """Reward of the whole rollout. With rewards per text, the domain's `reward` metric."""
    sequences: tuple[TrainingSequence, ...]
    metrics: dict[str, float]
    """Numeric fields of the domain's metrics: reward, success, no_error, no_answer and the domain's own."""
    latency_s: float
    num_llm_calls: int
    sent_tokens: int = 0
    """Prompt tokens of all its LLM calls together."""
    cached_tokens: int = 0
    """Prompt tokens among them that came from the prefix cache."""
    num_unmerged_turns: int = 0
    """Turns that started another sequence, because their tokens did not extend the previous turn's."""
    servers: tuple[str, ...] = ()
    """Job names of the servers that had answered its group by the time it ended."""
    probes_missed: tuple[int, ...] = ()
    """For each of ``servers``: weight probes that it had missed before it answered, as far as its actor knew."""
    rewards: RewardMode = "rollout"
    """Reward mode (docs/algorithms.md §1), the same for all members of a group."""
    text_rewards: tuple[float, ...] = ()
    """`texts`, `steps`: reward of every text, trained or not, indexed by ``turn``. Empty for `rollout`."""
    images: tuple[bytes, ...] = ()
    """The images that its sequences show, each once, as encoded files (PNG, JPEG, …)."""
    num_forks: int = 0
    """LLM calls whose prompt left sampled tokens of their own conversation behind: an answer in it was edited, say."""
    num_compacted: int = 0
    """Such calls with a shorter prompt than before, because a harness compacted its history. They are no forks."""
    answers_from_journal: int = 0
    """LLM calls that were answered before a crash, and not sampled again (`actor.answer_journal`)."""
    diverged: bool = False
    """Whether it asked for something else after a crash than before, and so started anew."""

    @property
    def num_sampled(self) -> int:
        return sum(len(sequence.logprobs) for sequence in self.sequences)

    @property
    def versions(self) -> set[int]:
        """Weight versions that sampled it."""
        return {version for sequence in self.sequences for version in sequence.spans[:, 2].tolist()}

    def size(self, unit: BatchUnit) -> int:
        """What it counts in an optimizer batch: 1, or its training sequences."""
        return 1 if unit == "rollouts" else len(self.sequences)


class Dispatched(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatch of a problem, whatever its outcome."""

    group_id: str
    """`<epoch>-<position>` for training, `test-<version>-<dataset>-<index>` for evaluation: unique in the run."""
    epoch: int
    position: int
    """Position in the seeded permutation of the epoch, or in the round that `actor.sampler` drew. (epoch, position) is
    the problem's place in the run."""
    problem_index: int
    """Index of the problem in the loader's list."""
    actor: int
    """Actor replica that dispatched it."""
    domain: str
    dataset: str
    attempts: int
    """Number of rollouts that the group should have."""
    settled_before: int
    """Every dispatch of this actor with a lower number is published or dropped (for restart)."""
    dispatch_index: int
    """Running number of the dispatch on this actor, across epochs."""
    epoch_size: int = 0
    """Problems that this actor takes in the epoch. 0 = not known."""
    refused: dict[str, int] = {}
    """Server → rollouts of this dispatch that are not used, because the server missed the weight probe for them."""


class RolloutGroup(Dispatched, frozen=True, kw_only=True, tag="group"):
    """All rollouts of one problem, published as one record."""

    rollouts: tuple[Rollout, ...]
    """Fewer than ``attempts`` if some attempts failed within the budget."""
    dispatched_version: int
    """Weight version live when the group was dispatched."""
    problem: str = ""
    """The problem as JSON for people, cut after `PROBLEM_CHARS` characters."""


class GroupDropped(Dispatched, frozen=True, kw_only=True, tag="dropped"):
    """A dispatched problem that yields no group, with the reason. Every dispatch ends as a group or as this record."""

    reason: str
    """A `records.drops.DropReason`, or a word of an older version."""
    detail: str


class OrderResumed(msgspec.Struct, frozen=True, kw_only=True, tag="order_resumed"):
    """First record of an actor's new stream after `resume=checkpoint`: what is trained and will not be repeated."""

    step: int
    """Optimizer steps of the checkpoint. The stream's first batch is for this step."""
    order: DataOrder
    published: int
    """What the trained batches of this actor hold, in units of `finetune.batch_unit`."""
    removed: dict[str, tuple[int, ...]] = {}
    """Problems that have left the pool, by domain."""
    removed_at: dict[str, dict[int, tuple[int, ...]]] = {}
    """Problems that had left the pool when an epoch began, by domain and epoch, as far as known."""


ActorRecord = Annotated[RolloutGroup | GroupDropped | OrderResumed, msgspec.Meta(title="ActorRecord")]


def outcome_of(record: RolloutGroup | GroupDropped) -> GroupOutcome:
    """Returns how the policy did in a group. One with a reward that is no number counts as dropped."""
    rewards_n = np.array([rollout.reward for rollout in record.rollouts] if isinstance(record, RolloutGroup) else [])
    if not isinstance(record, RolloutGroup) or not len(rewards_n) or not np.isfinite(rewards_n).all():
        return GroupOutcome(problem_index=record.problem_index)
    successes_n = [rollout.metrics.get("success", 0.0) > 0 for rollout in record.rollouts]
    return GroupOutcome(
        problem_index=record.problem_index,
        success=float(np.mean(successes_n)),
        spread=float(np.abs(rewards_n - rewards_n.mean()).mean()),
        version=record.dispatched_version,
    )
