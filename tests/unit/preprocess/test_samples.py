"""One group becomes samples: filters, shaping, identity, and what each sample knows of itself."""

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import RecordError
from pipelinerl.preprocess.batching import BatchCutter
from pipelinerl.preprocess.collate import Members, rollout_weights
from pipelinerl.preprocess.intake import Intake, _Pending
from pipelinerl.preprocess.reference import REFERENCE, _with_scores
from pipelinerl.preprocess.samples import (
    Sample,
    Shaping,
    all_advantages_zero,
    cut_texts,
    longest_completion,
    prepare_group,
    refused_group,
)
from pipelinerl.records import Rollout, RolloutGroup, TrainingSequence
from pipelinerl.records.drops import DropReason

SHAPING = Shaping(seq_length=20)


def sequence(*, tokens: int = 6, spans=((2, 6, 3),), finish_reason: str = "stop", turn: int = 0) -> TrainingSequence:
    spans_R3 = np.array(spans, np.int32).reshape(-1, 3)
    return TrainingSequence(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(int((spans_R3[:, 1] - spans_R3[:, 0]).sum()), -0.5, np.float32),
        spans=spans_R3,
        finish_reason=finish_reason,
        turn=turn,
    )


def group(*members: tuple[float, tuple[TrainingSequence, ...]]) -> RolloutGroup:
    return RolloutGroup(
        group_id="0-3",
        epoch=0,
        position=3,
        problem_index=0,
        actor=0,
        domain="d",
        dataset="train",
        attempts=len(members),
        rollouts=tuple(
            Rollout(attempt=i, reward=reward, sequences=sequences, metrics={}, latency_s=0.0, num_llm_calls=1)
            for i, (reward, sequences) in enumerate(members)
        ),
        dispatched_version=0,
        settled_before=0,
        dispatch_index=0,
    )


def test_prepare_group_sample_knows_place_identity_versions_and_counts():
    two = (sequence(spans=((2, 4, 5), (4, 6, 7))), sequence(tokens=9, spans=((3, 5, 6),), turn=1))
    first, second = prepare_group(11, group((1.0, two), (0.0, (sequence(),))), SHAPING)
    assert (first.sample_id, first.source, first.after) == ("0-3/0", (11, 0), (11, 1))
    assert (first.num_tokens, first.num_trained) == (15, 6)
    assert (first.oldest_version, first.newest_version) == (5, 7)
    assert first.advantages == (1.0, 1.0)
    assert (second.source, second.advantages, second.reward) == ((11, 1), (-1.0,), 0.0)
    assert first.drop_reason is None
    assert first.num_counted == first.num_trained


def test_prepare_group_rollout_without_trained_tokens_is_dropped_but_stays_in_the_baseline():
    masked = sequence(spans=())
    samples = prepare_group(0, group((3.0, (masked,)), (0.0, ()), (0.0, (sequence(),))), SHAPING)
    assert [s.drop_reason for s in samples] == ["no_trained_tokens", "no_trained_tokens", None]
    assert samples[2].advantages == (-1.5,)


def test_prepare_group_sequence_without_trained_tokens_is_left_out():
    sample, _ = prepare_group(0, group((1.0, (sequence(spans=()), sequence(turn=1))), (0.0, (sequence(),))), SHAPING)
    assert [index for index, _ in sample.sequences] == [1]
    assert sample.num_tokens == 6


def test_prepare_group_sequence_beyond_seq_length_is_dropped_alone():
    long = sequence(tokens=21, spans=((2, 21, 0),))
    samples = prepare_group(0, group((1.0, (long,)), (0.0, (sequence(),))), SHAPING)
    assert [s.drop_reason for s in samples] == ["too_long", None]


@pytest.mark.parametrize(("rewards", "reason"), [((1.0, 1.0), "zero_advantage"), ((1.0, 0.0), None)])
def test_prepare_group_zero_advantage_filter_drops_whole_groups_that_teach_nothing(rewards, reason):
    shaping = Shaping(seq_length=20, filter_zero_advantage_groups=True)
    samples = prepare_group(0, group(*((reward, (sequence(),)) for reward in rewards)), shaping)
    assert [s.drop_reason for s in samples] == [reason, reason]


def test_prepare_group_value_advantage_carries_rewards_and_is_not_filtered():
    shaping = Shaping(seq_length=20, advantage="value", filter_zero_advantage_groups=True)
    samples = prepare_group(0, group((0.0, (sequence(),)), (0.0, (sequence(),))), shaping)
    assert [(s.drop_reason, s.advantages) for s in samples] == [(None, (0.0,))] * 2


