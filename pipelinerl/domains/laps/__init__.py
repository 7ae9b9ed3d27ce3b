"""Long answers: write out a walk around a ring, lap by lap, in the direction that comes early to a station."""

from pipelinerl.domains.laps.dataset import load_problems
from pipelinerl.domains.laps.rollouts import generate_rollout

__all__ = ["generate_rollout", "load_problems"]
