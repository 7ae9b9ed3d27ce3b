"""The preprocessor's reference log-probabilities: failing servers, refused sequences, bounded requests."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.config.servers import ScoringModel
from pipelinerl.errors import ConfigError, DeadlineError, ServerError, TransportError
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.preprocess import reference
from pipelinerl.preprocess.reference import ReferenceScorer, Scores, check_placed, merged, servers_of
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.records import (
    MicroBatch,
    topics,
)
from pipelinerl.records.batches import FROZEN
from pipelinerl.records.check import check_micro_batch
from pipelinerl.world import Job
from tests.memory_streams import MemoryBackend
from tests.preprocess_kit import (
    DEADLINE_S,
    consumed,
    make_context,
    make_group,
    make_world,
    prepare_run,
    preprocessor,
    read_topic,
    turn_until,
    write_groups,
)
from tests.says import says


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare_run(MemoryBackend(), tmp_path, monkeypatch)


class FakeReference:
    """Reference servers whose log-prob at position t is −t/8; the first calls fail, one sequence is NaN or refused."""

    def __init__(self, failures: int = 0, nan_at: int | None = None, refused_at: int | None = None):
        """``nan_at``, ``refused_at``: number of the sequence, counted as they are first seen."""
        self.failures, self.nan_at, self.refused_at = failures, nan_at, refused_at
        self.urls: list[str] = []
        self.seen: list[bytes] = []
        self.running = self.most = 0

    async def __call__(
        self, session: Any, url: str, sequences: list[np.ndarray], num_top: int = 0, **images: Any
    ) -> list[Scores]:
        assert not any(images.values()), "these sequences are text"
        self.urls.append(url)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if len(self.urls) <= self.failures:
                raise TransportError("connection refused")
            return [Scores(self.score(sequence)) for sequence in sequences]
        finally:
            self.running -= 1

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        if token_ids.tobytes() not in self.seen:
            self.seen.append(token_ids.tobytes())
        number = self.seen.index(token_ids.tobytes()) + 1
        if number == self.refused_at:
            raise ServerError("prompt too long", status=400)
        values = -np.arange(len(token_ids), dtype=np.float32) / 8
        if number == self.nan_at:
            values[3] = np.nan
        return values


def test_reference_logprobs_of_trained_tokens_survive_failing_servers(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeReference(failures=2)
    monkeypatch.setattr(reference, "score_sequences", fake)
    monkeypatch.setattr(reference, "FIRST_BACKOFF_S", 0.01)
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(3)])
    ctx = make_context(run_dir, make_world(reference_servers=2), "finetune.rl.kl_coef=0.1")
    with preprocessor(ctx) as role:
        turn_until(role, consumed(role, 3))
    batches = read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)
    assert len({mb.step for mb in batches}) == 2
    assert set(fake.urls) == {"u0", "u1"}
    for mb in batches:
        start = 0
        expected = np.zeros(len(mb.token_ids), np.float32)
        for length in mb.segment_lengths.tolist():
            expected[start + 2 : start + length] = -np.arange(2, length, dtype=np.float32) / 8
            start += length
        np.testing.assert_array_equal(mb.ref_logprobs, expected)


@pytest.mark.parametrize("fault", [{"nan_at": 2}, {"refused_at": 2}])
def test_sample_that_the_reference_cannot_score_is_dropped(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, int]
):
    monkeypatch.setattr(reference, "score_sequences", FakeReference(**fault))
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(2)])
    ctx = make_context(run_dir, make_world(reference_servers=1), "finetune.rl.final_kl_coef=0.1")
    with preprocessor(ctx) as role:
        turn_until(role, consumed(role, 2))
        assert dict(role.totals.dropped) == {"not_scored": 1}


def test_short_sequences_share_requests(monkeypatch: pytest.MonkeyPatch):
    fake = FakeReference()
    monkeypatch.setattr(reference, "score_sequences", fake)
    samples = prepare_group(0, make_group(np.random.default_rng(0), 0, version=0), Shaping(seq_length=64)) * 10
    lengths = [len(sequence.token_ids) for sample in samples for _, sequence in sample.sequences]
    server = Job(name="preprocessor_llm_0", kind="preprocessor_llm", url="u0")
    scorer = ReferenceScorer(lambda: [server], concurrency=3, deadline_s=60.0)
    try:
        scorer.submit(samples).result(timeout=DEADLINE_S)
        assert len(fake.urls) == 1
        monkeypatch.setattr(reference, "REQUEST_TOKENS", 2 * max(lengths))
        scorer.submit(samples).result(timeout=DEADLINE_S)
    finally:
        scorer.close()
    assert len(lengths) / 4 <= len(fake.urls) - 1 <= len(lengths) / 2 + 1


def test_kl_without_reference_server_is_refused():
    with pytest.raises(ConfigError, match=says("the reference", "no server", "world.preprocessor_fraction")):
        check_placed(())


def test_reference_server_that_never_answers_ends_the_role_with_its_name(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reference, "score_sequences", FakeReference(failures=10_000))
    monkeypatch.setattr(reference, "FIRST_BACKOFF_S", 0.01)
    write_groups(run_dir, [make_group(np.random.default_rng(0), 0, version=0)])
    overrides = ("finetune.rl.kl_coef=0.1", "launcher.startup_timeout_s=0.05")
    with preprocessor(make_context(run_dir, make_world(reference_servers=1), *overrides)) as role:
        with pytest.raises(DeadlineError, match="the last server was preprocessor_llm_0"):
            turn_until(role, lambda: False)


def test_reference_requests_per_server_are_bounded(monkeypatch: pytest.MonkeyPatch):
    fake = FakeReference()

    async def slow(session: Any, url: str, sequences: list[np.ndarray], **images: Any) -> list[Scores]:
        values = await fake(session, url, sequences)
        fake.running += 1
        fake.most = max(fake.most, fake.running)
        await asyncio.sleep(0)
        fake.running -= 1
        return values

    monkeypatch.setattr(reference, "score_sequences", slow)
    monkeypatch.setattr(reference, "REQUEST_TOKENS", 1)
    group = make_group(np.random.default_rng(0), 0, version=0)
    samples = prepare_group(0, group, Shaping(seq_length=64)) * 10
    scorer = ReferenceScorer(
        lambda: [Job(name="preprocessor_llm_0", kind="preprocessor_llm", url="u0")], concurrency=3, deadline_s=60.0
    )
    try:
        scored = scorer.submit(samples).result(timeout=DEADLINE_S)
    finally:
        scorer.close()
    assert [s.sample_id for s in scored] == [s.sample_id for s in samples]
    assert fake.most == 3


def test_teacher_of_each_domain_scores_its_samples_beside_the_reference(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server i serves model i: the reference, then the teachers. Each has its own log-probs."""

    async def score(
        session: Any, url: str, sequences: list[np.ndarray], num_top: int = 0, **images: Any
    ) -> list[Scores]:
        found = []
        for sequence in sequences:
            logprobs = np.full(len(sequence), -1.0 - int(url[1:]), np.float32)
            top = np.arange(len(sequence) * num_top, dtype=np.int32).reshape(len(sequence), num_top)
            found.append(Scores(logprobs, top, -top.astype(np.float32)) if num_top else Scores(logprobs))
        return found

    monkeypatch.setattr(reference, "score_sequences", score)
    models = (
        ScoringModel(path="r", column="ref_logprobs"),
        ScoringModel(path="m", column="teacher_logprobs", domains=("maths",), num_top=2),
        ScoringModel(path="c", column="teacher_logprobs", domains=("code",), num_top=2),
    )
    jobs = [
        Job(name=f"preprocessor_llm_{i}", kind="preprocessor_llm", replica_idx=i, url=f"u{i % 3}") for i in range(6)
    ]
    samples = [
        replace(sample, domain=domain)
        for i, domain in enumerate(("maths", "code"))
        for sample in prepare_group(i, make_group(np.random.default_rng(i), i, version=0), Shaping(seq_length=64))
    ]
    scorers = [
        ReferenceScorer(partial(servers_of, jobs, models, model), concurrency=2, deadline_s=60.0, model=model)
        for model in models
    ]
    try:
        scored = merged([scorer.submit(samples).result(timeout=DEADLINE_S) for scorer in scorers], models)
    finally:
        for scorer in scorers:
            scorer.close()
    assert [sample.sample_id for sample in scored] == [sample.sample_id for sample in samples]
    for sample in scored:
        assert sample.ref_logprobs is not None
        assert sample.teacher_logprobs is not None
        assert {value for values in sample.ref_logprobs for value in values.tolist()} == {-1.0}
        taught = {value for values in sample.teacher_logprobs for value in values.tolist()}
        assert taught == {-2.0 if sample.domain == "maths" else -3.0}
        assert sample.teacher_top_ids is not None
        assert sample.teacher_top_logprobs is not None
        for (_, sequence), ids_K2, logprobs_K2 in zip(
            sample.sequences, sample.teacher_top_ids, sample.teacher_top_logprobs, strict=True
        ):
            places = [t for start, end, _ in sequence.spans.tolist() for t in range(start, end)]
            assert ids_K2.tolist() == [[2 * t, 2 * t + 1] for t in places]
            assert logprobs_K2.tolist() == [[-2.0 * t, -2.0 * t - 1] for t in places]


