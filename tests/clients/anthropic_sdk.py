"""The client of Anthropic in a loop of one's own: Messages. The tools of an answer run at once."""

import asyncio
from typing import Any

from anthropic import AsyncAnthropic
from task import CRITIC, MAX_ANSWERS, OPTIONS, QUESTION, SCHEMAS, SYSTEM, run, schema_of, submit

TOOLS = [{"name": name, "description": told, "input_schema": schema_of(name)} for name, (told, _) in SCHEMAS.items()]


async def answer_to(client: AsyncAnthropic, messages: list, **options: Any) -> Any:
    """Returns the answer."""
    options |= {"model": "policy", "max_tokens": 256, "messages": messages}
    if not OPTIONS.stream:
        return await client.messages.create(**options)
    async with client.messages.stream(**options) as stream:
        return await stream.get_final_message()


async def use(client: AsyncAnthropic, call: Any) -> str:
    """Returns what a tool says."""
    try:
        if call.name == "ask_critic":
            asked = [{"role": "user", "content": str(call.input["input"])}]
            answer = await answer_to(client, asked, system=CRITIC)
            return "".join(block.text for block in answer.content if block.type == "text")
        return submit(int(call.input["number"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"wrong arguments: {error}"


async def main() -> None:
    messages: list = [{"role": "user", "content": QUESTION}]
    async with AsyncAnthropic() as client:
        for _ in range(MAX_ANSWERS):
            answer = await answer_to(client, messages, system=SYSTEM, tools=TOOLS)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = await asyncio.gather(*(use(client, call) for call in calls))
            told = [
                {"type": "tool_result", "tool_use_id": call.id, "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": told}]


run(main)
