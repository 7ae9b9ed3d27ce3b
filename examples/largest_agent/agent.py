"""An agent that does not know PipelineRL. It uses an OpenAI client, one tool and a streamed answer."""

import json

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

SUBMIT_TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": "Hand in the answer.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


async def answer_question(client: AsyncOpenAI, question: str) -> int | None:
    """Returns the number that the model submits with its tool. None if it calls no tool or calls it wrongly."""
    stream = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}], tools=[SUBMIT_TOOL], stream=True
    )
    arguments = ""
    async for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                arguments += (call.function.arguments or "") if call.function else ""
    try:
        number = json.loads(arguments)["number"]
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None
