"""A game of many turns: guess a hidden number, and learn after each guess whether it is higher or lower."""

from pipelinerl.domains.guessing.dataset import load_problems
from pipelinerl.domains.guessing.rollouts import generate_rollout

generate_guessing_rollout = generate_rollout

__all__ = ["generate_guessing_rollout", "generate_rollout", "load_problems"]
