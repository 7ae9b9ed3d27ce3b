"""A server must answer the probe with the trainer's own values."""

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import TransportError
from pipelinerl.weights.probe import Probe, probe_tokens
from pipelinerl.weights.scores import read_scores, score_request

PROBE = Probe(token_ids=(5, 6, 7), logprobs=np.array([0, -1.5, -2.0], dtype=np.float32), tolerance=0.01)


@pytest.mark.parametrize(
    ("answer", "difference"),
    [
        ([9.0, -1.5, -2.0], 0.0),
        ([0.0, -1.5, -1.75], 0.25),
        ([0.0, -2.0, -2.0], 0.5),
        ([0.0, np.nan, -2.0], np.inf),
        ([0.0, -np.inf, -2.0], np.inf),
        ([0.0, -1.5], np.inf),
    ],
)
def test_difference_is_the_largest_over_scored_tokens(answer: list[float], difference: float) -> None:
    values = np.array(answer, dtype=np.float32)
    assert PROBE.difference(values) == difference
    assert PROBE.accepts(values) == (difference <= 0.01)


def test_probe_tokens_are_fixed_by_the_seed_and_within_the_vocabulary() -> None:
    assert probe_tokens(1000, seed=3) == probe_tokens(1000, seed=3)
    assert probe_tokens(1000, seed=3) != probe_tokens(1000, seed=4)
    assert all(0 <= token < 7 for token in probe_tokens(7, length=500))


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
