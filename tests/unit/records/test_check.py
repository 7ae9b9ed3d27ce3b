"""records.check: what may reach a gradient passes, everything else is refused with its identity."""

from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import RecordError
from pipelinerl.records import MicroBatch, Rollout, RolloutGroup, TrainingSequence
from pipelinerl.records.check import check_group, check_micro_batch
from tests.says import says

# Six tokens: prompt 10 11, completion 12 13 of version 3, one token of the environment, completion 15 of version 4.
SEQUENCE = TrainingSequence(
    token_ids=np.array([10, 11, 12, 13, 14, 15], np.int32),
    logprobs=np.array([-0.5, -1.0, -0.25], np.float32),
    spans=np.array([[2, 4, 3], [5, 6, 4]], np.int32),
    finish_reason="stop",
)
ROLLOUTS = tuple(
    Rollout(attempt=n, reward=float(n), sequences=(SEQUENCE,), metrics={"success": 1}, latency_s=0.1, num_llm_calls=2)
    for n in range(2)
)
GROUP = RolloutGroup(
    group_id="0-7",
    epoch=0,
    position=7,
    problem_index=3,
    actor=0,
    domain="guessing",
    dataset="train",
    attempts=2,
    rollouts=ROLLOUTS,
    dispatched_version=3,
    settled_before=0,
    dispatch_index=0,
)
# Two segments of 3 and 2 tokens; the last two tokens of the first and the last of the second are trained.
BATCH = MicroBatch(
    step=4,
    index=0,
    count=1,
    token_ids=np.array([1, 2, 3, 4, 5], np.int32),
    segment_lengths=np.array([3, 2], np.int32),
    segment_weights=np.array([0.5, 0.5], np.float32),
    spans=np.array([[1, 3, 2], [4, 5, 4]], np.int32),
    logprobs=np.array([0, -1, -2, 0, -3], np.float32),
    advantages=np.array([0, 1, 1, 0, -1], np.float32),
    ref_logprobs=None,
    num_samples=2,
    num_tokens=3,
    sequence_ids=("0-7/0/0", "0-7/1/0"),
    rewards=np.array([1, 0], np.float32),
    next_source=(1, 0),
)


