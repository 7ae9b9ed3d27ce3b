"""What a recipe's result says about its answers and its time, from numbers made by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.recipe import logprobs_of, repeated_words, said, training
from pipelinerl.records import SamplesProcessed, TrainingSequence


@pytest.mark.parametrize(
    ("text", "share"), [("The cat and the dog.", 0.2), ("rain rain rain rain", 0.75), ("It's it's.", 0.5), ("", 0.0)]
)
def test_repeated_words_are_those_that_were_there_before(text: str, share: float) -> None:
    assert repeated_words(text) == pytest.approx(share)


def test_reference_gives_the_log_probability_of_sampled_tokens_alone() -> None:
    """The token after token t is t + 1 with probability 3/5, and each of the two others with 1/5."""

    def reference(input_ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(1, input_ids.shape[1], 3)
        return SimpleNamespace(logits=logits.scatter(2, (input_ids[..., None] + 1) % 3, math.log(3)))

    sequence = TrainingSequence(
        token_ids=np.array([0, 0, 1, 2, 2, 0], dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32),
        spans=np.array([(2, 4, 0), (5, 6, 1)], dtype=np.int32),
        finish_reason="stop",
    )
    assert logprobs_of(reference, sequence) == pytest.approx([math.log(3 / 5)] * 3)  # type: ignore[arg-type]


def test_seconds_of_training_leave_out_the_time_between_two_starts() -> None:
    metrics = {"wait_s": 1.0, "step_s": 2.0, "push_wait_s": 0.5, "reward": 0.25}
    steps = [
        SamplesProcessed(samples_processed=8, step=step, timestamp=at, metrics=metrics)
        for step, at in ((1, 100.0), (2, 9000.0))
    ]
    found = training(steps)
    assert found["seconds"] == [3.5, 7.0]
    assert found["reward"] == [0.25, 0.25]


class Words(dict[int, str]):
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self[token] for token in token_ids)


def test_said_is_what_was_sampled_in_all_turns_by_all_versions() -> None:
    """Two turns with the user's token 9 between them. The first is of two weight versions."""
    sequence = TrainingSequence(
        token_ids=np.array([9, 1, 2, 9, 3], dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32),
        spans=np.array([(1, 2, 0), (2, 3, 1), (4, 5, 1)], dtype=np.int32),
        finish_reason="stop",
    )
    test = SimpleNamespace(rollout=SimpleNamespace(sequences=[sequence, sequence]))
    assert said(test, Words({1: "a", 2: "b", 3: "c", 9: "-"})) == "abcabc"  # type: ignore[arg-type]
