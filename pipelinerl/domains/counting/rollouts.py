"""The rollout of one question with one number as answer."""

import re
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, no_answer, wrong
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("word", "letter", "count")
ANSWER = re.compile(r"<answer>\s*([0-9]{1,9})\s*</answer>")


def judge(output: str, count: int) -> Verdict:
    """Judges the last number in tags."""
    answers = ANSWER.findall(output)
    if not answers:
        return no_answer()
    return correct() if int(answers[-1]) == count else wrong()


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    task = (
        f"How often does the letter '{problem['letter']}' stand in '{problem['word']}'?"
        " Think step by step, then answer as <answer>number</answer>."
    )
    return await ask_and_judge(
        cfg, llm, problem, session, task=task, judge=lambda output: judge(output, problem["count"])
    )
