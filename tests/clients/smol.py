"""smolagents: an agent that calls tools, with the framework's own prompts."""

import os

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from task import MAX_ANSWERS, OPTIONS, QUESTION, submit

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(
    tools=[tool(submit)],
    model=model,
    max_steps=MAX_ANSWERS - 1,  # one more answer follows them
    stream_outputs=OPTIONS.stream,
    verbosity_level=LogLevel.OFF,
)
agent.run(QUESTION)
