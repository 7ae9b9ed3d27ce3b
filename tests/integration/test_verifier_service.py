"""The verifier over HTTP: verdicts, limits, refusals, balancing, and death of whatever a check does to its worker."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
import uvicorn
from aiohttp import web
from omegaconf import OmegaConf

from pipelinerl.config.sections import VerifierSection
from pipelinerl.domains.math import generate_rollout
from pipelinerl.domains.verifier.app import create_app
from pipelinerl.domains.verifier.pool import JudgePool
from pipelinerl.domains.verifier_client import VerifierClient, client_of
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.records.verdicts import Check
from pipelinerl.testing import run_rollout

START_S = 120.0
OWN_JUDGE = "examples.instructions.judge.judge"
CORRECT = {"kind": "math", "prediction": "\\boxed{\\frac{1}{2}}", "gold": "0.5"}


@contextlib.contextmanager
def serving(*, secret: str | None = None, **settings: Any) -> Iterator[str]:
    """A verifier in a thread of this process; yields its URL."""
    defaults = {"workers": 2, "timeout_s": 5.0, "memory_mb": 800, "max_body_kb": 64, "judges": [OWN_JUDGE]}
    app = create_app(VerifierSection(**(defaults | settings)), secret=secret)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        deadline = time.monotonic() + START_S
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started, "the verifier did not start"
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def http(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_one_check_and_a_batch(http):
    assert http.post("/", json=CORRECT).json() == {"status": "correct", "score": 1.0, "detail": ""}
    wrong, empty = CORRECT | {"gold": "7"}, CORRECT | {"prediction": ""}
    verdicts = http.post("/batch", json={"checks": [CORRECT, wrong, empty] * 30}).json()["verdicts"]
    assert [v["status"] for v in verdicts] == ["correct", "wrong", "no_answer"] * 30


def test_health_names_its_workers(http):
    assert http.get("/health").json() == {"status": "ok", "workers": 2, "queued": 0}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"kind": "math"}',
        b'{"kind": "math", "prediction": 1, "gold": "1"}',
        b'{"kind": "poetry", "prediction": "1", "gold": "1"}',
        b'{"kind": "math", "prediction": "\\ud800", "gold": "1"}',
        b'{"kind": "math", "prediction": "1", "gold": "1", "extra": 1}',
        b'{"kind": "math", "prediction": "1", "gold": ' + b"[" * 20_000,
    ],
)
def test_body_that_is_no_check_is_refused_with_a_reason(http, body):
    answer = http.post("/", content=body)
    assert answer.status_code == 422
    assert answer.json()["detail"]


def test_batch_with_an_unknown_judge_is_refused_before_anything_is_judged(monkeypatch):
    judged = []
    monkeypatch.setattr(JudgePool, "judge", lambda pool, check: judged.append(check))
    with serving() as url:
        answer = httpx.post(f"{url}/batch", json={"checks": [CORRECT, CORRECT | {"kind": "poetry"}]}, timeout=60)
    assert answer.status_code == 422
    assert "kind is 'poetry'" in answer.json()["detail"]
    assert judged == []


@pytest.mark.parametrize(("route", "valid"), [("/", CORRECT), ("/batch", {"checks": [CORRECT, CORRECT]})])
def test_random_bodies_never_cause_a_server_error(http, route, valid):
    rng = Random(0)
    valid = json.dumps(valid).encode()
    for _ in range(100):
        body = bytearray(valid)
        for _ in range(rng.randint(1, 8)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            body = body[: rng.randrange(len(body))]
        assert http.post(route, content=bytes(body)).status_code in (200, 422)


def test_large_body_is_refused_by_length_and_while_it_streams(http):
    assert http.post("/", content=b"x" * 100_000).status_code == 413
    assert http.post("/", content=(b"x" * 1000 for _ in range(100))).status_code == 413
    assert http.post("/batch", json={"checks": [CORRECT] * 5000}).status_code == 413


def test_unknown_routes_and_methods_are_refused(http):
    assert http.get("/").status_code == 405
    assert http.get("/docs").status_code == 404


def test_secret_is_asked_for_where_there_is_one():
    with serving(secret="s3cret", workers=1) as url, httpx.Client(timeout=60) as http:
        assert http.post(url, json=CORRECT).status_code == 401
        assert http.post(url, json=CORRECT, headers={"Authorization": "Bearer no"}).status_code == 401
        assert http.post(url, json=CORRECT, headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert http.get(f"{url}/health").status_code == 200


HOSTILE = [
    "10^{10^{10}}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "(" * 400 + "1" + ")" * 400,
    "\\sqrt{" * 100 + "x" + "}" * 100,
    "1000000!",
    "(x+1)^{9999}",
    "\\sum_{i=1}^{10^{9}} i^{i}",
    "9" * 990,
    "{" * 500,
]


def test_pathological_answer_costs_one_request_and_never_the_service():
    with serving(workers=1, timeout_s=1.0) as url, httpx.Client(base_url=url, timeout=60) as http:
        for answer in HOSTILE:
            verdict = http.post("/", json=CORRECT | {"prediction": f"\\boxed{{{answer}}}"}).json()
            assert verdict["status"] in ("wrong", "unparsable", "no_answer", "error"), verdict
            assert http.post("/", json=CORRECT).json()["status"] == "correct"


async def test_killed_workers_are_replaced_and_no_check_is_lost():
    async with JudgePool(workers=2, timeout_s=5.0, memory_mb=800) as pool:
        check = Check(kind="math", prediction="\\boxed{\\frac{2}{4}x}", gold="0.50x")
        verdicts = asyncio.gather(*(pool.judge(check) for _ in range(200)))
        for _ in range(5):
            await asyncio.sleep(0)
            for worker in list(pool._alive):
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.process.kill()
        statuses = [verdict.status for verdict in await verdicts]
        assert set(statuses) <= {"correct", "unparsable"}
        assert len(statuses) == 200
        assert (await pool.judge(check)).status == "correct"


async def test_dead_forkserver_is_started_again():
    async with JudgePool(workers=1, timeout_s=5.0, memory_mb=800) as pool:
        assert pool._forkserver is not None
        pool._forkserver.kill()
        check = Check(kind="countdown", prediction="<answer>1+2</answer>", gold={"numbers": [1, 2], "target": 3})
        assert (await pool.judge(check)).status == "correct"


async def test_judge_that_fails_is_an_error_verdict_and_an_exception_at_the_client(url):
    async with aiohttp.ClientSession() as session:
        client = VerifierClient([url])
        with pytest.raises(VerifierError, match="TypeError"):
            await client.check(session, "countdown", "<answer>1</answer>", 7)
        checks = [
            {"kind": "math", "prediction": "\\boxed{1}", "gold": "1"},
            {"kind": OWN_JUDGE, "prediction": "x", "gold": []},
        ]
        async with session.post(f"{url}/batch", json={"checks": checks}) as answer:
            verdicts = (await answer.json())["verdicts"]
        assert [verdict["status"] for verdict in verdicts] == ["correct", "error"]


@contextlib.asynccontextmanager
async def counting_replicas(count: int) -> AsyncIterator[dict[str, int]]:
    """Replicas that find everything correct; yields the checks of each by URL."""
    checks: dict[str, int] = {}

    async def judge(request: web.Request) -> web.Response:
        checks[str(request.url.origin())] += 1
        return web.json_response({"status": "correct", "score": 1.0, "detail": ""})

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            app = web.Application()
            app.router.add_post("/", judge)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            checks[f"http://127.0.0.1:{runner.addresses[0][1]}"] = 0
        yield checks


async def test_client_balances_replicas_and_leaves_a_dead_one():
    async with counting_replicas(2) as checks, aiohttp.ClientSession() as session:
        client = VerifierClient([*checks, "http://127.0.0.1:9"])
        await asyncio.gather(*(client.check(session, "math", "1", "1") for _ in range(100)))
    assert sum(checks.values()) == 100
    assert min(checks.values()) > 25


async def test_checks_one_after_the_other_take_the_replicas_in_turn():
    async with counting_replicas(3) as checks, aiohttp.ClientSession() as session:
        client = VerifierClient(list(checks))
        for _ in range(12):
            await client.check(session, "math", "1", "1")
    assert list(checks.values()) == [4, 4, 4]


async def test_service_that_stays_away_is_a_verifier_error():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(VerifierError, match="no verifier of"):
            await VerifierClient(["http://127.0.0.1:9"], retries=1).check(session, "math", "1", "1")


async def test_refused_request_is_not_repeated(url):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(VerifierError, match="422"):
            await VerifierClient([url]).check(session, "poetry", "1", "1")


def test_run_without_verifiers_says_how_to_get_one():
    with pytest.raises(DomainError, match=r"world\.verifier_replicas"):
        client_of(OmegaConf.create({"jobs": [{"kind": "actor_llm", "url": "http://x"}]}))


@pytest.mark.parametrize(("reply", "reward"), [("\\boxed{0.5}", 1), ("\\boxed{2}", 0), ("0.5", -1)])
async def test_math_rollout_is_judged_by_the_service(url, reply, reward):
    cfg = {
        "jobs": [{"kind": "verifier", "url": url}],
        "rewards": {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None},
    }
    result = await run_rollout(generate_rollout, {"task": "Half of 1?", "answer": "\\frac{1}{2}"}, [reply], cfg)
    assert result.metrics.reward == reward
