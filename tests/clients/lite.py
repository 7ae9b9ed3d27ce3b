"""LiteLLM in a loop of one's own: the client of Chat Completions, Responses or Messages."""

import json
import os

import litellm
from task import MAX_ANSWERS, OPTIONS, QUESTION, submit

TOOL = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": "Hand in the answer.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
MODELS = {"chat": "openai/policy", "responses": "openai/responses/policy", "messages": "anthropic/policy"}


def main() -> None:
    messages = [{"role": "system", "content": "Use your tool."}, {"role": "user", "content": QUESTION}]
    for _ in range(MAX_ANSWERS):
        answer = litellm.completion(
            model=MODELS[OPTIONS.api], messages=messages, tools=[TOOL], stream=OPTIONS.stream, max_tokens=256
        )
        if OPTIONS.stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        said = answer.choices[0].message
        messages.append(said.model_dump())
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            try:
                result = submit(int(json.loads(call.function.arguments)["number"]))
            except (ValueError, KeyError, TypeError) as error:
                result = f"wrong arguments: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
main()