def test_prepare_group_overlong_filter_goes_by_the_servers_finish_reason():
    shaping = Shaping(seq_length=20, overlong_filtering=True)
    cut, ended = sequence(finish_reason="length"), sequence(tokens=20, spans=((1, 20, 0),))
    samples = prepare_group(0, group((1.0, (cut,)), (0.0, (ended,))), shaping)
    assert [(s.num_counted, s.drop_reason) for s in samples] == [(0, None), (19, None)]


def test_prepare_group_overlong_filter_takes_out_a_rollout_with_an_earlier_cut_turn():
    shaping = Shaping(seq_length=20, overlong_filtering=True)
    cut = msgspec.structs.replace(sequence(), earlier_cut=True)
    samples = prepare_group(0, group((1.0, (cut,)), (0.0, (sequence(),))), shaping)
    assert [s.num_counted for s in samples] == [0, 4]


def test_prepare_group_overlong_filter_takes_out_the_cut_text_by_its_index_among_all_texts():
    """The first text trains nothing, so that the cut one, index 1 of the rollout, is the first that is trained."""
    texts = (sequence(spans=()), sequence(tokens=9, spans=((2, 9, 0),), finish_reason="length", turn=1))
    texts += (sequence(spans=((3, 6, 0),), turn=2),)
    made = group((0.0, texts))
    rollout = msgspec.structs.replace(made.rollouts[0], rewards="texts", text_rewards=(0.0, 1.0, 2.0))
    made = msgspec.structs.replace(made, rollouts=(rollout,))
    (sample,) = prepare_group(0, made, Shaping(seq_length=20, overlong_filtering=True))
    assert [index for index, _ in sample.sequences] == [1, 2]
    assert (sample.num_trained, sample.num_counted, sample.group_tokens) == (10, 3, 3)


def test_prepare_group_first_token_trained_is_refused_with_identity():
    bad = sequence(spans=((0, 6, 0),))
    with pytest.raises(RecordError, match="0-3/1/0: its first token"):
        prepare_group(0, group((1.0, (sequence(),)), (0.0, (bad,))), SHAPING)


def test_prepare_group_reward_beyond_float32_is_refused_with_identity():
    with pytest.raises(RecordError, match="0-3/0: reward"):
        prepare_group(0, group((1e39, (sequence(),)), (1e39, (sequence(),))), SHAPING)


def test_refused_group_every_member_is_invalid():
    samples = refused_group(4, group((float("nan"), (sequence(),)), (0.0, ())))
    assert [(s.sample_id, s.source, s.drop_reason) for s in samples] == [
        ("0-3/0", (4, 0), "malformed"),
        ("0-3/1", (4, 1), "malformed"),
    ]


def test_longest_completion_joins_spans_of_one_completion_over_weight_versions():
    """Completions 2–9 (three versions) and 12–15 in one sequence, 1–6 in another."""
    merged = sequence(tokens=15, spans=((2, 5, 0), (5, 6, 1), (6, 9, 2), (12, 15, 2)))
    member = group((0.0, (merged, sequence(spans=((1, 6, 0),))))).rollouts[0]
    assert longest_completion(member.sequences) == 7
    assert longest_completion(()) == 0
    assert longest_completion([sequence(spans=())]) == 0


def test_one_completion_that_the_server_cut_takes_out_the_rollout_or_its_text():
    cut, ended = sequence(finish_reason="length"), sequence(turn=1)
    assert cut_texts(group((0.0, (cut, ended))).rollouts[0]) == {0, 1}
    assert cut_texts(group((0.0, (ended, cut))).rollouts[0]) == {0, 1}
    assert cut_texts(group((0.0, (ended, ended))).rollouts[0]) == frozenset()
    texts = msgspec.structs.replace(group((0.0, (ended, cut))).rollouts[0], rewards="texts")
    assert cut_texts(texts) == {1}


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [([0.0], True), ([1e-6, -1e-6], True), ([1.1e-6, 0.0], False), ([0.0, -1.1e-6], False), ([-1.0, -1.0], False)],
)
def test_group_gives_no_gradient_if_every_advantage_is_within_a_millionth_of_zero(advantages, expected):
    assert all_advantages_zero(np.array(advantages)) is expected


