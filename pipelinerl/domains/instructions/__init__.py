"""Write answers that follow instructions about their form."""

from pipelinerl.domains.instructions.rollouts import generate_rollout, load_problems

__all__ = ["generate_rollout", "load_problems"]
