from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field


class StepMetadata(BaseModel):
    id: str = Field(default_factory=lambda: str(uuid4()))
    prompt_id: str = ""
    other: dict[str, Any] = Field(default_factory=dict)


class Step(BaseModel):
    metadata: StepMetadata = Field(default_factory=StepMetadata)
    kind: str = ""


class Observation(Step):
    pass


class AgentStep(Step):
    pass


class Action(AgentStep):
    pass


class LLMOutputParsingFailureAction(Action):
    error: str


class TapeMetadata(BaseModel):
    id: str = Field(default_factory=lambda: str(uuid4()))
    error: Any = None


class Tape(BaseModel):
    metadata: TapeMetadata = Field(default_factory=TapeMetadata)
    steps: list[Any] = []

    def append(self, step: Step) -> "Tape":
        return self.model_copy(update={"steps": [*self.steps, step], "metadata": TapeMetadata()})


class Prompt(BaseModel):
    """The framework's own. A node may return it instead of PipelineRL's."""

    id: str = Field(default_factory=lambda: str(uuid4()))
    tools: list[dict] | None = None
    messages: list[dict] = []
    token_ids: list[int] = []
    response_format: dict | None = None
