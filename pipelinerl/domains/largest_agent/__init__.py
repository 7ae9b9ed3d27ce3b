"""The quickstart's task, solved by agents that do not know PipelineRL: one on the OpenAI client, and a program."""

from pipelinerl.domains.largest import load_problems
from pipelinerl.domains.largest_agent.rollouts import generate_program_rollout, generate_rollout

__all__ = ["generate_program_rollout", "generate_rollout", "load_problems"]
