"""Write answers that follow instructions about their form."""

from pipelinerl.domains.instructions.dataset import load_problems
from pipelinerl.domains.instructions.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
