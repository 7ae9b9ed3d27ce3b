"""Runs one group to its end, where tests and benchmarks have an executor without a worker around it."""

from pipelinerl.actor.executor import Executor
from pipelinerl.actor.messages import Failure, GroupFinished, StartGroup
from pipelinerl.records import Rollout


async def run_whole_group(executor: Executor, start: StartGroup) -> GroupFinished:
    """Run all attempts at the problem concurrently and return when all have ended."""
    outcomes: list[Rollout | Failure] = []

    async def collect(outcome: Rollout | Failure) -> None:
        outcomes.append(outcome)

    ended = await executor.stream_group(start, collect)
    rollouts = (outcome for outcome in outcomes if isinstance(outcome, Rollout))
    failures = (outcome for outcome in outcomes if isinstance(outcome, Failure))
    return GroupFinished.of(ended, sorted(rollouts, key=lambda rollout: rollout.attempt), failures)
