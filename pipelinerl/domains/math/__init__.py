"""Mathematical problems with a reference answer, judged in the verifier service (`judge`)."""

from pipelinerl.domains.math.dataset import load_problems
from pipelinerl.domains.math.environment import MathEnvironment
from pipelinerl.domains.math.rollouts import (
    RewardTable,
    generate_rollout,
    get_reward,
    length_penalty,
    verify_answer,
    verify_answer_rpc,
)

generate_math_rollout = generate_rollout
load_datasets = load_problems

__all__ = [
    "MathEnvironment",
    "RewardTable",
    "generate_math_rollout",
    "generate_rollout",
    "get_reward",
    "length_penalty",
    "load_datasets",
    "load_problems",
    "verify_answer",
    "verify_answer_rpc",
]
