"""Follow instructions about the form of an answer."""

from pipelinerl.domains.instructions.dataset import load_problems
from pipelinerl.domains.instructions.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
