"""Every public domain of PipelineRL in one run: modules in its manner, its experiment, `migrate`, three steps on CPU.

`tests/pipelinerl_user` is what a user brings: domains with PipelineRL's imports, signatures and calls, written anew,
one experiment that mixes them as its dispatcher does, and small stand-ins for tapeagents and SandboxFusion.
The environment servers are the domains' own, the verifier is ours. Charts are not here: images are another test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import compose
from pipelinerl.config.migrate.__main__ import main as migrate
from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.launcher.program import launch
from pipelinerl.records import ActorRecord, RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.tiny_model.builder import write_model
from pipelinerl.tiny_model.recipes import Messages, Recipe

ROOT = Path(__file__).resolve().parents[2]
USER = ROOT / "tests" / "pipelinerl_user"
RUN_TIMEOUT_S = 500
STEPS, BATCH, ATTEMPTS = 3, 30, 2
ON_CPU = (
    "world.accelerator=cpu",
    "world.gpus_per_node=null",
    "world.actor_fraction=1",
    "world.finetune_fraction=1",
    "use_deepspeed=false",
    "finetune.dtype=float32",
    "finetune.gradient_checkpointing=false",
    "finetune.seq_length=2048",
    "finetune.learning_rate=1e-3",
    "vllm_config.vllm_kwargs.dtype=float32",
    "vllm_config.vllm_kwargs.max_model_len=768",
    "vllm_config.vllm_kwargs.max-num-batched-tokens=1024",
    "llm.parameters.max_tokens=40",
    "test_llm.parameters.max_tokens=40",
    "weights.probe_tolerance=2e-4",
)
"""What a run on two cores needs, beside the experiment."""
TOOL = '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>'
SAID = {
    "guessing": ["<answer>#</answer>"],
    "counting": ["<answer>#</answer>"],
    "math": ["So \\boxed{#}", "\\boxed{2 * #}"],
    "coding": ["```python\nprint(#)\n```"],
    "fn_calling": ['<tool_calls>[{"name": "add", "arguments": {"a": #}}]</tool_calls>'],
    "logic": ["yes", "no"],
    "ifeval": ["warm", "warm light"],
    "tir": [
        *[TOOL.replace("NAME", "run_python_code").replace("ARGUMENT", "code").replace("VALUE", "print(#*#)")] * 5,
        TOOL.replace("NAME", "MathAnswer").replace("ARGUMENT", "answer").replace("VALUE", "\\\\boxed{#}"),
    ],
    "web": ['{"bid": "#"}'],
}
"""What the tiny model answers at random; ``#`` is a digit. What a test counts on is likely in each of six rollouts."""


def prompt_of(problem: dict[str, Any]) -> Messages:
    """What the domain asks first."""
    from my_domains import counting, guessing

    match problem["domain"]:
        case "guessing":
            return [{"role": "user", "content": guessing.QUESTION}]
        case "counting":
            return counting.question(problem)
        case "fn_calling":
            tools = json.dumps([{"name": "add"}])
            return [{"role": "system", "content": tools}, {"role": "user", "content": problem["task"]}]
        case "web":
            return [{"role": "user", "content": f"{problem['task']} Answer in JSON."}]
    return [{"role": "user", "content": problem["task"]}]


def write_parrot(folder: Path) -> None:
    """A model that knows how the answers of each domain look, and none of them."""
    sys.path.insert(0, str(USER))
    try:
        from my_domains import loader
    finally:
        sys.path.remove(str(USER))
    params = {"fn_calling": {"categories": ["simple"]}}
    asked: dict[str, list[Messages]] = {}
    for problem in loader.load_datasets([f"{name}::train" for name in SAID], per_domain_params=params):
        asked.setdefault(problem["domain"], []).append(prompt_of(problem))

    def talk(rng: Random) -> Messages:
        domain = rng.choice(list(SAID))
        said = "".join(str(rng.randrange(10)) if char == "#" else char for char in rng.choice(SAID[domain]))
        return [*rng.choice(asked[domain]), {"role": "assistant", "content": said}]

    folder.mkdir()
    write_model(folder, Recipe(tags=("<answer>", "</answer>"), max_number=9, conversation=talk, steps=120), seed=0)


def execute(*command: str, folder: Path) -> None:
    """Runs a command of `pipelinerl`, which must succeed, with the user's modules in reach."""
    paths = os.pathsep.join([str(ROOT), str(USER)])
    env = os.environ | {"PYTHONPATH": paths, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl", *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def run_on_cpu(name: str, folder: Path, *overrides: str) -> Path:
    """Migrates the old folder by the command, and runs an experiment of the new one. Returns the run's folder."""
    write_parrot(folder / "model")
    execute("migrate", str(USER / "conf"), "--to", "new", folder=folder)
    given = (f"--config-dir={folder / 'new'}", f"--config-name={name}", f"model_path={folder / 'model'}")
    execute("launch", *given, f"output_dir={folder / 'run'}", *ON_CPU, *overrides, folder=folder)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["optimizer_steps"] == STEPS
    assert 1 <= summary["weight_updates"] <= STEPS, "a version is skipped while servers still take the one before"
    assert read_ledger(folder / "run").violations == ()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_every_domain_of_an_old_folder_is_trained_after_the_migration_alone(tmp_path: Path) -> None:
    run_dir = run_on_cpu("mixed", tmp_path, "finetune.batch_unit=rollouts")  # the number of groups is known then
    assert read_ledger(run_dir).counts()["trained"] == STEPS * BATCH
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        groups = [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]
    played: dict[str, list[dict[str, float]]] = {}
    for group in groups[: STEPS * BATCH // ATTEMPTS]:
        played.setdefault(json.loads(group.problem)["domain"], []).extend(one.metrics for one in group.rollouts)
    assert set(played) == set(OmegaConf.load(USER / "conf" / "mixed.yaml").actor.domain_rollouts)
    assert {len(metrics) for metrics in played.values()} <= {STEPS * ATTEMPTS, 2 * STEPS * ATTEMPTS}
    unread = {domain for domain, metrics in played.items() if all(m["no_answer"] for m in metrics)}
    assert unread <= {"web", "tir"}, "a click beside the button is no answer, nor is a tool call that hands nothing in"
    assert sum(m["num_python_calls"] for m in played["tir"]) > 0
    assert sum(m["n_llm_calls"] - m["n_step_errors"] for m in played["web"]) > 0
    assert len(list((run_dir / "tapes").iterdir())) >= len(played["web"])


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_example_of_the_readme_is_trained_after_the_migration_alone(tmp_path: Path) -> None:
    batch = ("attempts=4", "finetune.gradient_accumulation_passes=16", f"finetune.max_train_steps={STEPS}")
    run_on_cpu("guessing", tmp_path, *batch, "eval_every_n_versions=0", "eval.max_problems=4", "wandb.mode=disabled")


@pytest.mark.parametrize("name", ["guessing", "counting", "math", "mixed"])
def test_every_experiment_of_an_old_folder_is_shown_by_a_dry_run(
    name: str, new_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    overrides = [f"output_dir={new_folder / 'run'}", "dry_run=true", "world.gpus_per_node=8", "wandb.mode=disabled"]
    assert launch(compose(name, overrides, config_dir=new_folder), overrides) == 0
    assert "nothing was started" in capsys.readouterr().out


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("migrated")
    assert migrate([str(USER / "conf"), "--to", str(folder)]) == 0
    return folder
