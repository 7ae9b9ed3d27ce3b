"""The main job, as a newcomer runs it: launcher, real vLLM, actor, preprocessor, trainer, weights over TCP.

A slow second run has a server that schedules and swaps as on a GPU (`as_on_gpu_hook`), and must learn as well.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.catalogue import undeclared
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ActorRecord, RolloutGroup, TrainerMessage, WeightUpdateSuccess
from pipelinerl.streams import SingleStreamSpec, open_reader
from tests.vllm_plugin import environment_with

RUN_TIMEOUT_S = 1800
pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S + 60)
SCHEDULED_AHEAD = "a step was scheduled before the samples of the one before were read"


def launch(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}", *overrides]


@pytest.fixture(scope="module", params=["on_cpu", pytest.param("as_on_gpu", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def finished_run(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    run_dir, env = folder / "run", environment_with(server, folder) if server == "as_on_gpu" else None
    process = subprocess.run(
        launch(run_dir), env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    return run_dir


@pytest.fixture(scope="module")
def summary(finished_run: Path) -> dict:
    return json.loads((finished_run / "summary.json").read_text())


@pytest.fixture
def groups(finished_run: Path) -> list[RolloutGroup]:
    ledger = read_ledger(finished_run)  # sets the streams backend
    assert ledger.violations == ()
    with open_reader(SingleStreamSpec(finished_run, "actor"), ActorRecord, name=None) as reader:
        return [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]


@pytest.mark.parametrize("role", ["actor", "preprocessor", "finetune"])
def test_quickstart_emits_only_declared_metrics(finished_run, role):
    names = {name for point in read_metrics(finished_run, role) for name in point} - {"step", "time"}
    assert len(names) > 10
    assert undeclared(role, names, domain_metrics=("reward", "success", "no_error", "no_answer")) == []


def test_quickstart_learns_on_held_out_problems(summary: dict):
    assert summary["success_before"] <= 0.40
    assert summary["success_after"] >= 0.68
    assert summary["optimizer_steps"] == 160
    assert 160 / 4 <= summary["weight_updates"] <= 160, "steps go at most max_lag_steps + 1 beyond the live version"
    assert summary["aborted_requests"] == 0
    assert summary["lag_steps"]["mean"] <= 3 + 7 / 64, "max_lag_steps + (attempts - 1) / batch size"


def test_quickstart_server_schedules_ahead_of_the_samples_only_as_on_a_gpu(finished_run: Path, server: str):
    log = (finished_run / "actor_llm_0" / "log.txt").read_text()
    assert (SCHEDULED_AHEAD in log) == (server == "as_on_gpu")


def test_quickstart_first_log_ratio_is_zero_trainer_and_server_agree(finished_run: Path):
    first = next(point for point in read_metrics(finished_run, "finetune") if point["step"] == 1)
    assert first["lag_max"] == 0
    assert first["logratio_abs_max"] <= 2e-5


def test_quickstart_versions_are_announced_in_order_with_their_server_up_to_the_last(finished_run: Path):
    read_ledger(finished_run)
    with open_reader(SingleStreamSpec(finished_run, "trainer"), TrainerMessage, name=None) as reader:
        updates = [m for _, m in reader.read_all() if isinstance(m, WeightUpdateSuccess)]
    versions = list(dict.fromkeys(update.version for update in updates))
    assert {update.servers for update in updates} == {("actor_llm_0",)}
    assert versions == sorted(versions)
    assert (versions[0], versions[-1]) == (0, 160)
    assert max(newer - older for older, newer in pairwise(versions)) <= 3 + 1, "max_lag_steps + 1"


def test_quickstart_exported_model_answers_like_the_policy(finished_run: Path, groups: list[RolloutGroup]):
    """The checkpoint in Hugging Face format scores the last version's own answers with the server's log-probs."""
    import torch

    newest = sorted((finished_run / "exports").glob("step_*"))[-1]
    model = AutoModelForCausalLM.from_pretrained(newest, dtype=torch.float32)
    AutoTokenizer.from_pretrained(newest)
    checked = 0
    for group in groups:
        for rollout in group.rollouts:
            (sequence,) = rollout.sequences
            if set(sequence.spans[:, 2].tolist()) != {160}:
                continue
            ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), -1)
            start = int(sequence.spans[0, 0])
            expected = logprobs[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
            assert float((expected - torch.from_numpy(sequence.logprobs)).abs().max()) <= 2e-5
            checked += 1
    assert checked > 0 or max(int(g.dispatched_version) for g in groups) < 160


def test_quickstart_run_folder_holds_what_the_readme_names(finished_run: Path):
    for name in (
        "report.html",
        "learning_curve.png",
        "conf/config.yaml",
        "metrics/finetune.jsonl",
        "metrics/actor.jsonl",
    ):
        assert (finished_run / name).stat().st_size > 0, name
    for role in ("actor_llm_0", "actor_0", "preprocessor_0", "finetune_0"):
        assert (finished_run / role / "log.txt").is_file()
        assert (finished_run / role / "start.sh").is_file()
