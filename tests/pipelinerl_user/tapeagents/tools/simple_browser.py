from tapeagents.core import Observation


class PageObservation(Observation):
    text: str
    reward: float = 0.0
    error: str | None = None
