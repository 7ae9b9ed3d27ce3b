"""The gap between trainer and sampler is split into its causes: planted ones are found, with hand-computed sizes."""

import numpy as np
import pytest

from pipelinerl.inspect.replay.folder import ReplayedSequence
from pipelinerl.inspect.replay.mismatch import FIXES, attribute


def make_sequence(
    sampler: list[float], trainer: list[float], own: list[float], versions: list[int] | None = None
) -> ReplayedSequence:
    count = len(sampler)
    zeros = np.zeros(count, np.float32)
    return ReplayedSequence(
        sequence_id="0-0/0/0",
        token_ids=np.zeros(count, np.int32),
        positions=np.arange(count, dtype=np.int32),
        versions=np.array(versions or [3] * count, np.int32),
        sampler_logprobs=np.array(sampler, np.float32),
        logprobs=np.array(trainer, np.float32),
        version_logprobs=np.array(own, np.float32),
        entropy=zeros,
        advantages=zeros,
        altered=np.zeros(count, bool),
        losses=zeros,
        slopes=zeros,
    )


def test_old_weights_are_staleness() -> None:
    found = attribute([make_sequence([-1.0, -2.0], [-1.5, -1.5], [-1.0, -2.0])], has_experts=False)
    assert found.parts == pytest.approx({"staleness": 0.5, "kept KV cache": 0.0, "precision": 0.0})
    assert (found.gap, found.largest, found.known, found.unknown) == (0.5, "staleness", 2, 0)
    assert "max_lag_steps" in found.lines[-1]


def test_a_difference_with_the_same_weights_is_precision_and_with_experts_routing() -> None:
    sequence = make_sequence([-1.0, -2.0], [-1.25, -1.75], [-1.25, -1.75])
    assert attribute([sequence], has_experts=False).parts == pytest.approx(
        {"staleness": 0.0, "kept KV cache": 0.0, "precision": 0.25}
    )
    assert attribute([sequence], has_experts=True).largest == "routing"


def test_what_tokens_behind_an_update_differ_more_is_kept_kv_cache() -> None:
    # noise of 0.125 everywhere, and 0.5 more on the last two of four tokens
    values = [-1.125, -0.875, -1.625, -0.375]
    found = attribute([make_sequence([-1.0] * 4, values, values, [3, 3, 4, 4])], has_experts=False)
    assert found.parts == pytest.approx({"staleness": 0.0, "kept KV cache": 0.25, "precision": 0.125})
    assert (found.largest, found.mixed) == ("kept KV cache", 2)


def test_probabilities_that_are_all_too_high_are_truncation() -> None:
    rng = np.random.default_rng(0)
    own = -rng.uniform(1, 3, 200)
    sampler = own + 0.1  # renormalised over 90% of the mass
    found = attribute([make_sequence(list(sampler), list(own), list(own))], has_experts=False)
    assert found.largest == "truncation"
    assert found.parts["truncation"] == pytest.approx(0.1, rel=1e-4)
    noise = own + 0.1 * rng.choice([-1.0, 1.0], 200)
    assert attribute([make_sequence(list(noise), list(own), list(own))], has_experts=False).largest == "precision"


def test_tokens_of_unknown_weights_are_left_out_and_counted() -> None:
    nan = float("nan")
    found = attribute([make_sequence([-1.0, -2.0], [-9.0, -2.5], [nan, -2.5])], has_experts=False)
    assert (found.known, found.unknown, found.gap) == (1, 1, 0.5)
    none = attribute([make_sequence([-1.0], [-9.0], [nan])], has_experts=False)
    assert (none.known, none.largest) == (0, None)
    assert "cannot be split" in none.lines[0]


def test_equal_ends_have_no_cause() -> None:
    found = attribute([make_sequence([-1.0], [-1.0], [-1.0])], has_experts=False)
    assert found.largest is None
    assert found.lines[-1] == "  they are equal"


def test_every_cause_has_a_fix() -> None:
    assert set(FIXES) == {"staleness", "kept KV cache", "truncation", "precision", "routing"}
