"""The probe's text, and what is asked of a server about it."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import TransportError
from pipelinerl.weights.verify.probe import ProbeText, first_tokens, text_shape
from pipelinerl.weights.verify.scores import (
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
    for content in (b"{}", body("7").replace(b"7", b"\xff")):
        with pytest.raises(TransportError, match="weight versions"):
            read_version(content)


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
