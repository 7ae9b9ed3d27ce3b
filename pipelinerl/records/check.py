"""The only module that refuses records which must not reach a gradient.

The preprocessor checks every group before it makes samples from it, the trainer every micro-batch before it trains on
it. A record that passes has the shapes that its class documents, token ids inside the vocabulary, exactly one finite
log-probability per trained token, none of the sampler's above 0, finite rewards and advantages, and distinct members.
Anything else raises a ``RecordError`` that names the group, attempt and sequence, or the micro-batch and sample.
The checks are cheap enough for every record: a few numpy reductions per array, no copies.
"""

import numbers
from typing import Any

import numpy as np

from pipelinerl.errors import RecordError
from pipelinerl.records.batches import MicroBatch
from pipelinerl.records.rollouts import Rollout, RolloutGroup, TrainingSequence

TOKEN_FLOATS = ("logprobs", "advantages", "ref_logprobs", "teacher_logprobs")
"""Columns of a micro-batch with a float for every token. The scores of other models may be missing."""
LARGEST_LOGPROB = 1e-6
"""A larger log-probability than rounding explains is none: something else was sent in its place."""
LARGEST_NUMBER = 1e15
"""Size of a reward, a metric or a log-probability beyond which it is refused as NaN is. Squares and sums are taken
behind the check, also in float32, which ends at 3e38: a hundred million squares of this fit."""


def check_group(group: RolloutGroup, *, vocab_size: int, attempts: int) -> None:
    """Raises ``RecordError`` if the group must not be trained.

    Args:
        vocab_size: token ids must be below it.
        attempts: rollouts of a complete group. Fewer are accepted, because the actor has a budget for failures.
    """
    if not isinstance(group.group_id, str) or not group.group_id:
        raise RecordError(
            f"a group of dataset {group.dataset!r} at epoch {group.epoch}, position {group.position} has no group_id"
        )
    where = f"group {group.group_id}"
    if group.attempts != attempts:
        raise RecordError(f"{where}: made for {group.attempts} attempts, but this run has {attempts}")
    if not group.rollouts:
        raise RecordError(f"{where}: has no rollouts")
    seen: set[int] = set()
    for rollout in group.rollouts:
        if rollout.attempt in seen:
            raise RecordError(f"{where}: attempt {rollout.attempt} is in it twice")
        if not 0 <= rollout.attempt < attempts:
            raise RecordError(f"{where}: attempt {rollout.attempt} is outside 0 to {attempts - 1}")
        seen.add(rollout.attempt)
        _check_rollout(rollout, f"{where}, attempt {rollout.attempt}", vocab_size)
    _check_one_mode(group, where)


def check_micro_batch(batch: MicroBatch, *, vocab_size: int) -> None:
    """Raises ``RecordError`` if the micro-batch must not be trained. Token ids must be below ``vocab_size``."""
    where = f"micro-batch {batch.index} of step {batch.step}"
    if not (batch.step >= 0 and 0 <= batch.index < batch.count):
        raise RecordError(f"{where}: there are {batch.count} in the step, counted from 0")
    num_tokens, num_segments = len(batch.token_ids), len(batch.sequence_ids)
    _check_shape(batch.token_ids, "token_ids", "i", (num_tokens,), where)
    _check_shape(batch.segment_lengths, "segment_lengths", "i", (num_segments,), where)
    _check_shape(batch.spans, "spans", "i", (len(batch.spans), 3), where)
    for name in TOKEN_FLOATS:
        if getattr(batch, name) is not None or name in ("logprobs", "advantages"):
            _check_shape(getattr(batch, name), name, "f", (num_tokens,), where)
    for name in ("cut", "supervised"):
        if getattr(batch, name) is not None:
            _check_shape(getattr(batch, name), name, "b", (num_segments,), where)
    for name in ("segment_weights", "rewards"):
        _check_shape(getattr(batch, name), name, "f", (num_segments,), where)
    if batch.teacher_versions is not None:
        _check_shape(batch.teacher_versions, "teacher_versions", "i", (num_tokens,), where)
    _check_routing(batch.routed_experts, num_tokens, where)
    _check_top(batch, vocab_size, where)
    ends = np.cumsum(batch.segment_lengths)
    if (batch.segment_lengths < 1).any() or (ends[-1] if num_segments else 0) != num_tokens:
        raise RecordError(
            f"{where}: segment_lengths are positive and add up to the number of tokens, {num_tokens}; "
            f"they are {batch.segment_lengths.tolist()}"
        )
    _check_values(batch, ends, vocab_size, where)
    _check_batch_spans(batch, ends, where)
    _check_images(batch.image_spans, len(batch.images), num_tokens, where)


