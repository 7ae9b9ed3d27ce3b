"""The probe's text, and what is asked of a server about it."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import TransportError
from pipelinerl.weights.verify.probe import ProbeText, first_tokens, prompt_lengths, text_shape
from pipelinerl.weights.verify.scores import (
    continue_request,
    read_continuation,
    read_scores,
    read_version,
    score_request,
)


@pytest.mark.parametrize("scored", [False, True])
def test_text_is_kept_in_the_run_folder(tmp_path: Path, scored: bool) -> None:
    assert ProbeText.load(tmp_path) is None
    text = ProbeText(token_ids=np.arange(6, dtype=np.int32).reshape(2, 3))
    if scored:
        text = text.with_scores(np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32))
    text.save(tmp_path)
    read = ProbeText.load(tmp_path)
    assert read is not None
    np.testing.assert_array_equal(read.token_ids, text.token_ids)
    assert (read.logprobs is None) != scored
    if scored:
        np.testing.assert_array_equal(read.logprobs, text.logprobs)


@pytest.mark.parametrize(
    ("max_model_len", "shape"), [(10_000, (4, 256)), (256, (5, 255)), (64, (17, 63)), (2, (512, 2))]
)
def test_text_fits_the_servers_and_has_about_a_thousand_tokens(max_model_len: int, shape: tuple[int, int]) -> None:
    assert text_shape(max_model_len) == shape


def test_first_tokens_are_fixed_by_the_seed_and_within_the_vocabulary() -> None:
    assert first_tokens(1000, 5, seed=3) == first_tokens(1000, 5, seed=3)
    assert first_tokens(1000, 5, seed=3) != first_tokens(1000, 5, seed=4)
    assert all(0 <= token < 7 for token in first_tokens(7, 500, seed=0))


def test_version_of_a_scored_answer_is_that_of_its_one_token() -> None:
    def body(*labels: str) -> bytes:
        return msgspec.json.encode({"choices": [{"weight_versions": [{"version": label} for label in labels]}]})

    assert read_version(body("7")) == "7"
    assert read_version(body("7", "8")) == ""
    with pytest.raises(TransportError, match="weight versions"):
        read_version(b"{}")


def answer(*rows: dict[str, dict[str, float]] | None) -> bytes:
    return msgspec.json.encode({"choices": [], "prompt_logprobs": rows})


def test_scores_are_read_by_position_and_token() -> None:
    body = answer(None, {"9": {"logprob": -0.1}, "6": {"logprob": -1.5}}, {"7": {"logprob": -2.0}})
    assert read_scores(body, [5, 6, 7]).tolist() == [0.0, -1.5, -2.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not an answer"),
        (b'{"prompt_logprobs": null}', "not an answer"),
        (answer(None, {"6": {"logprob": -1.0}}), "3 tokens were sent, 2 were scored"),
        (answer(None, {"8": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}), "token 6 at position 1 was not scored"),
        (answer(None, None, {"7": {"logprob": -1.0}}), "token 6 at position 1 was not scored"),
    ],
)
def test_answers_about_other_tokens_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        read_scores(body, [5, 6, 7])


def test_score_request_asks_for_the_given_tokens_only() -> None:
    request = score_request(np.array([1, 2], dtype=np.int32))
    assert msgspec.json.decode(msgspec.json.encode(request)) == {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
    }


@pytest.mark.parametrize(
    ("thresholds", "max_model_len", "lengths"),
    [
        pytest.param([], 10_000, None, id="none"),
        pytest.param([128, 200], 10_000, None, id="the text crosses them"),
        pytest.param([128, 4096], 10_000, (16, 4088), id="eight tokens before the last one"),
        pytest.param([4096], 4097, (16, 4032), id="room for the completion"),
        pytest.param([30], 31, None, id="servers of few tokens"),
    ],
)
def test_prompts_end_before_the_last_threshold(
    thresholds: list[int], max_model_len: int, lengths: tuple[int, int] | None
) -> None:
    assert prompt_lengths(thresholds, max_model_len) == lengths


def test_completion_is_read_with_its_log_probabilities() -> None:
    request = continue_request(np.arange(3, dtype=np.int32), 2, seed=5)
    assert request["token_ids"] == [0, 1, 2]
    asked = {key: request["sampling_params"][key] for key in ("max_tokens", "temperature", "seed", "logprobs")}
    assert asked == {"max_tokens": 2, "temperature": 1.0, "seed": 5, "logprobs": 0}
    content = [{"token_id": 7, "logprob": -0.5, "rank": 1}, {"token_id": 9, "logprob": -2.0}]
    body = msgspec.json.encode({"choices": [{"token_ids": [7, 9], "logprobs": {"content": content}}]})
    tokens, logprobs = read_continuation(body)
    assert (tokens.tolist(), logprobs.tolist()) == ([7, 9], [-0.5, -2.0])
    for wrong in (b"{}", msgspec.json.encode({"choices": []}), msgspec.json.encode({"choices": [{"token_ids": [7]}]})):
        with pytest.raises(TransportError, match="not an answer with sampled tokens"):
            read_continuation(wrong)