def prompt_mean(cutter: BatchCutter) -> list[list[float]]:
    """What each rollout of the cutter's batch weighs, by group."""
    batch = cutter.next_batch()
    assert batch is not None
    columns = [(s.num_counted, len(s.sequences), s.group_size, s.group_tokens) for s in batch.samples]
    members = Members(
        **dict(zip(("counted_N", "texts_N", "group_sizes_N", "group_tokens_N"), np.array(columns).T, strict=True))
    )
    worth = rollout_weights("prompt_mean", members) * members.counted_N
    ids = [sample.group_id for sample in batch.samples]
    return [[w for w, own in zip(worth.tolist(), ids, strict=True) if own == one] for one in dict.fromkeys(ids)]


def grown(*lengths: int, version: int = 9) -> tuple[float, tuple[TrainingSequence, ...]]:
    """A rollout with a text per number of trained tokens."""
    texts = (sequence(tokens=n + 1, spans=((1, n + 1, version),), turn=i) for i, n in enumerate(lengths))
    return float(sum(lengths)), tuple(texts)


@pytest.mark.parametrize("lag_drop", ["rollout", "token"])
def test_prompt_mean_group_that_loses_a_member_to_the_lag_keeps_its_whole_weight(lag_drop):
    """10 and 6 tokens are left of 10, 4 and 6: they weigh 10/16 and 6/16 of a half. The other group weighs a half."""
    cutter = BatchCutter(step=10, batch_size=4, max_lag_steps=1, lag_drop=lag_drop)
    for samples in (
        prepare_group(0, group(grown(10), grown(4, version=8), grown(6)), SHAPING),
        prepare_group(1, group(grown(3), grown(9)), SHAPING),
    ):
        samples = [replace(sample, group_id=str(sample.source[0])) for sample in samples]
        assert [cutter.offer(sample) for sample in samples if sample.oldest_version == 9] == [None, None]
        assert [cutter.offer(sample) for sample in samples if sample.oldest_version == 8] in ([], ["lag"])
    np.testing.assert_allclose(prompt_mean(cutter), [[10 / 32, 6 / 32], [3 / 24, 9 / 24]])


def test_prompt_mean_member_that_is_masked_in_part_stays_one_of_its_group():
    """A group's tokens are those that were sampled (docs/algorithms.md §4): 2 of the second's 4 are too old."""
    partly = (sequence(tokens=5, spans=((1, 3, 8), (3, 5, 9))),)
    cutter = BatchCutter(step=10, batch_size=2, max_lag_steps=1, lag_drop="token")
    for sample in prepare_group(0, group(grown(6), (0.0, partly)), SHAPING):
        assert cutter.offer(sample) is None
    np.testing.assert_allclose(prompt_mean(cutter), [[6 / 10, 2 / 10]])


def test_prompt_mean_group_cut_by_a_batch_border_keeps_its_own_weights_at_both_steps():
    """Of 2, 3, 5, 6 and 9 tokens the third is too old at step 10: 20 are counted. At 11 so is the first: 18 are."""
    cutter = BatchCutter(step=10, batch_size=2, max_lag_steps=2, lag_drop="rollout")
    made = group(grown(2, version=8), grown(3), grown(5, version=7), grown(6), grown(9))
    found = []
    for sample in prepare_group(0, made, SHAPING):
        cutter.offer(sample)
        if len(cutter.samples) == 2:
            found.append([(s.group_size, s.group_tokens) for s in cutter.samples])
            cutter.next_batch()
    assert found == [[(4, 20)] * 2, [(3, 18)] * 2]


def test_group_that_scoring_makes_smaller_is_counted_again_also_after_a_restart_within_it():
    """The teacher refuses the second of three. The run goes on at the third: its first is trained already."""
    samples = prepare_group(0, group(grown(10), grown(4), grown(6)), SHAPING)
    scored: Future[list[Sample]] = Future()
    scored.set_result([samples[0], replace(samples[1], drop_reason=DropReason.NOT_SCORED), samples[2]])
    intake: Any = Intake.__new__(Intake)
    intake._ctx = SimpleNamespace(stop=threading.Event())
    intake._groups = SimpleNamespace(source=(0, 2))
    intake._pending = deque([_Pending(samples, [scored])])
    intake._models = [REFERENCE]
    (left,) = intake.next_samples()
    assert (left.source, left.group_size, left.group_tokens) == ((0, 2), 2, 16)


@pytest.mark.parametrize(("logprob", "reason"), [(-1e15, None), (-1.1e15, "not_scored"), (-3e38, "not_scored")])
def test_score_beyond_the_bound_is_refused_as_nan_is(logprob, reason):
    (sample,) = prepare_group(0, group(grown(2)), SHAPING)
    found = _with_scores(sample, [{"ref_logprobs": np.array([-1.0, logprob], np.float32)}], REFERENCE)
    assert found.drop_reason == reason
