"""A domain of pictures through the launcher: servers, preprocessor and trainer real, the model tiny."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ActorRecord, MicroBatch, RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_reader
from tests.launches import run_experiment
from tests.vision import save_idefics3

STEPS, BATCH, ATTEMPTS = 3, 16, 4
TOLERANCE = 2e-5
"""Nats between server and trainer in float32, as for text."""
OVERRIDES = (
    "dataset_loader=tests.pictures.load_problems",
    "actor.rollout_policy=tests.pictures.generate_rollout",
    "train_dataset_names=[train]",
    "world.accelerator=cpu",
    "world.actor_fraction=1",
    "world.preprocessor_fraction=0",
    "world.finetune_fraction=1",
    "use_deepspeed=false",
    "finetune.dtype=float32",
    "finetune.seq_length=1024",
    f"finetune.gradient_accumulation_passes={BATCH}",
    f"finetune.max_train_steps={STEPS}",
    "finetune.learning_rate=1e-3",
    f"attempts={ATTEMPTS}",
    "max_lag_steps=0",
    "vllm_config.vllm_kwargs.dtype=float32",
    "vllm_config.vllm_kwargs.max_model_len=512",
    "llm.parameters.max_tokens=24",
    "test_llm.parameters.max_tokens=24",
    "wandb.mode=disabled",
)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("packing", [True, False])
def test_domain_of_pictures_is_trained_on_what_the_server_saw(
    packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    model, run_dir = save_idefics3(tmp_path / "model"), tmp_path / "run"
    layout = f"finetune.seq_packing={str(packing).lower()}"
    summary = run_experiment("base", run_dir, *OVERRIDES, f"model_path={model}", layout, timeout_s=360)
    assert (summary["optimizer_steps"], summary["weight_updates"]) == (STEPS, STEPS)
    ledger = read_ledger(run_dir)
    assert ledger.violations == ()
    assert ledger.counts()["trained"] == STEPS * BATCH
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        rollouts = [r for _, group in reader.read_all() if isinstance(group, RolloutGroup) for r in group.rollouts]
    assert all(len(rollout.images) == 1 for rollout in rollouts)
    with open_reader(SingleStreamSpec(run_dir, "training_data"), MicroBatch, name=None) as reader:
        batches = [batch for _, batch in reader.read_all() if not batch.sentinel]
    assert all(len(set(batch.images)) == len(batch.images) for batch in batches)
    assert sum(len(batch.image_spans) for batch in batches) == STEPS * BATCH
    points = read_metrics(run_dir, "finetune")
    measured = [
        point[TrainerMetric.LOGRATIO_ABS_MAX_LAG0] for point in points if TrainerMetric.LOGRATIO_ABS_MAX_LAG0 in point
    ]
    assert len(measured) == STEPS
    assert max(measured) <= TOLERANCE
    exported = run_dir / "exports" / f"step_{STEPS}"
    assert (exported / "processor_config.json").read_bytes() == (model / "processor_config.json").read_bytes()
    assert load_file(exported / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
