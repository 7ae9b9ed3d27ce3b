"""Reach a target number from given numbers with + − × ÷."""

from pipelinerl.domains.countdown.rollouts import generate_rollout, load_problems

__all__ = ["generate_rollout", "load_problems"]
