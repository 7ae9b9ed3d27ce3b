"""What recording an answer for a crash costs a rollout worker (`actor.answer_journal`): bytes, CPU, and waiting.

    python -m benchmarks.answer_journal --json benchmarks/answer_journal.json

Attempts of 20 turns get answers from a stand-in that takes no time, and record them in `--folder` (a temporary one).
`cpu_us` is all CPU of the process per answer, `bytes` what a file holds of one, `again_us` the CPU of getting it again.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.provenance import machine
from pipelinerl.actor.answer_journal import AnswerJournal, AttemptTransport
from pipelinerl.actor.router import Client, GroupRoute, RequestLimits
from pipelinerl.actor.servers import ServerLoads
from pipelinerl.llm import GenerateRequest, TrainableLLM
from pipelinerl.rollouts import CallTokens

TURNS, ATTEMPTS, ROUNDS = 20, 32, 5
LENGTHS = (50, 1000, 8000)


class Instant:
    """Answers at once, with one weight version."""

    def __init__(self, length: int):
        self._ids = np.arange(length, dtype=np.int32)
        self._logprobs = np.full(length, -0.5, dtype=np.float32)
        self._spans = np.array([(0, length, 1)], dtype=np.int32)

    async def generate(self, llm: Any, request: GenerateRequest, session: Any) -> CallTokens:
        return CallTokens(request.token_ids, self._ids, self._logprobs, self._spans, "stop")


async def play(journal: AnswerJournal, route: GroupRoute, length: int, group: str) -> float:
    """Plays a group of attempts. Returns CPU seconds per answer."""
    llm = TrainableLLM(model_name="policy")

    async def attempt(number: int) -> None:
        transport = AttemptTransport(files[number], Instant(length), route)
        for turn in range(TURNS):
            prompt = np.full((turn + 1) * length, turn, dtype=np.int32)
            request = GenerateRequest(token_ids=prompt, body_key=b"{}", model="policy", retries=0, base_delay_s=0.0)
            await transport.generate(llm, request, None)  # type: ignore[arg-type]

    before = time.process_time()
    files = await journal.open(group, range(ATTEMPTS))
    await asyncio.gather(*(attempt(number) for number in range(ATTEMPTS)))
    return (time.process_time() - before) / (ATTEMPTS * TURNS)


async def measure(folder: Path) -> list[dict[str, float]]:
    """Measures every length."""
    rows = []
    async with aiohttp.ClientSession() as session:
        limits = RequestLimits(timeout_s=1, max_retries=0, max_completions=1)
        route = GroupRoute(ServerLoads(), Client(session, limits), 1, 0)
        for length in LENGTHS:
            written, again, size = [], [], 0.0
            for turn in range(ROUNDS):
                journal, group = AnswerJournal(folder), f"{length}-{turn}"
                written.append(await play(journal, route, length, group))
                size = sum(path.stat().st_size for path in folder.rglob(f"{group}.*")) / (ATTEMPTS * TURNS)
                again.append(await play(journal, route, length, group))
                journal.remove(group, range(ATTEMPTS))
            rows.append(
                {
                    "tokens": length,
                    "bytes": round(size),
                    "cpu_us": round(statistics.median(written) * 1e6),
                    "again_us": round(statistics.median(again) * 1e6),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the answers are written")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = asyncio.run(measure(Path(folder)))
    for row in rows:
        print(row)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
