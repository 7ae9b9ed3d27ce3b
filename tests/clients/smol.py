"""smolagents: an agent that calls tools, with the framework's own prompts. A tool asks the model itself."""

import os

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from task import CRITIC, MAX_ANSWERS, OPTIONS, QUESTION, submit

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])


@tool
def ask_critic(input: str) -> str:
    """Ask whether an answer is plausible.

    Args:
        input: the answer.
    """
    told = [{"type": "text", "text": input}]
    instructions = [{"type": "text", "text": CRITIC}]
    asked = [{"role": "system", "content": instructions}, {"role": "user", "content": told}]
    return model.generate(asked).content


agent = ToolCallingAgent(
    tools=[tool(submit), ask_critic],
    model=model,
    max_steps=MAX_ANSWERS - 1,  # one more answer follows them
    stream_outputs=OPTIONS.stream,
    verbosity_level=LogLevel.OFF,
)
agent.run(QUESTION)
