"""Environments of other projects, with the real libraries, in an environment that has them (`tests/library_venv.py`).

The adapters' own tests (`tests/libraries/check_*.py`) run there, and every guide's example trains five steps through
the launcher: its files as the page has them, on a tiny model that answers in the right form at random.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from pipelinerl.domains.libraries.tools import SYSTEM_PROMPT
from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.records import ActorRecord, RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.tiny_model.builder import write_model
from pipelinerl.tiny_model.recipes import Messages, Recipe
from tests.library_venv import run_there

ROOT = Path(__file__).resolve().parents[2]
CHECKS = sorted((ROOT / "tests" / "libraries").glob("check_*.py"))
BLOCK = re.compile(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS, BATCH, ATTEMPTS = 5, 16, 4
RUN_TIMEOUT_S = 900
ON_CPU = (
    "world.accelerator=cpu",
    "world.actor_fraction=1",
    "world.preprocessor_fraction=0",
    "world.finetune_fraction=1",
    "world.verifier_replicas=0",
    "use_deepspeed=false",
    "finetune.dtype=float32",
    "finetune.gradient_checkpointing=false",
    "finetune.seq_length=2048",
    f"finetune.gradient_accumulation_passes={BATCH}",
    f"finetune.max_train_steps={STEPS}",
    "finetune.learning_rate=1e-3",
    f"attempts={ATTEMPTS}",
    "max_lag_steps=3",
    "eval.max_problems=4",
    "vllm_config.vllm_kwargs.dtype=float32",
    "vllm_config.vllm_kwargs.max_model_len=1536",
    "llm.parameters.max_tokens=48",
    "test_llm.parameters.max_tokens=48",
    "weights.probe_tolerance=2e-4",
    "wandb.mode=disabled",
)


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A guide, and what the tiny model is taught of its conversations. ``#`` is a random digit."""

    page: str
    name: str = ""
    """Of the test. Empty: the page's."""
    config: str
    system: str | None = None
    asked: tuple[str, ...]
    later: tuple[str, ...] = ()
    """Questions after the first."""
    said: tuple[str, ...]
    rows: int = 0
    jobs: frozenset[str] = frozenset()
    changes: tuple[tuple[str, str], ...] = ()
    """Replacements in the page's files."""


EASY = "{min_digits: 1, max_digits: 1, min_terms: 2, max_terms: 2, operators: [+], allow_negation: false, " + (
    "allow_parentheses: false}"
)
ANSWER_PROMPT = "Answer as <answer>number</answer>."
GUESS_PROMPT = (
    "You are Player 0. You are playing Guess The Number.\n"
    "You have to guess the number between 1 and 8 within 6 turns.\n"
    "As you enter your guess, the game will provide you with hints such as 'higher' or 'lower'.\n"
    "You may provide your response in any manner. Only the number that is wrapped in square brackets will be "
    "considered as your guess. For example, [5].\n"
    "As you play, the history of your guesses will be appended below. Use the information to complete the game before "
    "you run out of guesses.\nEnter your guess."
)
SUMS = ("What is # + #?",)
CALL = '<tool_call>{"name": "add", "arguments": {"a": #, "b": #}}</tool_call>'
STDIO = f"{{command: {sys.executable}, args: [-m, sums_tools], env: {{PYTHONPATH: FOLDER}}}}"
MCP = {"page": "mcp", "config": "sums_tools", "system": SYSTEM_PROMPT, "asked": SUMS, "later": ("#", "1#"), "rows": 25}
MCP["said"] = (CALL, "<answer>#</answer>", "<answer>#</answer>")
LAKE = (ROOT / "docs" / "guides" / "gymnasium.md").read_text()
GUIDES = (
    Guide(
        page="reasoning-gym",
        config="legs",
        system=ANSWER_PROMPT,
        asked=("Calculate # + #.",),
        said=("<answer>#</answer>", "<answer>1#</answer>"),
        changes=(
            ("    leg_counting: {max_animals: 4}\n", ""),
            ("basic_arithmetic: {}", f"basic_arithmetic: {EASY}"),
            ("actor: {", f"actor: {{system_prompt: {ANSWER_PROMPT}, "),
        ),
    ),
    Guide(
        page="verifiers",
        config="sums_taskset",
        asked=SUMS,
        said=("It is #",),
        changes=(("in range(10) for b in range(10)", "in range(5) for b in range(5)"),),  # one in ten is right
    ),
    Guide(**MCP, jobs=frozenset({"environment_0"})),
    Guide(
        **MCP,
        name="mcp-stdio",
        changes=(
            ("{url: sums}", STDIO),
            ("return a + b\n", 'return a + b\n\n\nif __name__ == "__main__":\n    server.run()\n'),
            ("environments: [", "extra_keys: [was]\nwas: ["),
        ),
    ),
    Guide(
        page="textarena",
        config="guess_it",
        asked=(GUESS_PROMPT,),
        later=("The target number is higher.", "The target number is lower."),
        said=("[#]",),
    ),
    Guide(
        page="openenv",
        config="guess_env",
        asked=("Guess a number from 1 to 4.",),
        later=("no",),
        said=("1", "2", "3", "4"),
        jobs=frozenset({"environment_0"}),
    ),
    Guide(
        page="gymnasium",
        config="lake",
        system=re.search('system_prompt: "(.*)"', LAKE)[1],
        asked=("0",),
        later=("0", "1", "2", "4", "8"),
        said=("0", "1", "1", "2", "2", "3"),
    ),
)


