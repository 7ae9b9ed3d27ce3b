"""The quickstart on one shared GPU, with both of vLLM's model runners: it learns, and every update is swapped in place.

Its twins on the CPU are `tests/integration/test_gpu_check.py`, which judges a run by the same facts, and
`tests/faults/test_roles_killed.py`.
"""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.struck_run import Strike, run_struck
from pipelinerl.inspect.finding import Level
from pipelinerl.launcher.gpu_check.checks import experiment, find_machine
from pipelinerl.launcher.gpu_check.verdicts import LEARNING_STEPS, judge_quickstart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize("runner", ["0", "1"])
def test_quickstart_learns_on_one_shared_gpu(runner: str, tmp_path: Path) -> None:
    machine, imports = find_machine("cuda", 300)
    assert machine is not None, imports
    options = [f"finetune.max_train_steps={LEARNING_STEPS}"]
    env = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    facts = experiment(f"runner {runner}", machine, tmp_path / "run", options, 1000, env)
    assert not facts["problem"], facts
    assert [verdict.level for verdict in judge_quickstart(machine, facts)] == [Level.PASSED] * 2, facts
    assert facts["attention_backend"], "vLLM's log does not name the attention backend"
    assert facts["has_graphs"]


def test_server_and_trainer_that_are_killed_come_back_and_the_run_learns(tmp_path: Path) -> None:
    """The next server gets weights over CUDA IPC again, and so does the next trainer's server."""
    machine, imports = find_machine("cuda", 300)
    assert machine is not None, imports
    strikes = [Strike(job="actor_llm_0", step=15), Strike(job="finetune_0", step=50)]
    overrides = [*machine.run_options, "finetune.save_checkpoint_steps=10"]
    struck = run_struck(tmp_path / "run", strikes, overrides, steps=110, timeout_s=1000)
    assert struck.problems == [], struck.output[-4000:]
    assert struck.restarts == {"actor_llm_0": 1, "finetune_0": 1}
    assert struck.success is not None
    assert struck.success >= 0.6, struck.output[-2000:]
