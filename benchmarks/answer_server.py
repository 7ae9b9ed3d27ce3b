"""The server of ``benchmarks/client.py``: our route and vLLM's own on vLLM's output processor, without an engine.

An engine's reports are encoded beforehand; for every request they are decoded and processed as in a server's API
process.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProb,
    GenerateLogProbs,
    GenerateLogProbsContent,
    GenerateTokensChoice,
    GenerateTokensResponse,
)
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from pipelinerl.inference.answers import Answers, answers_router
from pipelinerl.inference.scheduler import STARTS

VERSION = "3"


class ReportedEngine:
    """vLLM's engine client from the socket on: decodes reports and hands them to the output processor."""

    def __init__(self) -> None:
        self.processor = OutputProcessor(None, log_stats=False)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._encoder = MsgpackEncoder()
        self._rng = np.random.default_rng(0)
        self._turn = asyncio.Lock()
        self._reports: dict[tuple[int, bool], list[list[bytes]]] = {}

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        queue = RequestOutputCollector(params.output_kind, request_id)
        whole = bool(params.extra_args)
        for child in self._add(prompt["prompt_token_ids"], params, request_id, queue):
            async with self._turn:  # one report at a time, as vLLM's output handler
                for report in self._reports_of(params.max_tokens or 0, whole):
                    outputs = self._decoder.decode(report)
                    for output in outputs.outputs:
                        output.request_id = child
                    self.processor.process_outputs(outputs.outputs, weight_version=VERSION)
                await asyncio.sleep(0)
        yield await queue.get()

    def _add(self, token_ids: list[int], params: SamplingParams, request_id: str, queue: Any) -> list[str]:
        def request(identity: str, own: SamplingParams) -> EngineCoreRequest:
            return EngineCoreRequest(
                *(identity, token_ids, None, own, None, 0.0, None, None, None), external_req_id=request_id
            )

        whole = request(request_id, params)
        if params.n == 1:
            self.processor.add_request(whole, None, None, 0, queue)
            return [request_id]
        parent = ParentRequest(whole)
        children = [parent.get_child_info(index) for index in range(params.n)]
        for index, (child, own) in enumerate(children):
            self.processor.add_request(request(child, own), None, parent, index, queue)
        return [child for child, _ in children]

    def _reports_of(self, count: int, whole: bool) -> list[list[bytes]]:
        """Encoded: one report of all tokens, or one of each."""
        if (count, whole) not in self._reports:
            ids = self._rng.integers(0, 256, (count, 1), dtype=np.int32)
            logprobs = -3 * self._rng.random((count, 1), dtype=np.float32)
            step = count if whole else 1
            outputs = [
                EngineCoreOutput(
                    request_id="",
                    new_token_ids=ids[start : start + step, 0].tolist(),
                    new_logprobs=LogprobsLists(
                        ids[start : start + step], logprobs[start : start + step], np.ones(step, np.int32)
                    ),
                    finish_reason=FinishReason.LENGTH if start + step == count else None,
                    kv_transfer_params={STARTS: [(VERSION, 0)]} if whole else None,
                )
                for start in range(0, count, step)
            ]
            encoded = [self._encoder.encode(EngineCoreOutputs(outputs=[output])) for output in outputs]
            self._reports[count, whole] = [[bytes(part) for part in parts] for parts in encoded]
        return self._reports[count, whole]


def vllm_answer(output: RequestOutput) -> dict[str, Any]:
    """vLLM's own answer: its objects, as its serving code fills them."""
    choices = []
    for each in output.outputs:
        content = []
        for token_id, entry in zip(each.token_ids, each.logprobs or (), strict=True):
            chosen = entry[token_id]
            top = [GenerateLogProb(token_id=token_id, logprob=max(chosen.logprob, -9999.0), rank=chosen.rank)]
            content.append(
                GenerateLogProbsContent(
                    token_id=token_id, logprob=max(chosen.logprob, -9999.0), rank=chosen.rank, top_logprobs=top
                )
            )
        choices.append(
            GenerateTokensChoice(
                index=each.index,
                logprobs=GenerateLogProbs(content=content),
                finish_reason=each.finish_reason or "stop",
                token_ids=list(each.token_ids),
                weight_versions=each.weight_versions,
            )
        )
    return GenerateTokensResponse(request_id="fake", choices=choices).model_dump()


def build_app(blocked_s: list[float]) -> FastAPI:
    engine = ReportedEngine()
    app = FastAPI()
    app.include_router(answers_router(Answers(engine, model="policy", max_model_len=10**6, keeps_conversations=False)))

    @app.post("/vllm")
    async def vllm(raw: Request) -> Response:
        body = await raw.json()
        params = SamplingParams(**body["sampling_params"], detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": body["token_ids"]}
        output = [each async for each in engine.generate(prompt, params, body["request_id"])][-1]
        return JSONResponse(content=vllm_answer(output))

    @app.get("/usage")
    async def usage() -> dict[str, float]:
        """CPU seconds of this process; the longest block since the last question."""
        blocked, blocked_s[0] = blocked_s[0], 0.0
        return {"cpu_s": time.process_time(), "blocked_s": blocked}

    return app


def serve(connection: Connection) -> None:
    """Serves until the connection says something."""
    from benchmarks.client import watch

    blocked_s = [0.0]
    server = uvicorn.Server(uvicorn.Config(build_app(blocked_s), log_level="error", lifespan="off"))

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        tasks = [asyncio.create_task(server.serve([listener])), asyncio.create_task(watch(blocked_s))]
        connection.send(listener.getsockname()[1])
        await asyncio.to_thread(connection.poll, None)
        server.should_exit = True
        await tasks[0]
        tasks[1].cancel()

    uvloop.run(main())
