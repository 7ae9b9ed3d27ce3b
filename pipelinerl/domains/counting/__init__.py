"""Count how often a letter occurs in a word."""

from pipelinerl.domains.counting.dataset import load_problems
from pipelinerl.domains.counting.rollouts import generate_rollout

generate_counting_rollout = generate_rollout

__all__ = ["generate_counting_rollout", "generate_rollout", "load_problems"]
