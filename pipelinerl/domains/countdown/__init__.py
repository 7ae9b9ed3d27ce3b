"""Reach a target number from given numbers with + − × ÷."""

from pipelinerl.domains.countdown.dataset import load_problems
from pipelinerl.domains.countdown.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
