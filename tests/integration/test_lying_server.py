"""Two real vLLM servers, one of which swallows every update from some version on: the run goes on without it."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.actor.publish_gate import newest_version
from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ActorRecord, ProbeMissed, RolloutGroup, TrainerMessage, WeightUpdateSuccess
from pipelinerl.streams import SingleStreamSpec, open_reader
from tests.vllm_plugin import environment_with

LIAR, SINCE, PROBE_S = "actor_llm_1", 3, 2.0
STEPS = 16
RUN_TIMEOUT_S = 1800


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("backend", ["push", "store"])
def test_real_server_that_swallows_updates_is_expelled_and_its_samples_are_not_trained(
    tmp_path: Path, backend: str
) -> None:
    run_dir = tmp_path / "run"
    given = [
        f"output_dir={run_dir}",
        f"finetune.max_train_steps={STEPS}",
        "world.cpu_slots=3",
        "world.actor_fraction=2",
        "eval_every_n_versions=0",
        "launcher.startup_timeout_s=900",
        *([] if backend == "push" else ["weights.backend=store", f"weights.store={tmp_path / 'store'}"]),
    ]
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", *given]
    lies = {"LIAR_SERVER": LIAR, "LIAR_SINCE": str(SINCE), "LIAR_PROBE_S": str(PROBE_S)}
    env = environment_with("liar", tmp_path) | lies
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    ledger = read_ledger(run_dir)  # sets the streams backend
    with open_reader(SingleStreamSpec(run_dir, "trainer"), TrainerMessage, name=None) as reader:
        messages = [message for _, message in reader.read_all()]
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        groups = [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]
    misses = [message for message in messages if isinstance(message, ProbeMissed)]
    assert [(miss.server, miss.is_final) for miss in misses] == [(LIAR, False), (LIAR, True)]
    assert all(miss.since <= SINCE <= miss.version for miss in misses)
    assert all("are not the bytes that it received" in miss.reason for miss in misses)
    after = [message for message in messages[messages.index(misses[1]) :] if isinstance(message, WeightUpdateSuccess)]
    assert {(message.servers, tuple(message.older)) for message in after} == {(("actor_llm_0",), ())}
    assert after[-1].version == STEPS

    of_liar = [rollout for group in groups for rollout in group.rollouts if LIAR in rollout.servers]
    assert of_liar
    assert max(map(newest_version, of_liar)) < misses[0].since
    assert ledger.violations == ()
    refused = ledger.refused.get(LIAR, 0)  # 0 when the probe comes before any rollout of the swallowed version ends
    assert set(ledger.refused) <= {LIAR}
    last = read_metrics(run_dir, "actor")[-1]
    assert last.get(f"refused/{LIAR}", 0) == refused
    assert f"published_before_miss/{LIAR}" not in last
