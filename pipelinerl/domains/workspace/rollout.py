"""One rollout of an unmodified command-line agent: it works in a workspace, then a copy of what it left is judged.

The judge runs after all processes of the agent have ended, in a second workspace without an endpoint. What it expects
never enters a workspace. A failure of one raises ``VerifierError``, so the attempt is repeated without a reward.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from pipelinerl.agents import RecordedAgent, record_agent
from pipelinerl.domains.sandbox import Outcome
from pipelinerl.domains.workspace.base import MakeWorkspace, NotCopied, Workspace
from pipelinerl.domains.workspace.jailed import JailWorkspace
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

SIGNAL_RUNS = 3
"""Runs of a test that a signal ends. Code that kills itself does it each time, the machine hardly does."""

JudgeWorkspace = Callable[[Workspace | None], Awaitable[tuple[float, bool]]]
"""Copy of what the agent left → (reward, success). None: it left more than the limits allow to copy."""


@dataclass(frozen=True, kw_only=True)
class HiddenTest:
    """A program, by default in Python, and all that it must print. Both are kept outside.

    It compares output, not the exit code, because the code under test can end its process with any.
    """

    stdin: str
    prints: str
    command: Sequence[str] = ("python3", "-")


async def count_passed(copy: Workspace, tests: Sequence[HiddenTest]) -> int:
    """Returns how many tests pass in ``copy``. Trailing white space of the output does not count."""
    passed = 0
    for test in tests:
        for _ in range(SIGNAL_RUNS):
            outcome = await copy.run(test.command, stdin=test.stdin)
            if outcome.ended != "signal":
                break
        passed += (outcome.ended, outcome.stdout.rstrip()) == ("exited", test.prints.rstrip())
    return passed


async def run_agent_in_workspace(
    llm: TrainableLLM,
    session: aiohttp.ClientSession,
    command: Sequence[str],
    content: bytes,
    judge: JudgeWorkspace,
    *,
    make: MakeWorkspace = JailWorkspace.make,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    dataset_name: str | None = None,
) -> RolloutResult:
    """Runs a program that reads `OPENAI_BASE_URL` and `OPENAI_API_KEY`, or Anthropic's, and rewards what it leaves.

    Args:
        llm: the policy.
        session: the HTTP session of the rollout.
        command: the agent and its arguments. It starts in the workspace's folder.
        content: the workspace's content at the start (``pack_folder``).
        judge: rewards a copy of the workspace, also of an agent that a limit ended.
        make: makes the agent's workspace, and the copy.
        stdin: text on the agent's standard input.
        env: further environment variables of the agent.
        dataset_name: groups the metrics.

    Raises:
        VerifierError: a workspace failed, or a signal ended the agent: its own and the machine's look the same.
        DomainError: the agent failed before its first call.
    """
    async with record_agent(llm, session) as recorded:
        async with await make(content, recorded) as workspace:
            outcome = await workspace.run(command, stdin=stdin, env={**recorded.variables, **(env or {})})
            _check_agent(recorded, command[0], outcome)
            try:
                left = await workspace.snapshot()
            except NotCopied:
                left = None
        reward, success = await judge(None) if left is None else await _judge_copy(left, make, judge)
        return recorded.result(reward=reward, success=success, dataset_name=dataset_name)


async def _judge_copy(left: bytes, make: MakeWorkspace, judge: JudgeWorkspace) -> tuple[float, bool]:
    try:
        copy = await make(left, None)
    except NotCopied:
        return await judge(None)
    async with copy:
        return await judge(copy)


def _check_agent(recorded: RecordedAgent, program: str, outcome: Outcome) -> None:
    """Raises the error of an agent that cannot be judged."""
    if recorded.failure is not None:
        raise recorded.failure
    if outcome.ended == "signal":
        raise VerifierError(f"a signal ended {program} in its workspace (exit code {outcome.exit_code})")
    if not recorded.calls:
        raise DomainError(
            f"{program} made no call to the model ({outcome.ended}, exit code {outcome.exit_code}): "
            f"{outcome.stderr[-500:]}"
        )
