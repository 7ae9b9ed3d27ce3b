"""Twelve small repositories with a planted bug each. An agent mends one in a workspace, and a hidden test judges it."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.sandbox import Limits
from pipelinerl.domains.workspace import (
    HiddenTest,
    JailWorkspace,
    Workspace,
    count_passed,
    pack_folder,
    run_agent_in_workspace,
)
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

FOLDER = Path(__file__).parent
AGENT = FOLDER / "agent.py"
TASKS: dict[str, dict[str, Any]] = json.loads((FOLDER / "hidden" / "tasks.json").read_text(encoding="utf-8"))
"""By repository: the issue, the lines that its hidden test prints, and a command that mends it."""
HELD_OUT = ("slugs", "sums")
LIMITS = Limits(cpu_s=60, wall_s=120.0, memory_mb=512, disk_mb=16, processes=32, limit_addresses=False)


def load_problems(dataset_names: list[str]) -> list[dict[str, Any]]:
    """Returns ten repositories as `train` and two as `test`."""
    return [
        {"repository": name, "question": question(name), "dataset": dataset}
        for dataset in dataset_names
        for name in sorted(TASKS)
        if (name in HELD_OUT) == (dataset == "test")
    ]


def question(name: str) -> str:
    """Returns the agent's task."""
    return f"Mend {name}.py: {TASKS[name]['issue']} Answer with a command: $ ..."


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """The reward is 1 if the hidden test passes in a copy of the workspace, else 0."""
    name = problem["repository"]
    test = HiddenTest(stdin=content(f"hidden/{name}.py").decode(), prints="\n".join(TASKS[name]["prints"]))

    async def judge(copy: Workspace | None) -> tuple[float, bool]:
        mended = copy is not None and await count_passed(copy, [test]) == 1
        return float(mended), mended

    return await run_agent_in_workspace(
        llm,
        session,
        ["python3", str(AGENT), str(cfg.environment.turns)],
        content(f"repositories/{name}"),
        judge,
        make=partial(JailWorkspace.make, limits=LIMITS, readable=[str(AGENT)]),
        stdin=problem["question"],
        dataset_name=problem["dataset"],
    )


@cache
def content(path: str) -> bytes:
    """Returns a file's bytes, or a folder as a workspace's content."""
    return (FOLDER / path).read_bytes() if (FOLDER / path).is_file() else pack_folder(FOLDER / path)
