"""Long answers: write out a walk around a ring, lap by lap, the right way round."""

from pipelinerl.domains.laps.dataset import load_problems
from pipelinerl.domains.laps.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
