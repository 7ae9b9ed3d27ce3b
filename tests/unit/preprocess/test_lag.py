"""What the bound on the lag takes away, by hand and by brute force."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pipelinerl.preprocess.batching import BatchCutter, LagDrop, LengthDeciles, without_old_tokens
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import TrainingSequence
from tests.says import says


def sequence(spans: list[tuple[int, int, int]], total: int = 12) -> TrainingSequence:
    count = sum(end - start for start, end, _ in spans)
    return TrainingSequence(
        token_ids=np.arange(total, dtype=np.int32),
        logprobs=-np.arange(1, count + 1, dtype=np.float32),
        spans=np.array(spans, np.int32),
        finish_reason="stop",
    )


def sample(*sequences: TrainingSequence) -> Sample:
    return Sample(
        sample_id="0-0/0",
        group_id="0-0",
        domain="d",
        source=(0, 0),
        reward=1.0,
        sequences=tuple(enumerate(sequences)),
        advantages=tuple(float(i) for i in range(len(sequences))),
        ref_logprobs=tuple(10 * s.logprobs for s in sequences),
        num_tokens=sum(len(s.token_ids) for s in sequences),
        num_trained=sum(len(s.logprobs) for s in sequences),
        group_size=4,
        group_tokens=99,
        oldest_version=min(int(s.spans[:, 2].min()) for s in sequences),
        newest_version=max(int(s.spans[:, 2].max()) for s in sequences),
    )


LONG = sample(sequence([(1, 4, 2), (4, 6, 5)]), sequence([(2, 5, 3)]), sequence([(2, 4, 6), (7, 9, 7)]))


def test_without_old_tokens_by_hand() -> None:
    """Versions before 5 go: 3 of 5 tokens of the first sequence, all of the second, none of the third."""
    found = without_old_tokens(LONG, 5)
    assert found is not None
    (first, a), (third, c) = found.sequences
    assert (first, third, found.advantages) == (0, 2, (0.0, 2.0))
    assert a.spans.tolist() == [[4, 6, 5]]
    assert a.logprobs.tolist() == [-4, -5]
    assert len(a.token_ids) == 12, "what is not trained stays as context"
    assert c is LONG.sequences[2][1]
    assert found.ref_logprobs is not None
    assert [r.tolist() for r in found.ref_logprobs] == [[-40, -50], [-10, -20, -30, -40]]
    assert (found.num_trained, found.num_masked, found.num_tokens, found.oldest_version) == (6, 6, 24, 5)
    assert (found.group_size, found.group_tokens) == (4, 99)


def test_advantages_of_texts_without_young_tokens_do_not_scale_the_batch() -> None:
    """`batch_std` divides by the deviation of ``members``: one per trained text, or the rollout's one."""
    texts = without_old_tokens(replace(LONG, members=LONG.advantages), 5)
    rollout = without_old_tokens(replace(LONG, advantages=(1.0, 1.0, 1.0), members=(1.0,)), 5)
    assert texts is not None
    assert rollout is not None
    assert (texts.members, rollout.members) == ((0.0, 2.0), (1.0,))


def test_without_old_tokens_the_oldest_version_is_of_the_tokens_that_stay() -> None:
    found = without_old_tokens(sample(sequence([(1, 4, 2), (4, 6, 5), (6, 7, 8)])), 4)
    assert found is not None
    assert (found.oldest_version, found.newest_version) == (5, 8)


def test_without_old_tokens_nothing_left_is_nothing() -> None:
    assert without_old_tokens(LONG, 8) is None


@pytest.mark.parametrize(("lag_drop", "reason", "trained"), [("rollout", "lag", None), ("token", None, 6)])
def test_cutter_drops_the_rollout_or_its_old_tokens(lag_drop: LagDrop, reason: str | None, trained: int | None) -> None:
    cutter = BatchCutter(step=8, batch_size=1, max_lag_steps=3, lag_drop=lag_drop)
    assert cutter.offer(LONG) == reason
    batch = cutter.next_batch()
    assert (batch.samples[0].num_trained if batch else None) == trained
    if batch:
        assert all(8 - version <= 3 for _, s in batch.samples[0].sequences for version in s.spans[:, 2])


