from typing import Any

from tapeagents.agent import Agent
from tapeagents.core import Tape


async def async_execute_agent(agent: Agent, start_tape: Tape, environment: Any, session: Any, max_loops: int = 50):
    """Agent and environment in turn. As in the original, an error is only written into the tape."""
    tape = start_tape
    try:
        for _ in range(max_loops):
            async for event in agent.arun(tape, session):
                tape = event.final_tape or tape
            tape = tape.append(await environment.astep(tape.steps[-1]))
            if tape.steps[-1].reward > 0:
                break
    except Exception as error:
        tape.metadata.error = f"Agent loop exception: {error}"
    return tape
