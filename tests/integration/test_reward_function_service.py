"""Reward functions in the verifier's processes: rewards, the function's errors, and its limits."""

import pytest

from pipelinerl.config.reward_functions import judge_names
from pipelinerl.domains.reward_function import generate_rollout
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.testing import run_rollout
from tests.integration.test_verifier_service import serving
from tests.says import says

BROUGHT = "tests.brought_rewards."
PROBLEM = {"task": "?", "answer": "42"}


async def test_function_in_a_process_rewards_and_its_failures_are_no_rewards():
    names = [BROUGHT + name for name in ("gsm8k_score", "math_reward_func", "computes_for_ever", "raises")]
    with serving(judges=list(judge_names(names)), timeout_s=0.3) as url:

        async def play(function: str, **problem: str) -> float:
            cfg = {"reward_function": BROUGHT + function, "jobs": [{"kind": "verifier", "url": url}]}
            return (await run_rollout(generate_rollout, PROBLEM | problem, ["#### 42"], cfg)).metrics.reward

        assert await play("gsm8k_score") == 1.0
        with pytest.raises(DomainError, match="no reward function applies"):
            await play("math_reward_func", task="poetry")
        with pytest.raises(DomainError, match=says("ValueError: no such key", "brought_rewards.py")):
            await play("raises")
        with pytest.raises(VerifierError, match=says("computes_for_ever", "time limit", "`verifier.timeout_s`")):
            await play("computes_for_ever")
        with pytest.raises(VerifierError, match=says("kind is 'reward:tests.brought_rewards.says_nan'")):
            await play("says_nan")  # the run does not name it