def test_lost_share_is_what_the_bound_has_taken_of_the_sample_that_was_offered_last() -> None:
    """6 of 12 tokens, after a sample that lost none; all; and none of a sample that was dropped for another reason."""
    cutter = BatchCutter(step=8, batch_size=9, max_lag_steps=3, lag_drop="token")
    young = replace(LONG, oldest_version=5)
    assert cutter.lost_share(young, cutter.offer(young)) == 0.0
    assert cutter.lost_share(LONG, cutter.offer(LONG)) == 0.5
    assert cutter.lost_share(LONG, "lag") == 1.0
    assert cutter.lost_share(LONG, "too_long") == 0.0
    assert cutter.lost_share(replace(LONG, num_trained=0), None) == 0.0


def test_cutter_resumes_only_with_an_empty_batch() -> None:
    cutter = BatchCutter(step=0, batch_size=2, max_lag_steps=None)
    cutter.resume_at(7)
    assert cutter.step == 7
    cutter.offer(LONG)
    with pytest.raises(AssertionError, match=says("step 7", "samples")):
        cutter.resume_at(8)


def test_cutter_token_mode_drops_what_is_old_as_a_whole() -> None:
    assert BatchCutter(step=20, batch_size=1, max_lag_steps=3, lag_drop="token").offer(LONG) == "lag"


def test_deciles_count_by_length_and_warn_once_with_the_bound_that_would_do() -> None:
    """Rollouts of 1 … 200 tokens; those over 185 are lost, their lag is 11: 15 of the longest 20, none of the rest."""
    deciles = LengthDeciles()
    for length in range(1, 201):
        deciles.add(length, 11 if length > 185 else 3, float(length > 185))
    values = deciles.values()
    assert [values[f"dropped_by_length/{i}"] for i in range(1, 11)] == [0.0] * 9 + [0.75]
    text = deciles.warning(deciles.values(), 8)
    assert text is not None
    assert "max_lag_steps=8 takes 75% of the longest tenth" in text
    assert "Raise max_lag_steps to 11" in text
    assert deciles.warning(deciles.values(), 8) is None


@pytest.mark.parametrize(("lost", "warns"), [(2, False), (3, True)])
def test_deciles_warn_beyond_a_tenth_with_the_bound_that_keeps_99_of_100(lost: int, warns: bool) -> None:
    """Of the 20 longest rollouts, whose lags are 1 … 20, 2 or 3 are lost. 99 % of these lags are at most 19.81. The
    shortest tenth loses nothing, the second one all."""
    deciles = LengthDeciles()
    for length in range(1, 201):
        deciles.add(length, max(length - 180, 0), float(length > 200 - lost or 20 < length <= 40))
    text = deciles.warning(deciles.values(), 8)
    assert (text is not None) == warns
    if text is not None:
        assert "takes 15% of the longest tenth of the rollouts and 0% of the shortest" in text
        assert "Raise max_lag_steps to 20, " in text


def test_deciles_cover_the_newest_2000_rollouts_and_begin_with_the_oldest_of_equal_length() -> None:
    deciles = LengthDeciles()
    for i in range(2500):
        deciles.add(7, 0, float(i < 2000))
    assert [deciles.values()[f"dropped_by_length/{i}"] for i in range(1, 11)] == [1.0] * 7 + [0.5, 0.0, 0.0]
    for i in range(1500):
        deciles.add(7, 0, float(i < 1))
    assert [deciles.values()[f"dropped_by_length/{i}"] for i in range(1, 11)] == [0.0, 0.0, 0.005, *[0.0] * 7]


def test_deciles_of_the_first_hundred_rollouts_are_ten_each() -> None:
    deciles = LengthDeciles()
    for length in range(100, 0, -1):
        deciles.add(length, 0, float(length in (1, 2, 100)))
    assert [deciles.values()[f"dropped_by_length/{i}"] for i in range(1, 11)] == [0.2, *[0.0] * 8, 0.1]


def test_deciles_say_nothing_before_there_are_enough_rollouts() -> None:
    deciles = LengthDeciles()
    for length in range(99):
        deciles.add(length, 20, 1.0)
    assert (deciles.values(), deciles.warning(deciles.values(), 8)) == ({}, None)


def test_sequence_that_loses_old_tokens_keeps_its_images_and_its_experts() -> None:
    whole = sequence([(1, 4, 2), (4, 6, 5)])
    shown = msgspec.structs.replace(
        whole, images=np.array([[0, 0, 1]], np.int32), routed_experts=np.ones((11, 2), np.uint8)
    )
    found = without_old_tokens(sample(shown), 5)
    assert found is not None
    ((_, left),) = found.sequences
    assert left.spans.tolist() == [[4, 6, 5]]
    assert left.images is shown.images
    assert left.routed_experts is shown.routed_experts
