"""Answers that live through weight updates, from the launcher to the trainer, with a real server."""

from pathlib import Path

import numpy as np
import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import (
    ActorRecord,
    ProbeMissed,
    Rollout,
    RolloutGroup,
    TrainerMessage,
    WeightUpdateSuccess,
)
from pipelinerl.streams import SingleStreamSpec, open_reader
from tests.launches import run_experiment

STEPS = 8
SHORT = (
    f"finetune.max_train_steps={STEPS}",
    "finetune.save_checkpoint_steps=1000",
    "++tiny_model.params.steps=60",
    "dataset_loader_params.min_laps=3",
    "dataset_loader_params.max_laps=6",
    "llm.parameters.max_tokens=320",
    "actor.llm_max_rollouts=64",
    "preprocess.overlong_filtering=false",
    "eval.at_start=false",
    "eval.at_end=false",
)
BFLOAT16 = (
    "finetune.max_train_steps=20",
    "finetune.dtype=bfloat16",
    "vllm_config.vllm_kwargs.dtype=bfloat16",
    "weights.probe_tolerance=0.2",
    "++tiny_model.params.layers=24",
    "++tiny_model.params.heads=1",
    "++tiny_model.params.steps=40",
)
STARTUP_S = 60
LATE = (
    "finetune.max_train_steps=1",
    "+llm.parameters.ignore_eos=true",
    "actor.request_timeout_s=1700",
    "actor.rollout_timeout_s=1700",
    f"launcher.startup_timeout_s={STARTUP_S}",
    "launcher.max_restarts=0",
)


def rollouts_of(folder: Path) -> list[Rollout]:
    ledger = read_ledger(folder)  # sets the streams backend
    assert ledger.violations == ()
    with open_reader(SingleStreamSpec(folder, "actor"), ActorRecord, name=None) as reader:
        groups = [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_live_through_weight_updates_and_are_trained_exactly(tmp_path: Path):
    folder = tmp_path / "run"
    summary = run_experiment("long_tiny", folder, *SHORT, timeout_s=580)
    assert summary["optimizer_steps"] == STEPS
    assert summary["rollouts_trained"] == 32 * STEPS
    rollouts = rollouts_of(folder)
    versions = []
    for rollout in rollouts:
        (sequence,) = rollout.sequences
        start, end, version = sequence.spans.T
        assert np.array_equal(start[1:], end[:-1]), "spans of versions follow each other without a gap"
        assert (np.diff(version) > 0).all()
        assert end[-1] - start[0] == len(sequence.logprobs)
        versions.append(len(version))
    assert max(versions) >= 3
    steps = [point for point in read_metrics(folder, "finetune") if "logratio_abs_max" in point]
    assert steps[0]["lag_max"] == 0
    assert steps[0]["logratio_abs_max"] <= 1e-4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bfloat16_with_24_layers_trains_20_steps_and_no_server_is_expelled(tmp_path: Path):
    folder = tmp_path / "run"
    summary = run_experiment("long_tiny", folder, *SHORT[1:], *BFLOAT16, timeout_s=1780)
    assert summary["optimizer_steps"] == 20
    rollouts_of(folder)
    with open_reader(SingleStreamSpec(folder, "trainer"), TrainerMessage, name=None) as reader:
        messages = [message for _, message in reader.read_all()]
    assert [message for message in messages if isinstance(message, ProbeMissed)] == []
    updates = [message for message in messages if isinstance(message, WeightUpdateSuccess)]
    assert (updates[0].version, updates[-1].version) == (0, 20)
    assert {update.servers for update in updates} == {("actor_llm_0",)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("longest", "attempts"), [(4000, 32), (8000, 8)])
def test_first_data_may_come_later_than_a_role_may_start(tmp_path: Path, longest: int, attempts: int):
    """One group of long answers of 24 layers. Trainer and preprocessor are ready and wait, which is no fault.

    The server samples an eighth of the group at a time, so that a fast machine needs longer than a role may start, too.
    """
    folder, length = tmp_path / "run", longest + 96
    lengths = (
        f"attempts={attempts}",
        f"finetune.gradient_accumulation_passes={attempts}",
        f"llm.parameters.max_tokens={longest}",
        f"vllm_config.vllm_kwargs.max_model_len={length}",
        f"finetune.seq_length={length}",
        f"++tiny_model.params.positions={length}",
        f"vllm_config.vllm_kwargs.max-num-seqs={attempts // 8}",
    )
    summary = run_experiment("long_tiny", folder, *SHORT[1:], *BFLOAT16[1:], *LATE, *lengths, timeout_s=1780)
    assert summary["optimizer_steps"] == 1
    trained = rollouts_of(folder)[:attempts]
    assert [len(sequence.logprobs) for rollout in trained for sequence in rollout.sequences] == [longest] * attempts
    (step,) = read_metrics(folder, "finetune")
    assert step["wait_s"] > STARTUP_S, "answers too fast for this test to mean anything"
