"""Questions to be answered with tools: a calculator, and a Python interpreter in the sandbox."""

from pipelinerl.domains.tool_use.dataset import load_problems
from pipelinerl.domains.tool_use.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
