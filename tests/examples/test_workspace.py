"""The twelve repositories, mended by the agent with what a scripted model says, also while its processes are struck."""

import asyncio
import contextlib
import random
import time

import psutil
import pytest

from examples.workspace.domain import TASKS, generate_rollout, load_problems
from pipelinerl.errors import VerifierError
from pipelinerl.testing import run_rollout

PROBLEMS = {problem["repository"]: problem for problem in load_problems(["train", "test"])}
CFG = {"environment": {"turns": 2}}


@pytest.mark.parametrize("repository", TASKS)
async def test_untouched_repository_fails_and_its_patch_passes(repository):
    untouched = await run_rollout(generate_rollout, PROBLEMS[repository], ["It is fine."], CFG)
    mended = await run_rollout(generate_rollout, PROBLEMS[repository], [f"$ {TASKS[repository]['fix']}", "Done."], CFG)
    assert (untouched.metrics.reward, untouched.metrics.success, len(untouched.training_texts)) == (0.0, False, 1)
    assert (mended.metrics.reward, mended.metrics.success, len(mended.training_texts)) == (1.0, True, 2)
    assert [text.reward for text in mended.training_texts] == [1.0, 1.0]


def test_every_repository_is_trained_or_held_out():
    assert len(TASKS) == len(PROBLEMS) == 12
    assert len(load_problems(["train"])) == 10


async def test_mistake_of_the_model_is_shown_to_it():
    prompts = []

    def say(prompt):
        prompts.append(prompt)
        return "$ sed -i s/a/b/ nothing.py" if len(prompts) == 1 else "I give up."

    result = await run_rollout(generate_rollout, PROBLEMS["sums"], say, CFG)
    assert "exit code 2" in prompts[1]
    assert result.metrics.reward == 0.0


@pytest.mark.parametrize("num_rollouts", [12, pytest.param(100, marks=pytest.mark.slow)])
async def test_rollout_whose_processes_are_struck_earns_its_reward_or_none(num_rollouts):
    """A process of each is killed at a random moment. Its patch is right, so a reward of 0 would be the failure's."""
    rng, before = random.Random(num_rollouts), set(psutil.Process().children(recursive=True))

    def ours() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process not in before]

    def play(repository: str) -> asyncio.Task:
        replies = [f"$ {TASKS[repository]['fix']}", "Done."]
        return asyncio.create_task(run_rollout(generate_rollout, PROBLEMS[repository], replies, CFG))

    started = time.monotonic()
    await play("sums")
    usual_s, outcomes = time.monotonic() - started, []
    for repository in rng.choices(list(TASKS), k=num_rollouts):
        rollout = play(repository)
        await asyncio.wait([rollout], timeout=rng.uniform(0, usual_s))
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            # What kills a command of the agent's looks to the agent as if the command had ended itself.
            rng.choice([process for process in ours() if process.name() not in ("sh", "sed")]).kill()
        try:
            outcomes.append((await rollout).metrics.reward)
        except VerifierError:
            outcomes.append(None)
        assert psutil.wait_procs(ours(), timeout=60)[1] == []
    assert set(outcomes) <= {1.0, None}
    assert None in outcomes
