"""The preprocessor's records: packed micro-batches, each for one trainer rank and one optimizer step.

Shapes: T tokens, K of them trained, S segments (documents that must not attend to each other), R spans, N samples.
"""

import msgspec
import numpy as np

from pipelinerl.records.order import DataOrder

NOT_ROUTED = -1
"""In place of an expert: the server has not said which one it chose."""
FROZEN = -1
"""In place of a version: nothing scored the token, or a teacher whose weights stay."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One forward-backward pass of one rank.

    ``step`` is the optimizer step that trains it, counted from 0. It is also the version of the weights before that
    step, so the lag of a token is ``step - version`` and is known when the batch is packed.
    The loss of the optimizer batch sums ``segment_weights[segment(t)] * loss_t`` over the trained tokens of all its
    micro-batches and ranks. Packing therefore cannot change the gradient (docs/algorithms.md §4).
    """

    step: int
    index: int
    """0 … count − 1: place within this rank's micro-batches of the step. Every rank has the same count."""
    count: int
    token_ids: np.ndarray
    """int32 [T]"""
    segment_lengths: np.ndarray
    """int32 [S], sum = T. Position ids restart at each segment."""
    segment_weights: np.ndarray
    """float32 [S]: weight of each trained token of the segment in the optimizer batch's loss."""
    spans: np.ndarray
    """int32 [R, 3]: (start, end exclusive, weight version) of trained tokens, in positions of this micro-batch."""
    logprobs: np.ndarray
    """float32 [T]: the sampler's log-probabilities, 0 for tokens outside all spans."""
    advantages: np.ndarray
    """float32 [T]: advantage of trained tokens, 0 elsewhere. Holds rewards if the advantage is `value`, and the weights
    of the tokens in segments that are imitated."""
    ref_logprobs: np.ndarray | None
    """float32 [T]: the reference model's log-probabilities. None without a KL term."""
    num_samples: int
    """Rollouts of the whole optimizer batch, over all ranks."""
    num_tokens: int
    """Trained tokens of the whole optimizer batch, over all ranks."""
    sequence_ids: tuple[str, ...]
    """[S]: `<group_id>/<attempt>/<sequence>` of each segment, for the ledger and error messages."""
    rewards: np.ndarray
    """float32 [S]: reward of each segment's rollout (metrics)."""
    cut: np.ndarray | None = None
    """bool [S]: whether the server cut the segment's last answer for its length. None: the advantage is not `value`."""
    teacher_logprobs: np.ndarray | None = None
    """float32 [T]: the log-probabilities of the teacher of the rollout's domain. None: there is none."""
    teacher_top_ids: np.ndarray | None = None
    """int32 [K, J]: the J tokens that the teacher finds most likely in the place of each trained token, in the order of
    the spans. None: `finetune.rl.teacher_top_k` is 0."""
    teacher_top_logprobs: np.ndarray | None = None
    """float32 [K, J]: their log-probabilities."""
    teacher_versions: np.ndarray | None = None
    """int32 [T]: the policy's version up to which the teacher that scored the token was an average of it, or `FROZEN`.
    None: no teacher is one."""
    next_source: tuple[int, int]
    """(offset in topic `actor`, rollout index in that group) where the NEXT optimizer batch begins (restart)."""
    order: DataOrder | None = None
    """Only in the first micro-batch of a step: the problems that are resolved once the step is trained."""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers × experts per token]: the experts that the server chose (`finetune.router_replay`). `NOT_ROUTED`
    where it did not say. None: no token has any."""
    images: tuple[bytes, ...] = ()
    """The images that its segments show, each once, as encoded files."""
    image_spans: np.ndarray | None = None
    """int32 [I, 3]: (index in ``images``, start, end exclusive) of the tokens that stand for each image, ascending, in
    positions of this micro-batch. None: there are none."""
    supervised: np.ndarray | None = None
    """bool [S]: whether the segment is a conversation to imitate. None: all of them are rollouts. Conversations that
    weigh nothing are held out."""
    sentinel: bool = False
    """True for an empty micro-batch, sent only when a rank would otherwise have fewer than the others."""

    @property
    def is_held_out(self) -> bool:
        """Whether it is not trained: the loss of held-out conversations (`sft.test_datasets`) is computed on it."""
        return self.supervised is not None and bool(self.supervised.all()) and not self.segment_weights.any()