def changed(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


def group_with(**fields: Any) -> RolloutGroup:
    """The group whose second rollout's sequence has other fields."""
    sequence = msgspec.structs.replace(SEQUENCE, **fields)
    second = msgspec.structs.replace(ROLLOUTS[1], sequences=(SEQUENCE, sequence))
    return msgspec.structs.replace(GROUP, rollouts=(ROLLOUTS[0], second))


def test_check_valid_group_and_micro_batch_pass():
    check_group(GROUP, vocab_size=16, attempts=2)
    check_group(msgspec.structs.replace(GROUP, rollouts=ROLLOUTS[1:]), vocab_size=16, attempts=2)
    check_micro_batch(BATCH, vocab_size=6)
    check_micro_batch(msgspec.structs.replace(BATCH, ref_logprobs=BATCH.logprobs), vocab_size=6)


def test_check_empty_micro_batch_without_spans_passes():
    empty = msgspec.structs.replace(BATCH, sentinel=True, spans=np.empty((0, 3), np.int32))
    check_micro_batch(empty, vocab_size=6)


def test_check_group_rollout_that_trains_nothing_is_no_reason_to_refuse_its_group():
    masked = msgspec.structs.replace(ROLLOUTS[0], sequences=())
    check_group(msgspec.structs.replace(GROUP, rollouts=(masked, ROLLOUTS[1])), vocab_size=16, attempts=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_id": ""}, says("'train'", "epoch 0", "position 7", "group_id")),
        ({"group_id": None}, says("position 7", "group_id")),
        ({"attempts": 3}, says("3 attempts", 2)),
        ({"rollouts": ()}, "has no rollouts"),
        ({"rollouts": (ROLLOUTS[1], ROLLOUTS[1])}, says("attempt 1", "twice")),
        ({"rollouts": (msgspec.structs.replace(ROLLOUTS[0], attempt=2),)}, says("attempt 2", "0 to 1")),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], reward=float("nan")),)},
            says("attempt 0", "reward", "nan"),
        ),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], reward=float("inf")),)},
            says("attempt 0", "reward", "inf"),
        ),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], reward=-1e300),)},
            says("attempt 0", "reward", "-1e+300", "±1e+15"),
        ),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], reward=10**400),)},
            says("attempt 0", "reward"),
        ),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], rewards="steps", text_rewards=(1.0, 2e15)),)},
            says("attempt 0", "text 1", "2000000000000000.0"),
        ),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], rewards="steps", text_rewards=(1.0, float("nan"))),)},
            says("attempt 0", "text 1", "nan"),
        ),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], rewards="steps"),)},
            says("text 0", "rewards='steps'", "0 text rewards"),
        ),
        (
            {"rollouts": (msgspec.structs.replace(ROLLOUTS[0], metrics={"note": "high"}),)},
            says("attempt 0", "'note'", "'high'", "number"),
        ),
    ],
)
def test_check_group_with_a_bad_member_is_refused_with_its_identity(fields: dict[str, Any], message: str):
    with pytest.raises(RecordError, match=message) as refusal:
        check_group(msgspec.structs.replace(GROUP, **fields), vocab_size=16, attempts=2)
    assert "group_id" in str(refusal.value) or "group 0-7" in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"token_ids": changed(SEQUENCE.token_ids, 4, 16)},
            says("token id 16", "position 4"),
        ),
        ({"token_ids": changed(SEQUENCE.token_ids, 0, -1)}, says("token id -1", "position 0", "vocabulary")),
        ({"token_ids": np.empty(0, np.int32)}, "has no tokens"),
        ({"token_ids": np.zeros((2, 3), np.int32)}, r"token_ids is int32 \(2, 3\)"),
        ({"token_ids": np.zeros(6, np.float32)}, "token_ids is float32"),
        ({"logprobs": SEQUENCE.logprobs[:2]}, says("2 log-probs", "3 trained tokens")),
        ({"logprobs": np.append(SEQUENCE.logprobs, np.float32(0))}, says("4 log-probs", "3 trained tokens")),
        ({"logprobs": changed(SEQUENCE.logprobs, 1, np.nan)}, says("log-prob", "token 1", "nan")),
        ({"logprobs": changed(SEQUENCE.logprobs, 2, -np.inf)}, says("log-prob", "token 2", "-inf")),
        ({"logprobs": changed(SEQUENCE.logprobs, 2, -3e38)}, says("log-prob", "token 2", "-3")),
        (
            {"logprobs": changed(SEQUENCE.logprobs, 2, 0.25)},
            says("log-prob", "token 2", "token id 15", "position 5", "0.25", "unnamed server"),
        ),
        ({"logprobs": changed(SEQUENCE.logprobs, 0, 2e-6)}, says("token 0", "token id 12", "position 2", "2e-06")),
        ({"logprobs": [-0.5, -1.0, -0.25]}, says("logprobs", "list")),
        ({"spans": np.array([[5, 6, 4], [2, 4, 3]], np.int32)}, says("(2, 4, version 3)", "position 6")),
        ({"spans": np.array([[2, 4, 3], [3, 4, 4]], np.int32)}, says("(3, 4, version 4)", "position 4")),
        ({"spans": np.array([[2, 4, 3], [6, 7, 4]], np.int32)}, says("(6, 7, version 4)", "6 tokens")),
        ({"spans": np.array([[-1, 2, 3]], np.int32)}, r"span \(-1, 2"),
        ({"spans": np.array([[2, 2, 3]], np.int32)}, r"span \(2, 2"),
        ({"spans": np.array([[2, 5, -3]], np.int32)}, "version -3"),
        ({"spans": np.array([2, 5, 3], np.int32)}, r"spans is int32 \(3,\)"),
    ],
)
def test_check_group_with_a_bad_sequence_is_refused_with_its_identity(fields: dict[str, Any], message: str):
    with pytest.raises(RecordError, match=f"^group 0-7, attempt 1, sequence 1: .*{message}"):
        check_group(group_with(**fields), vocab_size=16, attempts=2)


def test_positive_log_probability_is_refused_by_its_servers_name():
    sequence = msgspec.structs.replace(SEQUENCE, logprobs=changed(SEQUENCE.logprobs, 1, 1e-3))
    rollout = msgspec.structs.replace(ROLLOUTS[1], sequences=(sequence,), servers=("actor_llm_3", "actor_llm_5"))
    message = (
        r"^group 0-7, attempt 1, sequence 0: .*token 1 \(token id 13.* 0.001, sampled by actor_llm_3 or actor_llm_5"
    )
    with pytest.raises(RecordError, match=message):
        check_group(msgspec.structs.replace(GROUP, rollouts=(ROLLOUTS[0], rollout)), vocab_size=16, attempts=2)