def write_guide(folder: Path, guide: Guide) -> None:
    """Writes the page's files, its problems, and the model."""
    page = (ROOT / "docs" / "guides" / f"{guide.page}.md").read_text()
    assert page.count("\n") < 60
    for name, body in BLOCK.findall(page):
        assert not name.startswith("conf/") or body.count("\n") <= 15
        for old, new in guide.changes:
            body = body.replace(old, new.replace("FOLDER", str(folder)))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body)
    if guide.rows:
        (folder / "data").mkdir()
        rows = [{"question": f"What is {i % 5} + {i // 5}?", "answer": str(i % 5 + i // 5)} for i in range(guide.rows)]
        for part in ("train", "test"):
            (folder / "data" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def digits(rng: Random, text: str) -> str:
        return "".join(str(rng.randrange(10)) if char == "#" else char for char in text)

    def talk(rng: Random) -> Messages:
        told = [{"role": "system", "content": guide.system}] if guide.system else []
        for turn in range(rng.randint(1, 3) if guide.later else 1):
            question = digits(rng, rng.choice(guide.later if turn else guide.asked))
            answer = digits(rng, rng.choice(guide.said))
            told += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return told

    (folder / "model").mkdir()
    write_model(
        folder / "model", Recipe(tags=("<answer>", "</answer>"), max_number=99, conversation=talk, steps=150), seed=0
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_adapter_with_the_real_library(check: Path, tmp_path: Path):
    for part in ("tests", "pipelinerl", "docs", "pyproject.toml", "conf"):
        (tmp_path / part).symlink_to(ROOT / part)
    run_there("-m", "pytest", "-q", f"tests/libraries/{check.name}", folder=tmp_path, timeout_s=500)


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 300)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name or guide.page)
def test_guides_example_trains_five_steps(guide: Guide, tmp_path: Path):
    write_guide(tmp_path, guide)
    command = ["-m", "pipelinerl.launch", "--config-dir=conf", f"--config-name={guide.config}", "output_dir=run"]
    settings = [*ON_CPU, "model_path=model"]
    run_there(*command, *settings, folder=tmp_path, timeout_s=RUN_TIMEOUT_S)
    run_dir = tmp_path / "run"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["optimizer_steps"] == STEPS
    assert 0 < summary["weight_updates"] <= STEPS, "a slow server skips versions"
    assert guide.jobs <= {folder.name for folder in run_dir.iterdir()}
    ledger = read_ledger(run_dir)
    assert ledger.violations == ()
    assert ledger.counts()["trained"] == STEPS * BATCH
    with open_reader(SingleStreamSpec(run_dir, "actor"), ActorRecord, name=None) as reader:
        groups = [record for _, record in reader.read_all() if isinstance(record, RolloutGroup)]
    metrics = [rollout.metrics for group in groups for rollout in group.rollouts]
    assert len({metric["reward"] for metric in metrics}) > 1
    if guide.page == "mcp":
        assert 0 < sum(metric["num_tool_calls"] for metric in metrics) > sum(m["num_tool_errors"] for m in metrics)
