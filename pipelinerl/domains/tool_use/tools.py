"""The tools, with descriptions in OpenAI's format. A tool reports its failure to the model as text."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from pipelinerl.domains.coding.judge import Runner
from pipelinerl.domains.countdown.expression import ExpressionError, evaluate
from pipelinerl.llm import ToolCall

MAX_RESULT_CHARS = 2000


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


async def call_tool(call: ToolCall, runner: Runner) -> str:
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


async def run_program(code: str, runner: Runner) -> str:
    (outcome, *_) = await runner.run_python(code, [""])
    if outcome.ended == "exited" and outcome.exit_code == 0:
        return outcome.stdout or "(no output)"
    reason = outcome.stderr.strip()[-500:] if outcome.ended == "exited" else f"ended by {outcome.ended}"
    return f"{outcome.stdout}error: {reason}"
