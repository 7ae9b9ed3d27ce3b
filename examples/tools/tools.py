"""Stories with numbers of three digits, answered by an agent with a calculator: imitation of the call, then rewards.

python -m examples.tools.tools --rows 200 --seed 0 > results/tools.jsonl    conversations to imitate
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.arithmetic.arithmetic import NAMES, THINGS, judge
from examples.imitation import print_conversations
from examples.tools.agent import CALCULATOR, answer_question, calculate, call_calculator
from pipelinerl.agents import record_agent
from pipelinerl.domains.datasets import Problem, generate_problems, is_held_out
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

STORIES = (
    ("{name} has {} {things} and finds {} more.", "+"),
    ("{name} buys {} {things} on Monday and {} on Tuesday.", "+"),
    ("{name} has {} {things} and loses {} of them.", "-"),
    ("Of {} {things} in a shop, {name} buys {}. The others stay.", "-"),
    ("{name} has {} boxes with {} {things} in each.", "*"),
    ("{} friends of {name} bring {} {things} each.", "*"),
    ("{name} fills {} boxes with {} {things} each and has {} left over.", "*+"),
    ("{name} has {} {things} and buys {} boxes with {} in each.", "+*"),
    ("{name} has {} bags with {} {things} in each and gives {} of the {things} away.", "*-"),
    ("{name} has {} {things}, finds {} more and then loses {}.", "+-"),
    ("{name} has {} {things}, loses {} of them and then buys {}.", "-+"),
    ("{name} has {} {things}. One friend brings {} more, another one {}.", "++"),
)
"""Stories and the operators between their numbers, in the order of the text."""
FORM = "Use the calculator and end with: The answer is N."


def draw_numbers(rng: Random, count: int) -> list[int]:
    """Three digits each, so that no sum or product of them is known by heart."""
    return [rng.randint(100, 999) for _ in range(count)]


def joined(numbers: Sequence[int], operators: Sequence[str]) -> str:
    """``joined([1, 2, 3], "+*")`` is ``1 + 2 * 3``."""
    return str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(operators, numbers[1:], strict=True))


def draw_story(rng: Random) -> tuple[str, list[int], str]:
    """Draws a question, its numbers in the order of the text, and the operators between them."""
    text, operators = rng.choice(STORIES)
    numbers = draw_numbers(rng, len(operators) + 1)
    while calculate(joined(numbers, operators)) < 0:
        numbers = draw_numbers(rng, len(operators) + 1)
    things = rng.choice(THINGS)
    story = text.format(*numbers, name=rng.choice(NAMES), things=things)
    return f"{story} How many {things} are there now? {FORM}", numbers, operators


def load_problems(
    dataset_names: list[str], num_train_problems: int = 4096, num_test_problems: int = 256, seed: int = 0
) -> list[Problem]:
    """Generates problems ``{"dataset", "question", "answer"}``. ``test`` is the same for every seed."""

    def draw(rng: Random, held_out: bool) -> Problem:
        while is_held_out((story := draw_story(rng))[0]) != held_out:
            pass
        question, numbers, operators = story
        return {"question": question, "answer": calculate(joined(numbers, operators))}

    return generate_problems(
        "tools",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
    )


required_problem_keys = ("question", "answer")


class ToolMetrics(BaseMetrics):
    """Calls and answers, apart."""

    calls: float
    right_call: float
    """Whether the result of a call is the right answer, whatever the answer says."""


def figures(means: Mapping[str, float]) -> dict[str, float]:
    """What `benchmarks.recipe` adds to an evaluation."""
    return {name: means[name] for name in ("calls", "right_call")}


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    # Loopback needs neither a proxy nor TLS, whose context would cost more than the rollout.
    async with record_agent(llm, session) as agent, DefaultAsyncHttpxClient(verify=False, trust_env=False) as http:
        client = AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, http_client=http, max_retries=0)
        answer = await answer_question(client, problem["question"])
        verdict = judge(answer, problem["answer"])
        is_right = verdict.status == "correct"
        result = agent.result(
            reward=float(is_right),
            success=is_right,
            no_answer=verdict.status == "no_answer",
            dataset_name=problem["dataset"],
        )
        calls = [call.function.arguments for made in agent.calls for call in made.output.tool_calls or []]
    right = any(call_calculator(arguments) == str(problem["answer"]) for arguments in calls)
    result.metrics = ToolMetrics(**result.metrics.model_dump(), calls=len(calls), right_call=float(right))
    return result


def imitated(question: str, expression: str) -> dict[str, Any]:
    """A conversation in which the expression is called and its result is the answer."""
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    result = str(calculate(expression))
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "0", "content": result},
        {"role": "assistant", "content": f"The answer is {result}."},
    ]
    return {"messages": messages, "tools": [CALCULATOR]}


def conversations(rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Calls with the numbers of stories that are not in ``test``, and operators by chance."""
    rng, left = Random(f"imitate {seed}"), rows
    while left:
        question, numbers, operators = draw_story(rng)
        if not is_held_out(question):
            left -= 1
            yield imitated(question, joined(numbers, rng.choices("+-*", k=len(operators))))


if __name__ == "__main__":
    print_conversations(__doc__, conversations)
