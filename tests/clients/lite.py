"""LiteLLM in a loop of one's own: Chat Completions, Responses or Messages. A tool asks the model itself."""

import json
import os
from typing import Any

import litellm
from task import CRITIC, MAX_ANSWERS, OPTIONS, QUESTION, SYSTEM, functions, submit

MODELS = {"chat": "openai/policy", "responses": "openai/responses/policy", "messages": "anthropic/policy"}


def answer_to(messages: list, **options: Any) -> Any:
    """Returns the answer's message."""
    answer = litellm.completion(
        model=MODELS[OPTIONS.api], messages=messages, stream=OPTIONS.stream, max_tokens=256, num_retries=3, **options
    )
    if OPTIONS.stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


def use(function: Any) -> str:
    """Returns what a tool says."""
    try:
        given = json.loads(function.arguments)
        if function.name == "ask_critic":
            asked = {"role": "user", "content": str(given["input"])}
            return answer_to([{"role": "system", "content": CRITIC}, asked]).content
        return submit(int(given["number"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"wrong arguments: {error}"


def main() -> None:
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for _ in range(MAX_ANSWERS):
        said = answer_to(messages, tools=functions())
        messages.append(said.model_dump())
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": use(call.function)})


os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
main()
