"""What the actor publishes: one whole group per record, or the reason why a group will never come.

Shapes: T tokens of a sequence, K ≤ T of them trained (sampled by the policy), R spans.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

from pipelinerl.records.order import DataOrder

PROBLEM_CHARS = 4096

RewardMode = Literal["rollout", "texts", "steps"]
"""What the rewards of a rollout's texts are (docs/algorithms.md §1): `rollout`, the same one for all; `texts`, each
text's own, compared at the same step; `steps`, increments, whose sum from a step on is compared."""


class TrainingSequence(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that one rollout trains on: a prompt, completions, and whatever came between them.

    ``spans`` says everything about training: a token is trained exactly if a span covers it, and the span's
    version is the weight version that sampled it.
    """

    token_ids: np.ndarray
    """int32 [T], as the server saw and sampled them."""
    logprobs: np.ndarray
    """float32 [K], natural log, after temperature; one per trained token, in order."""
    spans: np.ndarray
    """int32 [R, 3]: (start, end exclusive, weight version); ascending, disjoint, non-empty."""
    finish_reason: str
    """The server's word for the last completion: "stop", "length", "tool_calls", …"""
    turn: int = 0
    """Index of the first text of the rollout that this sequence contains."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one problem: ONE member of its group, however many sequences it has."""

    attempt: int
    """0 … attempts − 1 within the group."""
    reward: float
    """Reward of the whole rollout; with rewards of its own per text, the domain's metric of that name."""
    sequences: tuple[TrainingSequence, ...]
    metrics: dict[str, float]
    """Numeric fields of the domain's metrics: reward, success, no_error, no_answer and its own."""
    latency_s: float
    num_llm_calls: int
    sent_tokens: int = 0
    """Prompt tokens of all its calls together."""
    cached_tokens: int = 0
    """Those of them that the server found computed."""
    num_unmerged_turns: int = 0
    """Turns whose tokens did not extend the previous turn's and therefore started another sequence."""
    servers: tuple[str, ...] = ()
    """Job names of the servers that answered its group until it ended."""
    rewards: RewardMode = "rollout"
    """Reward mode (docs/algorithms.md §1); the same for all members of a group."""
    text_rewards: tuple[float, ...] = ()
    """`texts`, `steps`: reward of every text, trained or not, indexed by ``turn``; empty for `rollout`."""


class Dispatched(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatch of a problem, whatever became of it."""

    group_id: str
    """`<epoch>-<position>` for training, `test-<version>-<dataset>-<index>` for evaluation: unique in the run."""
    epoch: int
    position: int
    """Position in the seeded permutation of the epoch; (epoch, position) is the problem's place in the run."""
    problem_index: int
    """Index of the problem in the loader's list."""
    actor: int
    """Actor replica that made it."""
    domain: str
    dataset: str
    attempts: int
    """How many rollouts the group should have."""
    settled_before: int
    """Every dispatch number of this actor below this one is published or dropped (for restart)."""
    dispatch_index: int
    """Running number of the dispatch on this actor, across epochs."""
    epoch_size: int = 0
    """Problems that this actor takes in the epoch; 0 = not known."""


class RolloutGroup(Dispatched, frozen=True, kw_only=True, tag="group"):
    """All rollouts of one problem, published whole."""

    rollouts: tuple[Rollout, ...]
    """Fewer than ``attempts`` when members failed within the budget."""
    dispatched_version: int
    """Weight version live when the group was dispatched."""
    problem: str = ""
    """The problem as JSON, for people: cut after `PROBLEM_CHARS` characters."""


class GroupDropped(Dispatched, frozen=True, kw_only=True, tag="dropped"):
    """A dispatched problem that yields no group: the reason, so that nothing is lost without one."""

    reason: str
    """"transport", "timeout", "domain_error", "verifier", "too_long", "poisonous", …"""
    detail: str


class OrderResumed(msgspec.Struct, frozen=True, kw_only=True, tag="order_resumed"):
    """First record of an actor's new stream after `resume=checkpoint`: what is trained, and will not be made again."""

    step: int
    """Optimizer steps behind the checkpoint; the stream's first batch is for this step."""
    order: DataOrder
    published: int
    """Rollouts of this actor that are trained."""
    removed: dict[str, tuple[int, ...]] = {}
    """Problems that have left the pool, by domain."""
    removed_at: dict[str, dict[int, tuple[int, ...]]] = {}
    """Those that had left it when an epoch began, by domain and epoch, as far as that is known."""


ActorRecord = Annotated[RolloutGroup | GroupDropped | OrderResumed, msgspec.Meta(title="ActorRecord")]
