"""Every domain through the launcher: servers, sandbox and verifier real, the model tiny.

The model answers in each domain's format and at random, so that some answers are right: what is tested is the way from
a configuration to trained samples, not that a model of 0.1M parameters learns mathematics.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from omegaconf import OmegaConf

from examples.instructions import domain as instructions
from examples.tool_use import domain as tool_use
from pipelinerl.config.load import compose, to_container
from pipelinerl.domains import coding, countdown, counting, math
from pipelinerl.domains.coding.rollouts import instructions as coding_prompt
from pipelinerl.domains.countdown.rollouts import question
from pipelinerl.domains.libraries.tools import SYSTEM_PROMPT as TOOL_PROMPT
from pipelinerl.domains.math.rollouts import SYSTEM_PROMPT
from pipelinerl.domains.single_turn import conversation
from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.launcher.preflight import check_domain
from pipelinerl.launcher.program import launch
from pipelinerl.observability.catalogue import undeclared
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import ActorRecord, RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.tiny_model.builder import write_model
from pipelinerl.tiny_model.recipes import Messages, Recipe
from tests.launches import run_experiment

STEPS, BATCH, ATTEMPTS = 4, 32, 8
RUN_TIMEOUT_S = 300
ON_CPU = (
    "world.accelerator=cpu",
    "world.actor_fraction=1",
    "world.preprocessor_fraction=0",
    "world.finetune_fraction=1",
    "use_deepspeed=false",
    "finetune.dtype=float32",
    "finetune.gradient_checkpointing=false",
    "finetune.seq_length=2048",
    f"finetune.gradient_accumulation_passes={BATCH}",
    f"finetune.max_train_steps={STEPS}",
    "finetune.learning_rate=1e-3",
    f"attempts={ATTEMPTS}",
    "max_lag_steps=3",
    "eval.max_problems=8",
    "vllm_config.vllm_kwargs.dtype=float32",
    "vllm_config.vllm_kwargs.max_model_len=768",
    "llm.parameters.max_tokens=48",
    "test_llm.parameters.max_tokens=48",
    "weights.probe_tolerance=2e-4",
    "wandb.mode=disabled",
)


@dataclass(frozen=True)
class Talk:
    """What a domain asks and the model answers."""

    asked: Callable[[Path], list[Messages]]
    """Prompts of the domain, as it asks them."""
    said: tuple[str, ...]
    """Answers; ``#`` is a random digit."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration, and what its model says in each of its domains."""

    config: str
    overrides: tuple[str, ...] = ()
    talks: tuple[Talk, ...]
    jobs: frozenset[str] = frozenset()


def write_rows(folder: Path, config: str) -> Path:
    """Sums below ten, for `coding` as programs with tests, else as problems with an answer."""
    sums = [(f"What is {a} + {b}?", a + b) for a in range(5) for b in range(5)]
    rows = [
        {"task": task, "tests": {"inputs": ["", ""], "outputs": [f"{total}\n"] * 2}}
        if config == "coding"
        else {"task": task, "answer": str(total)}
        for task, total in sums
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asks(tasks: list[str], system: str | None = None) -> list[Messages]:
    return [conversation(OmegaConf.create({}), task, system) for task in tasks]


def math_prompts(rows: Path) -> list[Messages]:
    return asks([p["task"] for p in math.load_problems([str(rows)])], SYSTEM_PROMPT)


def coding_prompts(rows: Path) -> list[Messages]:
    return asks([p["task"] for p in coding.load_problems([str(rows)])], coding_prompt({}))


def countdown_prompts(rows: Path) -> list[Messages]:
    problems = countdown.load_problems(["train"], num_numbers=(2, 2), max_number=9, num_train_problems=64)
    return asks([question(p["numbers"], p["target"], p["use_all"]) for p in problems])


def counting_prompts(rows: Path) -> list[Messages]:
    problems = counting.load_problems(["train"], num_train_problems=64)
    return asks([f"How often does the letter '{p['letter']}' stand in '{p['word']}'?" for p in problems])


def instruction_prompts(rows: Path) -> list[Messages]:
    return asks([p["task"] for p in instructions.load_problems(["train"], num_train_problems=64)])


def tool_prompts(rows: Path) -> list[Messages]:
    problems = tool_use.load_problems(["train"], num_terms=1, max_number=5, num_train_problems=64)
    return asks([p["task"] for p in problems], TOOL_PROMPT)


DATA = ("train_dataset_names=[ROWS]", "test_dataset_names=[ROWS]")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "#*#"}}</tool_call>'
CASES = (
    Case(config="counting", talks=(Talk(counting_prompts, ("<answer>#</answer>",)),)),
    Case(
        config="math",
        overrides=(*DATA, "world.verifier_replicas=1"),
        talks=(Talk(math_prompts, ("So \\boxed{#}",)),),
        jobs=frozenset({"verifier_0"}),
    ),
    Case(config="coding", overrides=DATA, talks=(Talk(coding_prompts, ("```python\nprint(#)\n```",)),)),
    Case(
        config="tool_use",
        overrides=("dataset_loader_params.num_terms=1", "dataset_loader_params.max_number=5"),
        talks=(Talk(tool_prompts, (CALL, "<answer>#</answer>", "<answer>1#</answer>")),),
    ),
    Case(
        config="instructions", talks=(Talk(instruction_prompts, ("- old\n- light", "because it is so. That is all.")),)
    ),
    Case(
        config="multi_domain",
        overrides=(
            "domains.0.train_dataset_names=[ROWS]",
            "domains.0.test_dataset_names=[ROWS]",
            "domains.0.dataset_loader_params.columns.task=task",
            "domains.1.dataset_loader_params.num_numbers=[2, 2]",
            "+domains.1.dataset_loader_params.max_number=9",
        ),
        talks=(
            Talk(math_prompts, ("So \\boxed{#}",)),
            Talk(countdown_prompts, ("<answer>#+#</answer>",)),
            Talk(counting_prompts, ("<answer>#</answer>",)),
        ),
        jobs=frozenset({"verifier_0"}),
    ),
)


