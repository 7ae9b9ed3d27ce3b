"""The trainer at the sizes of real runs: long sequences, many attempts, in packed micro-batches."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.synthetic_batches import SyntheticSample, pack
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.loop import Trainer
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import MicroBatch
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from tests.models import save_qwen2
from tests.sizes.kit import SIZES, VOCAB
from tests.trainer_kit import FakeSender, trainer_context

FAST = [(1, 64), (8000, 1)]
TOO_SLOW = [(32_000, 64)]
"""Attention over 2 million tokens in sequences of 32,000: a quarter of an hour of two cores."""
LOGPROB = -float(np.log(VOCAB))


def sample(name: str, tokens: int, step: int) -> SyntheticSample:
    total = 4 + tokens
    trained = np.arange(total) >= 4
    return SyntheticSample(
        token_ids=(np.arange(total) % VOCAB).astype(np.int32),
        spans=np.array([(4, total, step)], np.int32),
        logprobs=np.where(trained, LOGPROB, 0).astype(np.float32),
        advantages=trained.astype(np.float32),
        ref_logprobs=np.zeros(total, np.float32),
        weight=1.0,
        reward=1.0,
        name=name,
    )


def train(run_dir: Path, steps: int, seq_length: int, *overrides: str) -> FakeSender:
    given = [f"output_dir={run_dir}", f"model_path={run_dir / 'model'}", "dataset_loader=a.b", "wandb.mode=disabled"]
    cfg = compose(
        "base",
        [
            *(*given, "actor.rollout_policy=a.b", "finetune.dtype=float32", f"finetune.max_train_steps={steps}"),
            *(f"finetune.seq_length={seq_length}", "finetune.learning_rate=1e-3", "finetune.num_warmup_steps=0"),
            *overrides,
        ],
    )
    sender = FakeSender(keeps_weights=False)
    Trainer(trainer_context(run_dir, parse(cfg)), sender).run()
    return sender


@pytest.mark.parametrize(
    ("length", "attempts"),
    [pytest.param(*s, marks=[] if s in FAST else pytest.mark.slow) for s in SIZES if s not in TOO_SLOW],
)
def test_sequences_of_any_size_are_trained(tmp_path: Path, length: int, attempts: int) -> None:
    """The likelihood of what is trained rises, so its mean log-ratio to the sampler's falls (`kl_k1`)."""
    save_qwen2(tmp_path / "model", VOCAB, max_position_embeddings=40_000)
    set_streams_backend("files")
    per_batch = max(1, 33_000 // (length + 4))
    with open_writer(SingleStreamSpec(tmp_path, "training_data"), MicroBatch) as writer:
        for step in range(2):
            samples = [sample(f"{step}-{i}/0/0", length, step) for i in range(attempts)]
            bins = [list(range(i, min(i + per_batch, attempts))) for i in range(0, attempts, per_batch)]
            for batch in pack(samples, bins, step, ref=False):
                weights = np.full(len(batch.segment_lengths), 1 / (attempts * length), np.float32)
                writer.write(msgspec.structs.replace(batch, segment_weights=weights))
    sender = train(tmp_path, 2, 33_000)
    points = {point["step"]: point for point in read_metrics(tmp_path, "finetune")}
    assert [version for version, _ in sender.received] == [0, 1, 2]
    assert points[1]["tokens"] == points[2]["tokens"]
    assert points[2]["kl_k1"] < points[1]["kl_k1"]
