"""CPU per completion token from the engine's report to the record for the actor: server's API process and client.

    python -m benchmarks.client --json benchmarks/client.json

The server is another process: our route (``pipelinerl.inference.answers``) on a web server as in production and vLLM's
own output processor, fed with what an engine sends it: one report per completion. Only the engine is missing. In the
client everything from the domain's function to the encoded message for the actor is measured (render, HTTP, decoding,
training text, record).

- `joined`, `single`: eight attempts as one request with ``n`` = 8, or as eight requests.
- `plain`: the same completions by vLLM's own route (a report per token, pydantic objects, JSON) and its usual client
  (JSON to dicts, an object per token, the conversation tokenised again).
- `blocked_ms`: the most that a loop's thread computed between two wake-ups that are 2 ms apart.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from omegaconf import OmegaConf
from pydantic import BaseModel

from benchmarks.provenance import machine
from benchmarks.whole_group import run_whole_group
from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import FromWorker, RolloutDone, StartGroup
from pipelinerl.actor.router import Client, RequestLimits
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.streams.codec import Codec
from pipelinerl.testing import byte_tokenizer

ATTEMPTS = 8
PROMPT_TOKENS = 300


class TokenObject(BaseModel):
    logprob: float
    token_id: int


async def watch(longest: list[float]) -> None:
    """Notes the most that this thread computed between two wake-ups 2 ms apart, in seconds."""
    before = time.thread_time()
    while True:
        await asyncio.sleep(0.002)
        now = time.thread_time()
        longest[0] = max(longest[0], now - before)
        before = now


@contextlib.asynccontextmanager
async def measured(session: aiohttp.ClientSession, url: str, row: dict[str, float]) -> AsyncIterator[None]:
    """CPU and blocks of both processes while the body runs."""

    async def usage() -> dict[str, float]:
        async with session.get(url + "/usage") as response:
            return await response.json()

    before, longest = await usage(), [0.0]
    watcher = asyncio.create_task(watch(longest))
    cpu, started = time.process_time(), time.perf_counter()
    yield
    row |= {"client_cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - started}
    watcher.cancel()
    after = await usage()
    row |= {
        "server_cpu_s": after["cpu_s"] - before["cpu_s"],
        "client_blocked_ms": 1e3 * longest[0],
        "server_blocked_ms": 1e3 * after["blocked_s"],
    }


async def rollout(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """A single-turn domain."""
    call = await llm_async_generate(llm, Prompt.from_user_message(problem["question"]), session)
    text = make_training_text(llm, call)
    text.reward = float(len(call.output.content or "") > 0)
    metrics = BaseMetrics(reward=text.reward, success=True, no_error=True, no_answer=False)
    return RolloutResult(training_texts=[text], metrics=metrics, latency=0.0)


async def measure(url: str, length: int, seconds: float, *, join: bool) -> dict[str, float]:
    """Groups side by side for ``seconds`` through the worker's executor."""
    llm = TrainableLLM(
        model_name="policy",
        tokenizer=byte_tokenizer(),
        parameters={"max_tokens": length, "temperature": 1.0} | ({} if join else {"seed": 0}),
        collect_logprobs=True,
    )
    limits = RequestLimits(timeout_s=60, max_retries=0, max_completions=64)
    rules = RolloutRules(timeout_s=60, seq_length=10**6)
    encode = Codec(FromWorker).encode
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        executor = Executor(OmegaConf.create({}), [rollout], (llm, llm), Client(session, limits), rules)
        executor.servers.update({"server": url}, {"server": 0})
        count = 0

        async def groups(until: float) -> None:
            nonlocal count
            while time.perf_counter() < until:
                finished = await run_whole_group(executor, group(count))
                assert not finished.failures, finished.failures[0].detail
                for done in finished.rollouts:
                    encode(RolloutDone(task_id=finished.task_id, rollout=done))
                count += len(finished.rollouts)

        row: dict[str, float] = {}
        gc.collect()
        gc.freeze()  # as a worker does
        await groups(time.perf_counter() + 0.3)
        count = 0
        async with measured(session, url, row):
            until = time.perf_counter() + seconds
            await asyncio.gather(*(groups(until) for _ in range(2)))
        return figures(count, length, row)


def group(number: int) -> StartGroup:
    question = f"{number:08d}" + "x" * (PROMPT_TOKENS - 40)
    return StartGroup(
        task_id=number,
        group_id=str(number),
        domain=0,
        problem={"question": question},
        attempts=tuple(range(ATTEMPTS)),
        evaluation=False,
        version=0,
    )


async def measure_plain(url: str, length: int, seconds: float) -> dict[str, float]:
    """vLLM's own route and its usual client: dicts, an object per token, a second tokenisation."""
    tokenizer = byte_tokenizer()
    count = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> dict[str, Any]:
            messages = [{"role": "user", "content": group(number).problem["question"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            params = {"max_tokens": length, "logprobs": 0}
            body = {"request_id": str(number), "token_ids": prompt, "sampling_params": params}
            async with session.post(url + "/vllm", json=body) as response:
                choice = (await response.json())["choices"][0]
            tokens = [TokenObject(**entry) for entry in choice["logprobs"]["content"]]
            content = tokenizer.decode([token.token_id for token in tokens])
            answered = [*messages, {"role": "assistant", "content": content}]
            ids = tokenizer.apply_chat_template(answered, return_dict=False)
            labels = [-100] * len(prompt) + ids[len(prompt) :]
            return {"input_ids": ids, "labels": labels, "logprobs": [token.logprob for token in tokens]}

        async def run(until: float) -> None:
            nonlocal count, numbers
            while time.perf_counter() < until:
                numbers += 1
                json.dumps(await one(numbers))
                count += 1

        row: dict[str, float] = {}
        numbers = 0
        await run(time.perf_counter() + 0.3)
        count = 0
        async with measured(session, url, row):
            until = time.perf_counter() + seconds
            await asyncio.gather(*(run(until) for _ in range(2)))
        return figures(count, length, row)


def figures(count: int, length: int, row: dict[str, float]) -> dict[str, float]:
    server, client = (1e6 * row[f"{side}_cpu_s"] / (count * length) for side in ("server", "client"))
    return {
        "us_cpu_per_token": round(server + client, 3),
        "us_server_cpu_per_token": round(server, 3),
        "us_client_cpu_per_token": round(client, 3),
        "rollouts_per_s": round(count / row["wall_s"], 1),
        "us_client_cpu_per_rollout": round(client * length, 1),
        "server_blocked_ms": round(row["server_blocked_ms"], 1),
        "client_blocked_ms": round(row["client_blocked_ms"], 1),
    }


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The server in a process of its own. Its URL."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    yield f"http://127.0.0.1:{ours.recv()}"
    ours.send(None)
    server.join(5)


def serve(connection: Connection) -> None:
    """The server's process. Only there is vLLM imported: a collection of its million objects would block the client."""
    from benchmarks import answer_server

    answer_server.serve(connection)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 4000, 32_000])
    args = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(),
        "attempts": ATTEMPTS,
    }
    with served() as url:
        for length in args.lengths:
            results[f"{length}_joined"] = uvloop.run(measure(url, length, args.seconds, join=True))
            results[f"{length}_single"] = uvloop.run(measure(url, length, args.seconds, join=False))
            results[f"{length}_plain"] = uvloop.run(measure_plain(url, length, args.seconds))
    for name, row in results.items():
        print(name, row)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
