"""The client of OpenAI in a loop of one's own: Chat Completions or Responses. The tools of an answer run at once."""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from task import CRITIC, MAX_ANSWERS, OPTIONS, QUESTION, SYSTEM, functions, run, submit


async def chat(client: AsyncOpenAI, messages: list, **options: Any) -> Any:
    """Returns the answer's message."""
    if not OPTIONS.stream:
        answer = await client.chat.completions.create(model="policy", messages=messages, **options)
        return answer.choices[0].message
    state = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True, **options):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0].message


async def respond(client: AsyncOpenAI, **options: Any) -> Any:
    """Returns the response."""
    if not OPTIONS.stream:
        return await client.responses.create(model="policy", **options)
    events = [event async for event in await client.responses.create(model="policy", stream=True, **options)]
    return events[-1].response


async def ask_critic(client: AsyncOpenAI, asked: str) -> str:
    if OPTIONS.api == "responses":
        return (await respond(client, instructions=CRITIC, input=asked)).output_text
    return (await chat(client, [{"role": "system", "content": CRITIC}, {"role": "user", "content": asked}])).content


async def use(client: AsyncOpenAI, function: Any) -> str:
    """Returns what a tool says."""
    try:
        given = json.loads(function.arguments)
        if function.name == "ask_critic":
            return await ask_critic(client, str(given["input"]))
        return submit(int(given["number"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"wrong arguments: {error}"


async def solve_by_chat(client: AsyncOpenAI) -> None:
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for _ in range(MAX_ANSWERS):
        said = await chat(client, messages, tools=functions())
        calls = said.tool_calls or []
        if not calls:
            break
        messages.append(said.model_dump(exclude_none=True))
        results = await asyncio.gather(*(use(client, call.function) for call in calls))
        for call, result in zip(calls, results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def solve_by_responses(client: AsyncOpenAI) -> None:
    """The endpoint keeps the conversation."""
    tools = [{"type": "function", **tool["function"]} for tool in functions()]
    asked: dict[str, Any] = {"input": QUESTION}
    for _ in range(MAX_ANSWERS):
        answer = await respond(client, instructions=SYSTEM, tools=tools, **asked)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        results = await asyncio.gather(*(use(client, call) for call in calls))
        asked = {
            "previous_response_id": answer.id,
            "input": [
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
                for call, result in zip(calls, results, strict=True)
            ],
        }


async def main() -> None:
    async with AsyncOpenAI() as client:
        await (solve_by_responses if OPTIONS.api == "responses" else solve_by_chat)(client)


run(main)
