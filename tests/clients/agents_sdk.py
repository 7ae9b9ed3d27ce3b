"""The OpenAI Agents SDK: Responses or Chat Completions, a tool, and a sub-agent that shares the endpoint."""

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from task import CRITIC, MAX_ANSWERS, OPTIONS, QUESTION, SYSTEM, run, submit


async def main() -> None:
    client = AsyncOpenAI()
    model = (OpenAIResponsesModel if OPTIONS.api == "responses" else OpenAIChatCompletionsModel)("policy", client)
    critic = Agent(name="critic", instructions=CRITIC, model=model)
    ask_critic = critic.as_tool("ask_critic", "Ask whether an answer is plausible.")
    agent = Agent(name="solver", instructions=SYSTEM, model=model, tools=[function_tool(submit), ask_critic])
    if OPTIONS.stream:
        result = Runner.run_streamed(agent, QUESTION, max_turns=MAX_ANSWERS)
        async for _ in result.stream_events():
            pass
    else:
        await Runner.run(agent, QUESTION, max_turns=MAX_ANSWERS)


set_tracing_disabled(True)
try:
    run(main)
except (MaxTurnsExceeded, ModelBehaviorError) as error:
    print(f"given up: {error}")
