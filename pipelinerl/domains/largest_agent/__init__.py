"""The quickstart's task played by an agent of the official OpenAI client: streaming, with a tool, unmodified."""

from pipelinerl.domains.largest.dataset import load_problems
from pipelinerl.domains.largest_agent.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
