"""Every answer gets a verdict: beside answers that take for ever, larger than a request, or left by their client."""

import asyncio
import re
from typing import Any

import aiohttp
import httpx
import pytest

from pipelinerl.domains.coding.judge import same_value
from pipelinerl.domains.verifier import pool as verifier_pool
from pipelinerl.domains.verifier.pool import SLICES_S, JudgePool, Lanes
from pipelinerl.domains.verifier_client import VerifierClient, part_to_send
from pipelinerl.records.verdicts import Check
from tests.integration.test_verifier_service import OWN_JUDGE, serving
from tests.says import says

BOMB = {
    "kind": "math",
    "prediction": "\\boxed{\\sum_{i=1}^{10^{9}} i^{i}}",
    "gold": "42",
    "options": {"operators": "allow"},
}
HONEST = {"kind": "math", "prediction": "so \\boxed{\\frac{1}{2}x + 1}", "gold": "1 + 0.5x"}


async def test_bombs_beside_honest_answers_all_get_verdicts_and_short_slices_go_first(monkeypatch):
    lanes: list[int] = []
    start_next = Lanes.start_next

    def recorded(self: Lanes) -> Any:
        started = start_next(self)
        if started is not None:
            lanes.append(started[0])
        return started

    monkeypatch.setattr(Lanes, "start_next", recorded)
    async with JudgePool(workers=2, timeout_s=2.0, memory_mb=800) as pool:
        asked = [pool.judge(Check(**check)) for check in [BOMB] * 3 + [HONEST] * 6]
        verdicts = await asyncio.gather(*asked)
        assert pool.queued == 0
    assert [verdict.status for verdict in verdicts] == ["unparsable"] * 3 + ["correct"] * 6
    assert lanes[:9] == [0] * 9  # every first slice comes before any longer one
    assert lanes.count(4) >= 3


async def test_worker_is_interrupted_by_cpu_time_not_by_wall_time():
    async with JudgePool(workers=1, timeout_s=1.0, memory_mb=800) as pool:
        assert (await pool.judge(Check(**HONEST))).status == "correct"
        (worker,) = pool._alive
        used_s = worker.cpu_s
        assert (await pool.judge(Check(**BOMB))).status == "unparsable"
        assert pool._alive == {worker}, "it interrupted itself: else it would have been killed"
        assert worker.cpu_s - used_s >= sum(SLICES_S) + 1.0


async def test_worker_that_gets_no_cpu_is_an_error_and_is_replaced(monkeypatch):
    async with JudgePool(workers=1, timeout_s=10.0, memory_mb=800) as pool:
        (worker,) = pool._alive
        worker.process.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(verifier_pool, "WALL_FACTOR", 0.05)
            verdict = await pool.judge(Check(**HONEST))
        assert verdict.status == "error"
        assert re.match(says("CPU", "0.5"), verdict.detail)
        assert (await pool.judge(Check(**HONEST))).status == "correct"


async def test_check_of_a_client_that_is_gone_leaves_the_queue() -> None:
    with serving(workers=1, timeout_s=10.0) as url:
        async with aiohttp.ClientSession() as session:
            dead = [asyncio.ensure_future(session.post(url, json=BOMB)) for _ in range(10)]
            async with httpx.AsyncClient(base_url=url, timeout=200) as http:
                while (await http.get("/health")).json()["queued"] < 5:  # noqa: ASYNC110, the service counts
                    await asyncio.sleep(0.01)
                for request in dead:
                    request.cancel()
                await asyncio.gather(*dead, return_exceptions=True)
                while (await http.get("/health")).json()["queued"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert (await http.post("/", json=HONEST)).json()["status"] == "correct"


async def test_check_that_waits_longer_than_the_deadline_gets_its_verdict_while_the_replica_lives() -> None:
    async with aiohttp.ClientSession() as session:
        with serving(workers=1, timeout_s=1.0) as url:
            client = VerifierClient([url], timeout_s=2.0, retries=0)
            checks = [BOMB] * 3 + [HONEST]
            asked = [
                client.check(session, c["kind"], c["prediction"], c["gold"], **c.get("options", {})) for c in checks
            ]
            verdicts = await asyncio.gather(*asked)
    assert [verdict.status for verdict in verdicts] == ["unparsable"] * 3 + ["correct"]


async def test_replica_that_gives_no_sign_of_life_is_left() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    frozen = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session, frozen:
        frozen_url = f"http://127.0.0.1:{frozen.sockets[0].getsockname()[1]}"
        with serving() as url:
            client = VerifierClient([frozen_url, url], timeout_s=2.0, retries=1)
            verdict = await client.check(session, "math", HONEST["prediction"], HONEST["gold"])
        for writer in connections:
            writer.close()
    assert verdict.status == "correct"
    assert len(connections) == 2  # the check, and the question whether it lives


async def test_answer_larger_than_a_request_gets_a_verdict() -> None:
    with serving() as url:
        async with aiohttp.ClientSession() as session:
            client = VerifierClient([url])
            dashes = "-" * 2_000_000
            assert (await client.check(session, "math", dashes + "\\boxed{3}", "3")).status == "correct"
            assert (await client.check(session, "math", f"\\boxed{{{dashes}}}", "3")).status == "unparsable"
            assert (await client.check(session, "math", dashes, "3", answer_format="boxed")).status == "no_answer"
            words = [{"check": "length", "unit": "words", "at_least": 1}]
            assert (await client.check(session, OWN_JUDGE, dashes, words)).status == "unparsable"
            gold = {"numbers": [1, 2], "target": 3}
            assert (await client.check(session, "countdown", f"{dashes}<answer>1+2</answer>", gold)).status == "correct"


@pytest.mark.parametrize(
    ("kind", "output", "sent"),
    [
        ("math", "so \\boxed{1} or \\boxed{\\frac{1}{2}} end", "\\boxed{\\frac{1}{2}}"),
        ("math", "cut \\boxed{\\frac{1}", "\\boxed{"),
        ("countdown", "<answer>1</answer> <answer>2</answer> <answer>", "<answer>2</answer>"),
        (OWN_JUDGE, "all of it", "all of it"),
        ("math", "\\boxed{\ud800}", "\\boxed{?}"),
    ],
)
def test_client_sends_what_the_judge_reads(kind: str, output: str, sent: str) -> None:
    assert part_to_send(kind, output) == sent


def test_whole_number_beyond_every_float_is_another_value() -> None:
    assert not same_value(10**400, 1.5)
    assert same_value(2, 2.0)
