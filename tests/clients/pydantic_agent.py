"""Pydantic AI: Chat Completions, Responses or Messages, a tool, and a sub-agent that shares the endpoint."""

from collections.abc import AsyncIterable

from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.usage import UsageLimits
from task import CRITIC, MAX_ANSWERS, OPTIONS, QUESTION, SYSTEM, run, submit

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}


async def read(context: object, events: AsyncIterable) -> None:
    async for _ in events:
        pass


async def main() -> None:
    model = MODELS[OPTIONS.api]("policy")
    critic = Agent(model, instructions=CRITIC)

    async def ask_critic(input: str) -> str:
        """Ask whether an answer is plausible."""
        return (await critic.run(input)).output

    agent = Agent(model, instructions=SYSTEM, tools=[submit, ask_critic])
    limits = UsageLimits(request_limit=MAX_ANSWERS)
    await agent.run(QUESTION, usage_limits=limits, event_stream_handler=read if OPTIONS.stream else None)


try:
    run(main)
except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
    print(f"given up: {error}")
