from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel

from tapeagents.core import Step, Tape

DEFAULT = "default"


class Node(BaseModel):
    name: str = ""

    def make_prompt(self, agent: Any, tape: Tape) -> Any: ...

    def generate_steps(self, agent: Any, tape: Tape, llm_stream: Any) -> Any: ...


class AgentEvent(BaseModel):
    step: Any = None
    final_tape: Tape | None = None


class Agent(BaseModel):
    name: str = ""
    llms: dict[str, Any] = {}
    nodes: list[Any] = []
    templates: Any = None
    max_iterations: int = 100
    store_llm_calls: bool = False
    known_actions: list[Any] = []
    tools_description: str = ""

    @classmethod
    def create(cls, llms: dict[str, Any] | None = None, **kwargs: Any) -> "Agent":
        return cls(llms=llms or {}, **kwargs)

    async def arun(self, tape: Tape, session: Any, max_iterations: int | None = None) -> AsyncIterator[AgentEvent]:
        for node in self.nodes[: max_iterations or self.max_iterations]:
            prompt = node.make_prompt(self, tape)
            llm_stream = await self.llms[DEFAULT].agenerate(prompt, session)
            step: Step | None = None
            for step in node.generate_steps(self, tape, llm_stream):
                step.metadata.prompt_id = llm_stream.prompt.id
                tape = tape.append(step)
                yield AgentEvent(step=step)
            if step is not None and self.store_llm_calls:
                step.metadata.other["llm_call"] = llm_stream.llm_call
        yield AgentEvent(final_tape=tape)
