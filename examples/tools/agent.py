"""An agent that does not know PipelineRL: the official OpenAI client and a calculator."""

import ast
import json
import operator
from typing import cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

CALCULATOR: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes + - * of whole numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_CHARS = 100
"""A call of three numbers has 21. Products of 100 digits are computed at once."""
MAX_TURNS = 4
"""A call and an answer need two."""


def calculate(expression: str) -> int:
    """Computes sums, differences and products of whole numbers. Raises ``ValueError`` for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return cast(int, OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError("use whole numbers with + - *")

    if len(expression) > MAX_CHARS:
        raise ValueError(f"use at most {MAX_CHARS} characters")
    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError("this is no expression") from error


def call_calculator(arguments: str) -> str:
    """The tool's answer as text. A wrong call is answered, too."""
    try:
        return str(calculate(json.loads(arguments)["expression"].strip()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"


async def answer_question(client: AsyncOpenAI, question: str) -> str:
    """Returns the first answer that calls no tool, or the last one."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    content = ""
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        content = message.content or ""
        if not message.tool_calls:
            break
        messages.append(cast(ChatCompletionMessageParam, message.model_dump(exclude_none=True)))
        for call in message.tool_calls:
            arguments = call.function.arguments if call.type == "function" else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": call_calculator(arguments)})
    return content
