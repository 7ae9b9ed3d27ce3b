"""From what a domain returns to what is trained: spans, masks, rewards, merging. Expected values by hand."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.actor.sequences import SequenceTooLong, spans_of, to_rollout
from pipelinerl.errors import RecordError
from pipelinerl.records import Rollout
from pipelinerl.rollouts import BaseMetrics, CallTokens, RewardMode, RolloutResult, TrainingText
from tests.says import says


def text(prompt: list[int], sampled: list[int], *, versions: list[int] | None = None, reward: float | None = None,
         finish_reason: str = "stop") -> TrainingText:  # fmt: skip
    versions = versions if versions is not None else [3] * len(sampled)
    spans = [(i, i + 1, version) for i, version in enumerate(versions)]
    made = (
        TrainingText(text="t", n_predicted=1)
        if reward is None
        else TrainingText(text="t", n_predicted=1, reward=reward)
    )
    made.attach(
        CallTokens(
            prompt_ids=np.array(prompt, np.int32),
            completion_ids=np.array(sampled, np.int32),
            logprobs=-np.array(sampled, np.float32) / 10,
            version_spans=np.array(spans, np.int32).reshape(-1, 3),
            finish_reason=finish_reason,
        )
    )
    return made


def rollout(
    *texts: TrainingText,
    reward: float = 1.0,
    seq_length: int = 100,
    mode: RewardMode | None = None,
    **metrics: float,
) -> Rollout:
    class Metrics(BaseMetrics):
        extra: float = 2.5
        label: str = "ignored"

    result = RolloutResult(
        training_texts=list(texts),
        metrics=Metrics(reward=reward, success=True, no_error=True, no_answer=False, **metrics),
        latency=0.5,
        rewards=mode,
    )
    return to_rollout(
        result, attempt=4, latency_s=1.5, num_llm_calls=len(texts), fallback_version=2, seq_length=seq_length
    )


def test_one_turn_trains_exactly_the_sampled_tokens() -> None:
    made = rollout(text([1, 2], [3, 4, 5], versions=[7, 7, 8], reward=0.5))
    (sequence,) = made.sequences
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sequence.spans.tolist() == [[2, 4, 7], [4, 5, 8]]
    assert sequence.logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.5])
    assert (made.reward, made.text_rewards, made.attempt, made.num_unmerged_turns) == (0.5, (), 4, 0)
    assert made.metrics == {"reward": 1.0, "success": 1.0, "no_error": 1.0, "no_answer": 0.0, "extra": 2.5}
    assert (sequence.token_ids.dtype, sequence.logprobs.dtype, sequence.spans.dtype) == (np.int32, np.float32, np.int32)


def test_turns_that_extend_become_one_sequence() -> None:
    made = rollout(text([1], [2, 3]), text([1, 2, 3, 9], [4]), text([1, 2, 3, 9, 4, 8, 8], [5], finish_reason="length"))
    (sequence,) = made.sequences
    assert sequence.token_ids.tolist() == [1, 2, 3, 9, 4, 8, 8, 5]
    assert sequence.spans.tolist() == [[1, 3, 3], [4, 5, 3], [7, 8, 3]]
    assert sequence.logprobs.tolist() == pytest.approx([-0.2, -0.3, -0.4, -0.5])
    assert (sequence.finish_reason, sequence.turn, made.num_unmerged_turns) == ("length", 0, 0)


def test_turn_that_does_not_extend_starts_another_sequence() -> None:
    made = rollout(text([1], [2, 3]), text([1, 2, 7], [4]), text([1, 2, 7, 4, 6], [5]))
    assert [sequence.token_ids.tolist() for sequence in made.sequences] == [[1, 2, 3], [1, 2, 7, 4, 6, 5]]
    assert [sequence.turn for sequence in made.sequences] == [0, 1]
    assert made.num_unmerged_turns == 1


def test_interleaved_conversations_are_merged_each_with_its_own() -> None:
    made = rollout(text([1], [2]), text([5], [6]), text([1, 2, 3], [4]), text([5, 6, 7], [8]))
    assert [sequence.token_ids.tolist() for sequence in made.sequences] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_text_given_twice_is_not_merged_into_itself() -> None:
    made = rollout(text([1], [2, 3]), text([1], [2, 3]))
    assert [sequence.spans.tolist() for sequence in made.sequences] == [[[1, 3, 3]], [[1, 3, 3]]]


def test_texts_with_rewards_of_their_own_stay_apart_and_keep_them() -> None:
    """Step rewards 1, 1 and 3 are a return of 5: merging the first two would count one of them."""
    texts = text([1], [2], reward=1.0), text([1, 2, 3], [4], reward=1.0), text([1, 2, 3, 4, 5], [6], reward=3.0)
    made = rollout(*texts, reward=0.25, mode="steps")
    assert [sequence.turn for sequence in made.sequences] == [0, 1, 2]
    assert (made.text_rewards, made.reward) == ((1.0, 1.0, 3.0), 0.25)


def test_turn_that_the_server_cut_marks_the_sequence_that_it_was_merged_into() -> None:
    (sequence,) = rollout(text([1], [2], finish_reason="length"), text([1, 2, 3], [4])).sequences
    assert (sequence.finish_reason, sequence.has_cut) == ("stop", True)


def test_cut_in_the_first_of_three_turns_is_remembered() -> None:
    texts = (text([1], [2], finish_reason="length"), text([1, 2, 3], [4]), text([1, 2, 3, 4, 5], [6]))
    (sequence,) = rollout(*texts).sequences
    assert (sequence.finish_reason, sequence.has_cut) == ("stop", True)
    (whole,) = rollout(text([1], [2]), text([1, 2, 3], [4])).sequences
    assert not whole.has_cut


def test_text_that_the_domain_calls_unfinished_counts_as_cut() -> None:
    """An agent's own limit of turns, say; that the domain calls a text finished does not undo the server's word."""
    unfinished, finished = text([1], [2]), text([1], [2], finish_reason="length")
    unfinished.finished, finished.finished = False, True
    assert [rollout(t).sequences[0].finish_reason for t in (unfinished, finished)] == ["length", "length"]
    assert rollout(text([1], [2])).sequences[0].finish_reason == "stop"


def test_reward_left_unset_is_the_metrics_reward_and_zero_set_is_zero() -> None:
    assert rollout(text([1], [2]), reward=0.75).reward == 0.75
    assert rollout(text([1], [2], reward=0.0), reward=0.75).reward == 0.0


def test_labels_masked_in_place_are_not_trained() -> None:
    masked = text([1, 2], [3, 4, 5], versions=[7, 7, 8])
    masked.labels[3] = -100
    (sequence,) = rollout(masked).sequences
    assert sequence.spans.tolist() == [[2, 3, 7], [4, 5, 8]]
    assert sequence.logprobs.tolist() == pytest.approx([-0.3, -0.5])


def test_lists_read_but_not_changed_give_the_same_sequence() -> None:
    untouched, read = text([1, 2], [3, 4]), text([1, 2], [3, 4])
    assert (read.input_ids, read.labels) == ([1, 2, 3, 4], [-100, -100, 3, 4])
    assert read.logprobs == pytest.approx([-0.3, -0.4])
    one, other = rollout(untouched).sequences[0], rollout(read).sequences[0]
    for name in ("token_ids", "logprobs", "spans"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_text_made_by_hand_has_the_oldest_possible_version() -> None:
    made = TrainingText(
        text="t",
        n_predicted=1,
        input_ids=[1, 2, 3],
        labels=[-100, 2, 3],
        logprobs=[-0.1, -0.2],
        reward=1,
        finished=True,
    )
    (sequence,) = rollout(made).sequences
    assert sequence.spans.tolist() == [[1, 3, 2]]
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize(("sampled", "expected"), [([7, 8], 2), ([1, 8], 1)])
def test_text_that_trains_tokens_outside_the_sampled_ones_has_the_oldest_version(
    sampled: list[int], expected: int
) -> None:
    """The rollout began at version 2. Nobody knows which version has sampled the token that the domain added."""
    edited = text([1, 2], [3, 4], versions=sampled)
    edited.labels, edited.logprobs = [-100, 2, 3, 4], [-0.2, -0.3, -0.4]
    (sequence,) = rollout(edited).sequences
    assert sequence.spans.tolist() == [[1, 4, expected]]


def test_prompt_token_that_is_trained_without_a_logprob_is_refused() -> None:
    edited = text([1, 2], [3, 4])
    edited.labels = [1, -100, 3, 4]
    with pytest.raises(RecordError, match=says("3 tokens", "2 logprobs")):
        rollout(edited)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [-100, 2]}, "2 labels"),
        ({"labels": [-100, -100, 9, 4]}, "differ from input_ids"),
        ({"reward": float("nan")}, "reward is nan"),
    ],
)
def test_contradictions_are_refused(change: dict, message: str) -> None:
    edited = text([1, 2], [3, 4])
    for name, value in change.items():
        setattr(edited, name, value)
    with pytest.raises(RecordError, match=message):
        rollout(edited)


def test_infinite_metric_is_refused() -> None:
    with pytest.raises(RecordError, match=r"metrics\.extra is inf"):
        rollout(text([1], [2]), extra=float("inf"))


def test_sequence_beyond_seq_length_is_refused_with_the_fix() -> None:
    with pytest.raises(SequenceTooLong, match=says("5 tokens", "finetune.seq_length", 4, "raise")):
        rollout(text([1, 2], [3, 4, 5]), seq_length=4)


def test_empty_completion_leaves_no_sequence() -> None:
    assert rollout(text([1, 2], [])).sequences == ()


def test_spans_are_maximal_runs() -> None:
    positions, versions = np.array([2, 3, 4, 8, 9, 12]), np.array([1, 1, 2, 2, 2, 2])
    assert spans_of(positions, versions).tolist() == [[2, 4, 1], [4, 5, 2], [8, 10, 2], [12, 13, 2]]


def routed(made: TrainingText, rows: list[int]) -> TrainingText:
    made.attach(replace(made.call_tokens, routed_experts=np.array(rows, np.uint8)[:, None]))
    return made


def test_tokens_keep_the_experts_under_which_they_were_sampled() -> None:
    """The second call routes the tokens of the first again, under its own weights."""
    first = routed(text([1], [2, 3]), [10, 11])
    second = routed(text([1, 2, 3, 9], [4]), [20, 21, 22, 23])
    (sequence,) = rollout(first, second).sequences
    assert sequence.routed_experts is not None
    assert sequence.routed_experts[:, 0].tolist() == [10, 11, 22, 23]


def test_text_with_other_tokens_than_the_server_saw_has_no_experts() -> None:
    changed = routed(text([1], [2, 3]), [10, 11])
    changed.input_ids = [1, 7, 3]
    changed.labels = [-100, -100, 3]
    (sequence,) = rollout(changed).sequences
    assert sequence.routed_experts is None
    (sequence,) = rollout(routed(text([1], [2]), [5]), text([1, 2, 3], [4])).sequences
    assert sequence.routed_experts is None


def seen(prompt: list[int], sampled: list[int], *images: tuple[bytes, int, int]) -> TrainingText:
    """A text whose prompt shows images: (file, start, end exclusive)."""
    made = text(prompt, sampled)
    assert made.call_tokens is not None
    spans = np.array([image[1:] for image in images], dtype=np.int32)
    made.attach(replace(made.call_tokens, images=tuple(image[0] for image in images), image_spans=spans))
    return made


def test_images_are_stored_once_per_rollout_with_the_tokens_of_each() -> None:
    """The second turn continues the first. The third shows one of their images elsewhere."""
    made = rollout(
        seen([1, 9, 9, 2], [3], (b"a", 1, 3)),
        seen([1, 9, 9, 2, 3, 9, 4], [5], (b"a", 1, 3), (b"b", 5, 6)),
        seen([9, 2], [7], (b"b", 0, 1)),
    )
    assert made.images == (b"a", b"b")
    joined, other = made.sequences
    assert joined.images is not None
    assert joined.images.tolist() == [[0, 1, 3], [1, 5, 6]]
    assert joined.spans[:, :2].tolist() == [[4, 5], [7, 8]]
    assert other.images is not None
    assert other.images.tolist() == [[1, 0, 1]]


def test_equal_tokens_of_different_images_are_not_one_sequence() -> None:
    made = rollout(seen([1, 9], [3], (b"a", 1, 2)), seen([1, 9, 3, 4], [5], (b"b", 1, 2)))
    assert [len(sequence.token_ids) for sequence in made.sequences] == [3, 5]
    assert rollout(text([1], [2])).sequences[0].images is None


def test_text_whose_image_tokens_were_replaced_is_refused() -> None:
    edited = seen([1, 9], [3], (b"a", 1, 2))
    edited.input_ids = [1, 8, 3]
    edited.labels = [-100, -100, 3]
    with pytest.raises(RecordError, match=says("training_texts[0].input_ids", "images")):
        rollout(edited)
