"""The domain `counting` as an agent of tapeagents, which asks the model by `agenerate`."""

import time
from typing import Any, Literal

import aiohttp
from omegaconf import DictConfig
from tapeagents.agent import DEFAULT, Agent, Node
from tapeagents.core import AgentStep, Observation, Tape

from my_domains.counting import grade, question
from pipelinerl.async_llm import make_training_text
from pipelinerl.llm import LLMStream, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult


class ProblemStep(Observation):
    kind: Literal["problem"] = "problem"
    problem: dict


class ResultsStep(AgentStep):
    kind: Literal["result"] = "result"
    results: dict


class CountingNode(Node):
    def make_prompt(self, agent: Any, tape: Tape):
        return Prompt(messages=question(tape.steps[0].problem))

    def generate_steps(self, agent: Any, tape: Tape, llm_stream: LLMStream):
        reward, error = grade(tape.steps[0].problem, llm_stream.get_output().content)
        yield ResultsStep(results={"reward": reward, "no_error": not error})


async def generate_counting_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    time_start = time.time()
    agent = Agent.create(nodes=[CountingNode()], store_llm_calls=True)
    agent.llms = {DEFAULT: llm}
    final_tape = None
    async for event in agent.arun(Tape(steps=[ProblemStep(problem=problem)]), session, max_iterations=1):
        if final_tape := event.final_tape:
            break
    assert final_tape is not None
    step = final_tape.steps[1]
    training_text = make_training_text(llm, step.metadata.other["llm_call"])
    training_text.reward = step.results["reward"]
    metrics = BaseMetrics(
        reward=step.results["reward"],
        success=step.results["reward"],
        no_error=step.results["no_error"],
        no_answer=not step.results["no_error"],
    )
    latency = time.time() - time_start
    return RolloutResult(
        training_texts=[training_text], metrics=metrics, latency=latency, dataset_name=problem["dataset"]
    )