def _check_rollout(rollout: Rollout, where: str, vocab_size: int) -> None:
    _check_finite_number(rollout.reward, "reward", where)
    for name, value in rollout.metrics.items():
        if not isinstance(value, numbers.Real):
            raise RecordError(f"{where}: metric {name!r} is {value!r}, not a number")
    for turn, reward in enumerate(rollout.text_rewards):
        _check_finite_number(reward, f"reward of text {turn}", where)
    for index, sequence in enumerate(rollout.sequences):
        _check_sequence(sequence, f"{where}, sequence {index}", vocab_size, rollout.servers)
        _check_images(sequence.images, len(rollout.images), len(sequence.token_ids), f"{where}, sequence {index}")
        if rollout.rewards != "rollout" and not 0 <= sequence.turn < len(rollout.text_rewards):
            raise RecordError(
                f"{where}, sequence {index}: begins with text {sequence.turn}, but rewards={rollout.rewards!r} has "
                f"{len(rollout.text_rewards)} text rewards"
            )


def _check_one_mode(group: RolloutGroup, where: str) -> None:
    """Checks that all members have one reward mode. A baseline over different kinds of rewards has no meaning."""
    first = group.rollouts[0]
    for other in group.rollouts[1:]:
        if other.rewards != first.rewards:
            raise RecordError(
                f"{where}: attempt {first.attempt} has rewards={first.rewards!r} and attempt {other.attempt} "
                f"{other.rewards!r}: the rollouts of a problem must have one reward mode; set `rewards` of every "
                "RolloutResult alike, or actor.rewards"
            )


def _check_sequence(sequence: TrainingSequence, where: str, vocab_size: int, servers: tuple[str, ...]) -> None:
    num_tokens = len(sequence.token_ids)
    _check_shape(sequence.token_ids, "token_ids", "i", (num_tokens,), where)
    _check_shape(sequence.logprobs, "logprobs", "f", (len(sequence.logprobs),), where)
    _check_shape(sequence.spans, "spans", "i", (len(sequence.spans), 3), where)
    if num_tokens == 0:
        raise RecordError(f"{where}: has no tokens")
    if sequence.token_ids.min() < 0 or sequence.token_ids.max() >= vocab_size:
        bad = _first((sequence.token_ids < 0) | (sequence.token_ids >= vocab_size))
        raise RecordError(f"{where}: {_outside_vocabulary(sequence.token_ids, bad, vocab_size)}")
    num_trained = _count_trained(sequence.spans, num_tokens, where)
    _check_routing(sequence.routed_experts, num_tokens - 1, where)
    hinted = sequence.hinted_prompt
    if hinted is not None:
        _check_shape(hinted, "hinted_prompt", "i", (len(hinted),), where)
        if not len(hinted) or hinted.min() < 0 or hinted.max() >= vocab_size:
            raise RecordError(f"{where}: hinted_prompt is empty or has an id outside the vocabulary of {vocab_size}")
    if len(sequence.logprobs) != num_trained:
        raise RecordError(f"{where}: {len(sequence.logprobs)} log-probs for {num_trained} trained tokens")
    if not (np.abs(sequence.logprobs) <= LARGEST_NUMBER).all():
        bad = _first(~(np.abs(sequence.logprobs) <= LARGEST_NUMBER))
        raise RecordError(f"{where}: the log-prob of trained token {bad} is {sequence.logprobs[bad]}")
    if num_trained and sequence.logprobs.max() > LARGEST_LOGPROB:
        bad = _first(sequence.logprobs > LARGEST_LOGPROB)
        position = _trained_positions(sequence.spans)[bad]
        raise RecordError(
            f"{where}: the log-prob of trained token {bad} (token id {sequence.token_ids[position]} at position "
            f"{position}) is {sequence.logprobs[bad]:.6g}, sampled by {' or '.join(servers) or 'an unnamed server'}: "
            "that is no log-probability, which is at most 0"
        )


def _count_trained(spans: np.ndarray, num_tokens: int, where: str) -> int:
    """Counts the tokens in the spans, which must be ascending, disjoint, non-empty and within the sequence."""
    num_trained, previous_end = 0, 0
    for start, end, version in spans.tolist():
        if not previous_end <= start < end <= num_tokens or version < 0:
            raise RecordError(
                f"{where}: span ({start}, {end}, version {version}) after position {previous_end} in {num_tokens} "
                "tokens: spans are ascending, disjoint, not empty, within the tokens, and versions are not negative"
            )
        num_trained += end - start
        previous_end = end
    return num_trained


def _trained_positions(spans: np.ndarray) -> list[int]:
    return [position for start, end, _ in spans.tolist() for position in range(start, end)]


def _check_values(batch: MicroBatch, ends: np.ndarray, vocab_size: int, where: str) -> None:
    """Checks token ids, that every number is finite, and that no log-probability of the sampler is above 0."""

    def sample(position: int) -> str:
        return batch.sequence_ids[int(np.searchsorted(ends, position, side="right"))]

    if len(batch.token_ids) and (batch.token_ids.min() < 0 or batch.token_ids.max() >= vocab_size):
        bad = _first((batch.token_ids < 0) | (batch.token_ids >= vocab_size))
        raise RecordError(f"{where}, {sample(bad)}: {_outside_vocabulary(batch.token_ids, bad, vocab_size)}")
    for name in TOKEN_FLOATS:
        values = getattr(batch, name)
        if values is not None and not np.isfinite(values).all():
            bad = _first(~np.isfinite(values))
            raise RecordError(f"{where}, {sample(bad)}: {name} is {values[bad]} at position {bad}")
    if len(batch.logprobs) and batch.logprobs.max() > LARGEST_LOGPROB:
        bad = _first(batch.logprobs > LARGEST_LOGPROB)
        raise RecordError(
            f"{where}, {sample(bad)}: logprobs is {batch.logprobs[bad]:.6g} at position {bad} (token id "
            f"{batch.token_ids[bad]}): the sampler's log-probability is at most 0"
        )
    for name in ("segment_weights", "rewards"):
        values = getattr(batch, name)
        if not np.isfinite(values).all():
            bad = _first(~np.isfinite(values))
            raise RecordError(f"{where}, {batch.sequence_ids[bad]}: {name} is {values[bad]}")


