"""The actor at the sizes of real runs: long completions, many attempts, many rollouts at once."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipelinerl.records import RolloutGroup
from pipelinerl.testing import FakeServer
from tests.actor_run import TOKENIZER, make_runs

LETTER = TOKENIZER.encode("a")[0]


class LongAnswers(FakeServer):
    """Answers ``length`` tokens, from memory: the cost of a server's JSON is not what these tests are about."""

    def __init__(self, length: int):
        super().__init__(lambda *_: [LETTER] * length)
        self._answers: dict[tuple[int, int | str], bytes] = {}

    async def _generate(self, request: web.Request) -> web.Response:
        n = (await request.json())["sampling_params"].get("n", 1)
        known = self._answers.get((n, self.version))
        if known is None or not self.hold.is_set():
            response = await super()._generate(request)
            assert isinstance(response.body, bytes)
            known = self._answers[n, self.version] = response.body
        return web.Response(body=known, content_type="application/json")


@pytest.fixture
async def make_run(tmp_path: Path) -> AsyncIterator[Callable]:
    async with make_runs(tmp_path) as make:
        yield make


def long(length: int, **changes: Any) -> list[str]:
    values = {
        "llm.parameters.max_tokens": length,
        "finetune.seq_length": length + 1000,
        "vllm_config.vllm_kwargs.max_model_len": length + 1000,
    } | changes
    return [f"{key}={value}" for key, value in values.items()]


@pytest.mark.parametrize("length", [2500, 8000])
async def test_groups_of_eight_long_completions_arrive_whole(make_run: Callable, length: int) -> None:
    run = await make_run(*long(length, attempts=8), fakes=[LongAnswers(length)])
    run.start()
    run.update(0)
    await run.until(lambda: len(run.records) == 2, 60)
    for group in run.records:
        assert isinstance(group, RolloutGroup)
        assert [len(rollout.sequences[0].logprobs) for rollout in group.rollouts] == [length] * 8


async def test_thousands_of_rollouts_at_once_under_a_thousand_open_files(make_run: Callable) -> None:
    """4,096 rollouts, each a request of its own, on 64 servers, with a hard limit of 1,024 open files."""
    run = await make_run(
        *long(900, **{"attempts": 1, "finetune.gradient_accumulation_passes": 4096, "max_lag_steps": 0}),
        *("actor.llm_max_rollouts=64", "++dataset_loader_params.max_number=30"),
        fakes=[LongAnswers(900) for _ in range(64)],
    )
    for fake in run.servers:
        fake.hold.clear()
    run.start_process(open_files=1024)
    run.update(0)
    await run.until(lambda: sum(len(fake.requests) for fake in run.servers) >= 200, 60)
    for fake in run.servers:
        fake.hold.set()
    await run.until(lambda: len(run.records) == 4096, 120)
    assert all(isinstance(record, RolloutGroup) for record in run.records)
    assert "open files are limited to 1024: a worker has 288 requests under way at once, not 4096" in run.log()
