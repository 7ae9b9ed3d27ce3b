"""A process that forks rollout workers for a test to kill: imported once, so that a kill costs milliseconds.

    python -m tests.struck_worker FOLDER SERVER_URL

Reads group ids from standard input. For each it forks a worker that plays the group (4 attempts of `struck_agent`, with
the journal in FOLDER), prints the worker's process id, and when it has ended its exit status, 0 for a complete group.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
from omegaconf import OmegaConf

from benchmarks.struck_agent import generate_rollout
from benchmarks.whole_group import run_whole_group
from pipelinerl.actor.answer_journal import AnswerJournal
from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import StartGroup
from pipelinerl.actor.router import Client, RequestLimits
from pipelinerl.llm import TrainableLLM
from pipelinerl.testing import byte_tokenizer
from pipelinerl.world.process import die_with_parent

ATTEMPTS = 4
TOKENIZER = byte_tokenizer()


async def play(folder: Path, url: str, group_id: str) -> int:
    """Plays a group. Returns how many of its attempts did not end well."""
    llm = TrainableLLM(model_name="policy", tokenizer=TOKENIZER, parameters={"max_tokens": 8}, collect_logprobs=True)
    limits = RequestLimits(timeout_s=60.0, max_retries=8, max_completions=ATTEMPTS)
    rules = RolloutRules(timeout_s=120.0, seq_length=10_000)
    async with aiohttp.ClientSession() as session:
        functions, cfg = [generate_rollout], OmegaConf.create({"output_dir": str(folder)})
        executor = Executor(cfg, functions, (llm, llm), Client(session, limits), rules, AnswerJournal(folder))
        executor.servers.update({"s": url}, {"s": 0})
        start = StartGroup(
            group_id=group_id,
            domain=0,
            problem={"question": "?", "answer": 1},
            attempts=tuple(range(ATTEMPTS)),
            evaluation=False,
            version=0,
        )
        ended = await run_whole_group(executor, start)
    return ATTEMPTS - sum(not rollout.diverged for rollout in ended.rollouts)


def main() -> None:
    folder, url = Path(sys.argv[1]), sys.argv[2]
    for line in sys.stdin:
        worker = os.fork()
        if not worker:
            die_with_parent(signal.SIGKILL)
            os._exit(asyncio.run(play(folder, url, line.strip())))
        print(worker, flush=True)
        print(os.waitpid(worker, 0)[1], flush=True)


if __name__ == "__main__":
    main()
