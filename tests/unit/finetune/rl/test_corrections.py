"""What truncation, masks and veto make of a ratio, by hand: weight, mask, and which tokens they change."""

import math

import torch

from pipelinerl.finetune.rl.corrections import Corrected, Corrections, corrected
from pipelinerl.finetune.rl.tokens import TokenInputs

SEGMENTS = [0, 0, 1, 1, 1]
RATIOS = [0.5, 4.0, 1.5, 2.0, 0.25]
"""Products of the sequences: 2 and 0.75."""


def correct(**bounds: float) -> Corrected:
    zeros = torch.zeros(len(RATIOS), dtype=torch.float64)
    inputs = TokenInputs(
        sampler_logprobs_K=zeros,
        advantages_K=zeros,
        weights_K=zeros,
        segments_K=torch.tensor(SEGMENTS),
        num_segments=2,
    )
    log_ratio_K = torch.tensor([math.log(ratio) for ratio in RATIOS], dtype=torch.float64)
    return corrected(log_ratio_K, inputs, Corrections(**bounds))


def check(found: Corrected, weight: list[float], mask: list[int], changed: list[int]) -> None:
    torch.testing.assert_close(found.weight_K, torch.tensor(weight, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert found.mask_K.tolist() == mask
    assert found.changed_K.tolist() == [bool(flag) for flag in changed]


def test_nothing_configured_changes_nothing() -> None:
    check(correct(), RATIOS, [1] * 5, [0] * 5)


def test_truncation_changes_what_exceeds_the_bound_and_not_what_equals_it() -> None:
    check(correct(token_tis=2.0), [0.5, 2.0, 1.5, 2.0, 0.25], [1] * 5, [0, 1, 0, 0, 0])


def test_mask_changes_what_it_drops_and_keeps_what_equals_the_bound() -> None:
    check(correct(token_mis=2.0), [0.5, 0.0, 1.5, 2.0, 0.25], [1, 0, 1, 1, 1], [0, 1, 0, 0, 0])


def test_mask_with_two_bounds_drops_what_lies_outside_of_them() -> None:
    check(correct(token_mis=2.0, token_mis_low=0.5), [0.5, 0.0, 1.5, 2.0, 0.0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1])


def test_sequence_bounds_change_whole_sequences() -> None:
    check(correct(sequence_tis=1.5), [1.5, 1.5, 0.75, 0.75, 0.75], [1] * 5, [1, 1, 0, 0, 0])
    check(correct(sequence_mis=1.5), [0.0, 0.0, 0.75, 0.75, 0.75], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0])


def test_veto_drops_the_sequence_of_a_token_below_the_bound_but_not_of_one_at_it() -> None:
    check(correct(veto=0.5), [0.5, 4.0, 0.0, 0.0, 0.0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1])
    check(correct(veto=0.25), RATIOS, [1] * 5, [0] * 5)


def test_token_is_changed_by_any_one_of_several_corrections() -> None:
    """Truncation at 1.5 acts on the ratios 4 and 2, the veto below 0.5 on the second sequence."""
    check(correct(token_tis=1.5, veto=0.5), [0.5, 1.5, 0.0, 0.0, 0.0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1])
