"""One question and one long answer, which is correct if every step of the walk is."""

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.laps.dataset import ANTICLOCKWISE, CLOCKWISE, question, walk
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, unparsable, wrong
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("num_stations", "laps", "walker")


def judge(output: str, problem: dict[str, Any]) -> Verdict:
    """The whole walk clockwise is correct, the whole walk anticlockwise wrong. Anything else is unparsable."""
    num_stations, laps = problem["num_stations"], problem["laps"]
    if output == walk(num_stations, laps, CLOCKWISE):
        return correct()
    if output == walk(num_stations, laps, ANTICLOCKWISE):
        return wrong("the other way round")
    return unparsable("not a walk of the wanted laps")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    task = question(problem["laps"], problem["walker"])
    return await ask_and_judge(cfg, llm, problem, session, task=task, judge=lambda output: judge(output, problem))
