"""Quickstart: name the largest of three numbers."""

from pipelinerl.domains.largest.dataset import load_problems
from pipelinerl.domains.largest.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
