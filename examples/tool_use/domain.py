"""Questions to be answered with tools: a calculator, and a Python interpreter in the sandbox.

The questions are long arithmetic generated from a seed, or come with numeric answers from files and the Hub. The model
may call tools before it answers, and every turn gets the rollout's reward. The tools are described in OpenAI's format
and report their failures to the model as text.
"""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.columns import checked_columns
from pipelinerl.domains.countdown.judge import ExpressionError, evaluate
from pipelinerl.domains.datasets import Problem, generate_problems, is_held_out
from pipelinerl.domains.libraries.tools import DEFAULT_MAX_TURNS, MAX_RESULT_CHARS, answer_with_tools
from pipelinerl.domains.math.dataset import problem_of
from pipelinerl.domains.math.reference import refuse_placeholder
from pipelinerl.domains.rows import MAX_LEFT_OUT
from pipelinerl.domains.sandbox import ProgramRunner
from pipelinerl.domains.sandbox.choice import runner_of
from pipelinerl.errors import DomainError
from pipelinerl.llm import ToolCall, TrainableLLM
from pipelinerl.rollouts import RolloutResult


def draw_expression(rng: Random, num_terms: int, max_number: int) -> str:
    """Draws a chain of sums and differences of products."""
    terms = [f"{rng.randint(2, max_number)} * {rng.randint(2, max_number)}" for _ in range(num_terms)]
    text = terms[0]
    for term in terms[1:]:
        text += f" {rng.choice('+-')} {term}"
    return text


def load_problems(
    dataset_names: list[str],
    num_terms: int = 3,
    max_number: int = 9999,
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    columns: dict[str, str] | None = None,
    seed: int = 0,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[Problem]:
    """Loads problems ``{"dataset", "task", "answer"}``.

    Args:
        dataset_names: ``train`` and ``test`` are generated. Other names are read (``pipelinerl.domains.datasets``).
        num_terms: products in a generated expression.
        max_number: largest number in it.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        columns: field → column of data sets that are read: ``{"task": …, "answer": …}``.
        seed: of ``train``. ``test`` is the same for every seed.
        max_left_out: largest share of the rows read that may lack a question or an answer. They are left out.
    """
    if max_number < 2 or num_terms < 1:
        raise DomainError(f"num_terms={num_terms}, max_number={max_number}: use at least 1 and 2")

    named = checked_columns(columns, ("task", "answer"))

    def draw(rng: Random, held_out: bool) -> Problem:
        while is_held_out(expression := draw_expression(rng, num_terms, max_number)) != held_out:
            pass
        return {"task": f"What is {expression}?", "answer": str(evaluate(expression).value)}

    return generate_problems(
        "tool_use",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
        read=lambda row, index: read_problem(row, named) | {"id": index},
        max_left_out=max_left_out,
    )


def read_problem(row: dict[str, Any], columns: dict[str, str]) -> Problem:
    problem = problem_of(row, columns)
    refuse_placeholder(problem["answer"])
    return problem


def tool_schema(name: str, description: str, argument: str, what: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": what}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = {
    "calculator": tool_schema(
        "calculator", "Computes an arithmetic expression exactly.", "expression", "Numbers, + - * / and brackets."
    ),
    "python": tool_schema("python", "Runs a Python program and returns what it prints.", "code", "The program."),
}


async def call_tool(call: ToolCall, runner: ProgramRunner) -> str:
    """Runs a tool and returns its result as text for the model. A failing program is a result too.

    Raises:
        VerifierError: the sandbox failed.
    """
    functions: dict[str, tuple[str, Callable[[str], Awaitable[str]]]] = {
        "calculator": ("expression", calculate),
        "python": ("code", lambda code: run_program(code, runner)),
    }
    if call.function.name not in functions:
        return f"error: there is no tool {call.function.name[:50]!r}"
    argument, function = functions[call.function.name]
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return "error: the arguments are not JSON"
    if not isinstance(arguments, dict) or not isinstance(arguments.get(argument), str):
        return f"error: the argument `{argument}` must be a text"
    return (await function(arguments[argument]))[:MAX_RESULT_CHARS]


async def calculate(expression: str) -> str:
    try:
        return str(evaluate(expression).value)
    except ExpressionError as error:
        return f"error: {error}"


async def run_program(code: str, runner: ProgramRunner) -> str:
    (outcome, *_) = await runner.run_python(code, [""])
    if outcome.ended == "exited" and outcome.exit_code == 0:
        return outcome.stdout or "(no output)"
    reason = outcome.stderr.strip()[-500:] if outcome.ended == "exited" else f"ended by {outcome.ended}"
    return f"{outcome.stdout}error: {reason}"


required_problem_keys = ("task", "answer")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout. ``cfg.environment`` may set ``tools`` (names, default all) and ``max_turns`` (LLM calls)."""
    settings = cfg.get("environment") or {}
    tools = [TOOLS[name] for name in settings.get("tools", list(TOOLS))]
    call = partial(call_tool, runner=runner_of(cfg, session))
    max_turns = settings.get("max_turns", DEFAULT_MAX_TURNS)
    return await answer_with_tools(cfg, llm, problem, session, tools=tools, call_tool=call, max_turns=max_turns)
