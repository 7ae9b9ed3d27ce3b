"""Pydantic AI: Chat Completions, Responses or Messages, and a tool."""

import asyncio
from collections.abc import AsyncIterable

from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.usage import UsageLimits
from task import MAX_ANSWERS, OPTIONS, QUESTION, submit

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


async def read(context: object, events: AsyncIterable) -> None:
    async for _ in events:
        pass


async def main() -> None:
    agent = Agent(MODELS[OPTIONS.api]("policy"), instructions="Use your tool.", tools=[submit])
    limits = UsageLimits(request_limit=MAX_ANSWERS)
    await agent.run(QUESTION, usage_limits=limits, event_stream_handler=read if OPTIONS.stream else None)


try:
    asyncio.run(main())
except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
    print(f"given up: {error}")
