"""The HTTP interface of the verifier.

``POST /`` takes one check, ``POST /batch`` many, and ``POST /verify_answer`` a request in PipelineRL's format.
``GET /health`` reports workers and queue. Body sizes are limited while reading. An invalid request is refused with a
4xx status and a reason. A well-formed check always gets a verdict with status 200.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response

from pipelinerl.config.sections import VerifierSection
from pipelinerl.domains.verifier.judges import JUDGES, refusal
from pipelinerl.domains.verifier.pool import JudgePool
from pipelinerl.records.verdicts import BatchVerdicts, Check, CheckBatch, MathAnswer, Verdict

MAX_BATCH = 4096
"""Checks of one request. `verifier.max_body_kb` alone would allow tens of thousands of small ones, a task each."""

_ENCODER = msgspec.json.Encoder()
_CHECK = msgspec.json.Decoder(Check)
_ANSWER = msgspec.json.Decoder(MathAnswer)
_BATCH = msgspec.json.Decoder(CheckBatch)


class BoundedBody:
    """Reads request bodies of at most ``max_bytes``. Refuses larger ones with status 413."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes

    async def read(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self.max_bytes:
            self._refuse()
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_bytes:
                self._refuse()
        return bytes(body)

    def _refuse(self) -> None:
        raise HTTPException(413, f"the body exceeds {self.max_bytes} bytes (verifier.max_body_kb)")


def decode_request(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"not a valid request: {error}") from error


async def while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Awaits the work, and cancels it when the client is gone, so that its checks occupy no worker."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client is gone")
        return await working
    finally:
        working.cancel()
        gone.cancel()


def response_of(record: Any) -> Response:
    return Response(_ENCODER.encode(record), media_type="application/json")


async def answer_status(pool: JudgePool, asked: MathAnswer) -> str:
    """Judges a mathematical answer and returns the status of the verdict."""
    if len(asked.prediction[asked.prediction.rfind("\\boxed") :]) > asked.max_prediction_length:
        return "unparsable"
    options = {"answer_format": "boxed", "strict": asked.strict}
    verdict = await pool.judge(Check(kind="math", prediction=asked.prediction, gold=asked.gold, options=options))
    if verdict.status == "error":
        raise HTTPException(500, f"cannot be judged: {verdict.detail}")
    return verdict.status


def create_app(settings: VerifierSection, *, secret: str | None = None) -> FastAPI:
    """Makes the application and its ``JudgePool``. ``secret``: the bearer token that checks need. None: no token."""
    pool = JudgePool(
        workers=settings.workers, timeout_s=settings.timeout_s, memory_mb=settings.memory_mb, judges=settings.judges
    )
    bounded = BoundedBody(settings.max_body_kb * 1024)
    kinds = (*JUDGES, *settings.judges)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with pool:
            yield

    app = FastAPI(title="PipelineRL verifier", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def authorise(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if secret and not hmac.compare_digest(given, f"Bearer {secret}".encode()):
            raise HTTPException(401, "the run's bearer token is missing or wrong")

    async def judge_all(checks: list[Check]) -> list[Verdict]:
        for check in checks:
            if said := refusal(check.kind, kinds):
                raise HTTPException(422, said)
        return await asyncio.gather(*map(pool.judge, checks))

    @app.post("/")
    async def check_one(request: Request) -> Response:
        authorise(request)
        check = decode_request(_CHECK, await bounded.read(request))
        (verdict,) = await while_connected(request, judge_all([check]))
        return response_of(verdict)

    @app.post("/batch")
    async def check_many(request: Request) -> Response:
        authorise(request)
        checks = decode_request(_BATCH, await bounded.read(request)).checks
        if len(checks) > MAX_BATCH:
            raise HTTPException(413, f"a batch of {len(checks)} checks: send at most {MAX_BATCH}")
        return response_of(BatchVerdicts(verdicts=await while_connected(request, judge_all(checks))))

    @app.post("/verify_answer")
    async def verify_answer(request: Request) -> Response:
        authorise(request)
        asked = decode_request(_ANSWER, await bounded.read(request))
        return response_of({"answer_status": await while_connected(request, answer_status(pool, asked))})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "workers": pool.num_workers, "queued": pool.queued}

    return app