def test_scores_of_an_average_are_recorded_with_its_version_and_those_of_its_file_never_count(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has just started scores with the model's file until it is sent a version."""
    asked: list[int] = []

    async def score(session: Any, url: str, sequences: list[np.ndarray], num_top: int = 0, **_: Any) -> list[Scores]:
        asked.append(len(asked))
        version = None if len(asked) <= 2 else 3
        return [
            Scores(np.full(len(ids), -9.0 if version is None else -1.0, np.float32), version=version)
            for ids in sequences
        ]

    monkeypatch.setattr(reference, "score_sequences", score)
    monkeypatch.setattr(reference, "FIRST_BACKOFF_S", 0.01)
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(2)])
    taught = ("teachers=[{ema: 0.9}]", "finetune.rl.teacher_coef=1", "world.preprocessor_fraction=1")
    ctx = make_context(run_dir, make_world(reference_servers=1), *taught)
    with preprocessor(ctx) as role:
        turn_until(role, consumed(role, 2))
    batches = read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)
    assert any(not mb.sentinel for mb in batches)
    for mb in batches:
        check_micro_batch(mb, vocab_size=10**6)
        expected = np.full(len(mb.token_ids), FROZEN, np.int32)
        for start, end, _ in mb.spans.tolist():
            expected[start:end] = 3
            assert (mb.teacher_logprobs[start:end] == -1.0).all()
        np.testing.assert_array_equal(mb.teacher_versions, expected)
    lags = [point["teacher_lag_mean"] for point in read_metrics(run_dir, "preprocessor")]
    assert lags == [step - 3 for step in range(len(lags))]
    assert lags