def _check_top(batch: MicroBatch, vocab_size: int, where: str) -> None:
    """Checks that a teacher's most likely tokens are tokens, and that each has a finite log-probability."""
    ids, logprobs = batch.teacher_top_ids, batch.teacher_top_logprobs
    if ids is None and logprobs is None:
        return
    if ids is None or logprobs is None:
        raise RecordError(f"{where}: teacher_top_ids and teacher_top_logprobs come together")
    num_trained = int((batch.spans[:, 1] - batch.spans[:, 0]).sum())
    shape = (num_trained, ids.shape[-1] if ids.ndim else 0)
    _check_shape(ids, "teacher_top_ids", "i", shape, where)
    _check_shape(logprobs, "teacher_top_logprobs", "f", shape, where)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise RecordError(f"{where}: teacher_top_ids has an id outside the vocabulary of {vocab_size}")
    if not np.isfinite(logprobs).all():
        raise RecordError(f"{where}: a value of teacher_top_logprobs is not finite")


def _check_batch_spans(batch: MicroBatch, ends: np.ndarray, where: str) -> None:
    """Checks that spans are ordered, inside one segment, of no version later than ``step``. An empty batch has none."""
    num_trained = _count_trained(batch.spans, len(batch.token_ids), where)
    if batch.sentinel and num_trained:
        raise RecordError(f"{where}: an empty micro-batch trains nothing, but {num_trained} tokens are in spans")
    if num_trained > batch.num_tokens:
        raise RecordError(f"{where}: trains {num_trained} tokens, but the whole step has {batch.num_tokens}")
    starts, span_ends, versions = batch.spans[:, 0], batch.spans[:, 1], batch.spans[:, 2]
    segments = np.searchsorted(ends, starts, side="right")
    crossing = segments != np.searchsorted(ends, span_ends - 1, side="right")
    if crossing.any():
        bad = _first(crossing)
        name = batch.sequence_ids[segments[bad]]
        raise RecordError(f"{where}, {name}: span ({starts[bad]}, {span_ends[bad]}) goes beyond its segment")
    if (versions > batch.step).any():
        bad = _first(versions > batch.step)
        name = batch.sequence_ids[segments[bad]]
        raise RecordError(
            f"{where}, {name}: tokens of version {versions[bad]} cannot exist before step {versions[bad]}"
        )


def _check_shape(array: Any, name: str, kind: str, shape: tuple[int, ...], where: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind != kind or array.shape != shape:
        wanted = {"i": "an integer", "f": "a float", "b": "a boolean"}[kind]
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise RecordError(f"{where}: {name} is {found}; it must be {wanted} array of shape {shape}")


def _check_routing(routed: np.ndarray | None, num_tokens: int, where: str) -> None:
    if routed is not None and (routed.dtype.kind not in "iu" or routed.ndim != 2 or len(routed) != num_tokens):
        raise RecordError(
            f"{where}: routed_experts is {routed.dtype} {routed.shape}; it must be an integer array with {num_tokens} "
            "rows"
        )


def _check_images(spans: np.ndarray | None, count: int, num_tokens: int, where: str) -> None:
    """Checks that spans name one of ``count`` images each, ascend, and lie within the tokens."""
    if spans is None:
        return
    _check_shape(spans, "images", "i", (len(spans), 3), where)
    edges = [0, *spans[:, 1:].ravel().tolist(), num_tokens]
    if edges != sorted(edges) or (spans[:, 0] < 0).any() or (spans[:, 0] >= count).any():
        raise RecordError(
            f"{where}: the tokens of its images are {spans.tolist()}: they must be (index of {count} images, start, "
            f"end), ascending, in {num_tokens} tokens"
        )


def _check_finite_number(value: Any, name: str, where: str) -> None:
    is_number = isinstance(value, numbers.Real)
    if not (is_number and abs(value) <= LARGEST_NUMBER):
        raise RecordError(f"{where}: {name} is {value!r}; it must be a number within ±{LARGEST_NUMBER:g}")


def _outside_vocabulary(token_ids: np.ndarray, position: int, vocab_size: int) -> str:
    return f"token id {token_ids[position]} at position {position} is outside the vocabulary of {vocab_size}"


def _first(mask: np.ndarray) -> int:
    return int(np.argmax(mask))
