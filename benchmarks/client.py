"""CPU of the actor's client per completion token, against a fake server that answers as vLLM does.

    python benchmarks/client.py --json benchmarks/client.json

The server is another process and answers from memory, byte for byte in vLLM's format with random ids and
log-probabilities. Measured in the worker process: everything from the domain's function to the encoded message for the
actor (render, HTTP, decoding, training text, record). ``plain`` is the usual client for comparison: JSON to dicts, a
Python object per token, the conversation rendered and tokenised again for the training text.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from omegaconf import OmegaConf
from pydantic import BaseModel

from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import FromWorker, RolloutDone, StartGroup
from pipelinerl.actor.transport import Client, RequestLimits
from pipelinerl.async_llm import GENERATE_ROUTE, llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.streams.codec import Codec
from pipelinerl.testing import byte_tokenizer, vllm_choice, vllm_response

ATTEMPTS = 8
PROMPT_TOKENS = 300


class TokenObject(BaseModel):
    logprob: float
    token_id: int


def serve(connection: Connection, lengths: list[int]) -> None:
    """Answers every request with completions of the length that ``max_tokens`` asks for."""
    rng = random.Random(0)
    payloads = {(length, n): payload(rng, length, n) for length in lengths for n in (1, ATTEMPTS)}

    async def generate(request: web.Request) -> web.Response:
        params = json.loads(await request.read())["sampling_params"]
        return web.Response(body=payloads[params["max_tokens"], params.get("n", 1)], content_type="application/json")

    async def main() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post(GENERATE_ROUTE, generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection.send(runner.addresses[0][1])
        await asyncio.to_thread(connection.poll, None)
        await runner.cleanup()

    uvloop.run(main())


def payload(rng: random.Random, length: int, n: int) -> bytes:
    choices = []
    for index in range(n):
        token_ids = [rng.randrange(256) for _ in range(length)]
        choice = vllm_choice(index, token_ids, {"max_tokens": length, "logprobs": 0}, version=3)
        for entry in choice["logprobs"]["content"]:
            entry["logprob"] = entry["top_logprobs"][0]["logprob"] = -rng.random() * 3
        choices.append(choice)
    return vllm_response(choices, prompt_tokens=PROMPT_TOKENS)


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
        executor.servers.update({"server": url})
        count = 0

        async def groups(until: float) -> None:
            nonlocal count
            while time.perf_counter() < until:
                finished = await executor.run_group(group(count))
                assert not finished.failures, finished.failures[0].detail
                for done in finished.rollouts:
                    encode(RolloutDone(ticket=finished.ticket, rollout=done))
                count += len(finished.rollouts)

        await groups(time.perf_counter() + 0.3)
        count, cpu, started = 0, time.process_time(), time.perf_counter()
        await asyncio.gather(*(groups(started + seconds) for _ in range(2)))
        return figures(count, length, time.process_time() - cpu, time.perf_counter() - started)


def group(number: int) -> StartGroup:
    question = f"{number:08d}" + "x" * (PROMPT_TOKENS - 40)
    return StartGroup(
        ticket=number,
        group_id=str(number),
        domain=0,
        problem={"question": question},
        attempts=tuple(range(ATTEMPTS)),
        evaluation=False,
        version=0,
    )


async def measure_plain(url: str, length: int, seconds: float) -> dict[str, float]:
    """The usual client: dicts, an object per token, a second tokenisation."""
    tokenizer = byte_tokenizer()
    count = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> dict[str, Any]:
            messages = [{"role": "user", "content": group(number).problem["question"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            body = {"model": "policy", "token_ids": prompt, "sampling_params": {"max_tokens": length, "logprobs": 0}}
            async with session.post(url + GENERATE_ROUTE, json=body) as response:
                choice = (await response.json())["choices"][0]
            tokens = [TokenObject(**entry) for entry in choice["logprobs"]["content"]]
            content = tokenizer.decode([token.token_id for token in tokens])
            answered = [*messages, {"role": "assistant", "content": content}]
            ids = tokenizer.apply_chat_template(answered, return_dict=False)
            labels = [-100] * len(prompt) + ids[len(prompt) :]
            return {"input_ids": ids, "labels": labels, "logprobs": [token.logprob for token in tokens]}

        async def run(until: float) -> None:
            nonlocal count
            while time.perf_counter() < until:
                json.dumps(await one(count))
                count += 1

        await run(time.perf_counter() + 0.3)
        count, cpu, started = 0, time.process_time(), time.perf_counter()
        await asyncio.gather(*(run(started + seconds) for _ in range(2 * ATTEMPTS)))
        return figures(count, length, time.process_time() - cpu, time.perf_counter() - started)


def figures(count: int, length: int, cpu_s: float, wall_s: float) -> dict[str, float]:
    return {
        "us_cpu_per_token": round(cpu_s / (count * length) * 1e6, 3),
        "rollouts_per_s": round(count / wall_s, 1),
        "rollouts_per_cpu_s": round(count / cpu_s, 1),
        "us_cpu_per_rollout": round(cpu_s / count * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 4000])
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, args.lengths), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "attempts": ATTEMPTS,
    }
    for length in args.lengths:
        results[f"{length}_joined"] = uvloop.run(measure(url, length, args.seconds, join=True))
        results[f"{length}_single"] = uvloop.run(measure(url, length, args.seconds, join=False))
        results[f"{length}_plain"] = uvloop.run(measure_plain(url, length, args.seconds))
    ours.send(None)
    server.join(5)
    for name, row in results.items():
        print(name, row)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