@pytest.mark.parametrize("logprob", [1.5e-6, -1.5e15])
def test_log_probability_beyond_rounding_and_beyond_any_number_is_refused(logprob: float) -> None:
    with pytest.raises(RecordError, match="the log-prob of trained token 1"):
        check_group(group_with(logprobs=np.array([-1.0, logprob, -1.0], np.float32)), vocab_size=16, attempts=2)


def test_certain_token_and_rounding_are_log_probabilities():
    check_group(group_with(logprobs=np.array([0.0, 5e-7, -0.0], np.float32)), vocab_size=16, attempts=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index": 1}, "there are 1 in the step"),
        (
            {"token_ids": changed(BATCH.token_ids, 3, 6)},
            says("0-7/1/0", "token id 6", "position 3"),
        ),
        ({"logprobs": changed(BATCH.logprobs, 2, np.nan)}, says("0-7/0/0", "logprobs", "nan", "position 2")),
        ({"logprobs": changed(BATCH.logprobs, 4, 0.5)}, says("0-7/1/0", "logprobs", "0.5", "position 4", "token id 5")),
        ({"advantages": changed(BATCH.advantages, 4, np.inf)}, says("0-7/1/0", "advantages", "inf", "position 4")),
        ({"ref_logprobs": changed(BATCH.logprobs, 0, np.nan)}, says("0-7/0/0", "ref_logprobs", "nan", "position 0")),
        ({"rewards": changed(BATCH.rewards, 1, np.nan)}, says("0-7/1/0", "rewards", "nan")),
        ({"segment_weights": changed(BATCH.segment_weights, 0, np.inf)}, says("0-7/0/0", "segment_weights", "inf")),
        ({"logprobs": BATCH.logprobs[:4]}, r"logprobs is float32 \(4,\)"),
        ({"advantages": BATCH.advantages[:4]}, r"advantages is float32 \(4,\)"),
        ({"ref_logprobs": BATCH.logprobs[:4]}, r"ref_logprobs is float32 \(4,\)"),
        ({"sequence_ids": ("0-7/0/0",)}, "segment_lengths is int32"),
        ({"segment_lengths": np.array([3, 1], np.int32)}, says("number of tokens", 5)),
        ({"segment_lengths": np.array([5, 0], np.int32)}, "segment_lengths are positive"),
        ({"spans": np.array([[1, 4, 2]], np.int32)}, says("0-7/0/0", "span (1, 4)", "segment")),
        ({"spans": np.array([[4, 5, 5]], np.int32)}, says("0-7/1/0", "version 5")),
        ({"spans": np.array([[4, 6, 3]], np.int32)}, r"span \(4, 6, version 3\)"),
        ({"sentinel": True}, says("empty", "3 tokens")),
        ({"num_tokens": 2}, says("3 tokens", 2)),
    ],
)
def test_check_bad_micro_batch_is_refused_with_its_identity(fields: dict[str, Any], message: str):
    with pytest.raises(RecordError, match=f"^micro-batch [01] of step 4.*{message}"):
        check_micro_batch(msgspec.structs.replace(BATCH, **fields), vocab_size=6)


IMAGES = [
    ([[1, 0, 1]], "of 1 images"),
    ([[-1, 0, 1]], "of 1 images"),
    ([[0, 1, 9]], "in [56] tokens"),
    ([[0, 1, 2], [0, 0, 1]], "ascending"),
    ([[0, 1]], "array of shape"),
]


@pytest.mark.parametrize(("rows", "message"), IMAGES)
def test_image_outside_the_tokens_or_the_files_is_refused(rows: list[list[int]], message: str) -> None:
    spans = np.array(rows, np.int32)
    sequence = msgspec.structs.replace(SEQUENCE, images=spans)
    rollout = msgspec.structs.replace(ROLLOUTS[0], images=(b"a",), sequences=(sequence,))
    group = msgspec.structs.replace(GROUP, rollouts=(rollout, ROLLOUTS[1]))
    with pytest.raises(RecordError, match=f"attempt 0, sequence 0.*{message}"):
        check_group(group, vocab_size=100, attempts=2)
    with pytest.raises(RecordError, match=f"micro-batch 0 of step 4.*{message}"):
        check_micro_batch(msgspec.structs.replace(BATCH, images=(b"a",), image_spans=spans), vocab_size=100)


def test_image_within_the_tokens_passes() -> None:
    spans = np.array([[0, 0, 1]], np.int32)
    check_micro_batch(msgspec.structs.replace(BATCH, images=(b"a",), image_spans=spans), vocab_size=100)
