"""Mathematical problems with a reference answer, judged by math-verify in the verifier service."""

from pipelinerl.domains.math.dataset import load_problems
from pipelinerl.domains.math.rollouts import generate_rollout

generate_math_rollout = generate_rollout

__all__ = ["generate_math_rollout", "generate_rollout", "load_problems"]