def write_parrot(folder: Path, case: Case, rows: Path) -> None:
    """A model that knows the domains' questions and answers each with any of what is ``said`` in its domain."""
    known = [(prompt, talk.said) for talk in case.talks for prompt in talk.asked(rows)]

    def talk(rng: Random) -> Messages:
        prompt, said = rng.choice(known)
        answer = "".join(str(rng.randrange(10)) if char == "#" else char for char in rng.choice(said))
        return [*prompt, {"role": "assistant", "content": answer}]

    folder.mkdir()
    write_model(folder, Recipe(tags=(), max_number=99, conversation=talk, steps=150), seed=0)


def overrides_of(case: Case, model: Path, rows: Path) -> list[str]:
    own = [override.replace("ROWS", str(rows)) for override in case.overrides]
    return [*ON_CPU, *own, f"model_path={model}"]


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config)
def test_domain_is_trained_and_evaluated_on_cpu(case: Case, tmp_path: Path):
    rows, run_dir = write_rows(tmp_path, case.config), tmp_path / "run"
    write_parrot(tmp_path / "model", case, rows)
    overrides = overrides_of(case, tmp_path / "model", rows)
    summary = run_experiment(case.config, run_dir, *overrides, timeout_s=RUN_TIMEOUT_S)
    assert (summary["optimizer_steps"], summary["weight_updates"]) == (STEPS, STEPS)
    assert summary["success_after"] is not None
    assert case.jobs <= {folder.name for folder in run_dir.iterdir()}
    ledger = read_ledger(run_dir)
    assert ledger.violations == ()
    assert ledger.counts()["trained"] == STEPS * BATCH
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        groups = [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]
    judge_worked(case, [rollout.metrics for group in groups for rollout in group.rollouts])
    domains = {domain["name"] for domain in compose(case.config, overrides).get("domains") or []}
    assert not domains or {group.domain for group in groups} == domains
    measured = {name for point in read_metrics(run_dir, "actor") for name in point}
    own = {name for group in groups for rollout in group.rollouts for name in rollout.metrics}
    assert undeclared("actor", measured - {"step", "time"}, domain_metrics=own) == []
    assert {f"{name}/success" for name in domains} <= measured
    assert len([name for name in measured if re.fullmatch(r"eval/.*/success", name)]) == max(1, len(domains))


def judge_worked(case: Case, metrics: list[dict[str, Any]]) -> None:
    """Of random answers some are right and some are wrong, and most can be read."""
    successes = sum(m["success"] for m in metrics)
    assert 0 < successes < len(metrics)
    assert sum(m["no_answer"] for m in metrics) < len(metrics) / 2
    if case.config == "tool_use":
        assert sum(m["num_tool_calls"] for m in metrics) > 0
        assert max(m["num_turns"] for m in metrics) > 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.config)
def test_shipped_configuration_passes_the_check_of_its_domain_and_a_dry_run(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """On a node of 8 GPUs, with the configuration's own model; the loader's problems are played with a scripted one."""
    rows = write_rows(tmp_path, case.config)
    own = [override.replace("ROWS", str(rows)) for override in case.overrides]
    overrides = [*own, f"output_dir={tmp_path / 'run'}", "dry_run=true", "world.gpus_per_node=8", "wandb.mode=disabled"]
    cfg = compose(case.config, overrides)
    assert launch(cfg, overrides) == 0
    shown = capsys.readouterr().out
    assert "World: " in shown
    assert all(job in shown for job in case.jobs)
    if not case.jobs:  # the verifier of the others is not up
        assert check_domain({**to_container(cfg), "jobs": []}) == []
