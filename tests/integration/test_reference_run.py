"""A whole run with a KL term: launcher, policy server, started reference server, its log-probs in the loss."""

from pathlib import Path

import numpy as np
import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import MicroBatch
from pipelinerl.streams import SingleStreamSpec, open_reader
from tests.launches import run_experiment

STEPS = 4
RUN_TIMEOUT_S = 400
OVERRIDES = (
    "world.cpu_slots=3",
    "world.preprocessor_fraction=1",
    "finetune.rl.kl_coef=0.1",
    "llm.parameters.temperature=0.8",
    f"finetune.max_train_steps={STEPS}",
    "finetune.num_warmup_steps=0",
    "eval.at_start=false",
    "eval.at_end=false",
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    run_experiment("quickstart", run_dir, *OVERRIDES, timeout_s=RUN_TIMEOUT_S)
    return run_dir


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 30)
def test_reference_logprobs_are_the_samplers_where_version_0_sampled(finished_run: Path):
    assert read_ledger(finished_run).violations == ()
    checked = 0
    with open_reader(SingleStreamSpec(finished_run, "training_data"), MicroBatch, name=None) as reader:
        for _, batch in reader.read_all():
            assert batch.ref_logprobs is not None
            for start, end, version in batch.spans.tolist():
                assert (batch.ref_logprobs[start:end] < 0).all()
                if version == 0:
                    difference = batch.ref_logprobs[start:end] - batch.logprobs[start:end]
                    assert float(np.abs(difference).max()) <= 2e-5
                    checked += end - start
    assert checked > 0


@pytest.mark.slow
def test_kl_is_zero_at_the_first_step_and_grows_as_the_policy_leaves(finished_run: Path):
    points = {point["step"]: point for point in read_metrics(finished_run, "finetune")}
    assert sorted(points) == list(range(1, STEPS + 1))
    assert 0 <= points[1]["kl_ref"] <= 1e-9
    assert points[STEPS]["kl_ref"] > 1e-6
    assert all(point["kl_coef"] == 0.1 for point in points.values())
