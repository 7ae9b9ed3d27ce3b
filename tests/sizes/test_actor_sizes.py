"""The actor at the sizes of real runs: long completions, many attempts, many rollouts at once."""

import ctypes
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from aiohttp import web

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.records import GroupDropped, RolloutGroup
from pipelinerl.records.answers import AnswerRequest
from pipelinerl.rollouts import CallTokens, RolloutResult, TrainingText
from pipelinerl.streams.codec import Codec
from pipelinerl.testing import FakeServer, byte_tokenizer
from tests.actor_run import TOKENIZER, make_runs
from tests.sizes.domains import METRICS

BUILT = "actor.rollout_policy=tests.sizes.domains.build"
PROMPT_FRAME = len(
    TOKENIZER.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True)["input_ids"]
)
LETTER = TOKENIZER.encode("a")[0]


REQUESTS: Codec[AnswerRequest] = Codec(AnswerRequest)


class LongAnswers(FakeServer):
    """Answers ``length`` tokens, from memory: the cost of a server's encoding is not what these tests are about."""

    def __init__(self, length: int):
        super().__init__(lambda *_: [LETTER] * length)
        self._answers: dict[tuple[int, int | str], bytes] = {}

    async def _generate(self, request: web.Request) -> web.Response:
        n = REQUESTS.decode(await request.read()).sampling.get("n", 1)
        known = self._answers.get((n, self.version))
        if known is None or not self.hold.is_set():
            response = await super()._generate(request)
            assert isinstance(response.body, bytes)
            known = self._answers[n, self.version] = response.body
        return web.Response(body=known)


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


def asking(**params: Any) -> list[str]:
    """The domain that asks as often, and for as long prompts, as the parameters say."""
    given = [f"++dataset_loader_params.{key}={value}" for key, value in params.items()]
    unset = [f"~dataset_loader_params.{key}" for key in ("max_number", "num_test_problems")]
    domain = ["dataset_loader=tests.sizes.domains.load_problems", "actor.rollout_policy=tests.sizes.domains.ask"]
    return [*unset, *given, *domain]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("length", "attempts"),
    [
        (1, 64),
        *(pytest.param(*size, marks=slow) for size in [(1, 1), (1, 8), (8000, 1), (8000, 8), (8000, 64)]),
        *(pytest.param(*size, marks=slow) for size in [(2500, 8), (32000, 1), (32000, 8), (32000, 64)]),
    ],
)
async def test_groups_of_long_completions_arrive_whole(make_run: Callable, length: int, attempts: int) -> None:
    sizes = {"attempts": attempts, "finetune.gradient_accumulation_passes": 2 * attempts, "max_lag_steps": 0}
    run = await make_run(*long(length, **sizes), "actor.llm_max_rollouts=64", fakes=[LongAnswers(length)])
    run.start()
    run.update(0)
    await run.until(lambda: len(run.records) == 2, 200)
    for group in run.records:
        assert isinstance(group, RolloutGroup)
        assert [len(rollout.sequences[0].logprobs) for rollout in group.rollouts] == [length] * attempts


@pytest.mark.parametrize(
    ("rollouts", "open_files", "tokens"),
    [
        (512, 512, 10),
        pytest.param(4096, 1024, 900, marks=slow),
        pytest.param(16384, 1024, 10, marks=slow),
    ],
)
async def test_rollouts_at_once_under_a_low_limit_of_open_files(
    make_run: Callable, rollouts: int, open_files: int, tokens: int
) -> None:
    """Every rollout is a request of its own, on 64 servers: those beyond the limit wait and nothing fails."""
    possible = (open_files - 256) // 2 * 3 // 4
    run = await make_run(
        *long(tokens, **{"attempts": 1, "finetune.gradient_accumulation_passes": rollouts, "max_lag_steps": 0}),
        *(f"actor.llm_max_rollouts={rollouts // 64}", "++dataset_loader_params.max_number=30"),
        fakes=[LongAnswers(tokens) for _ in range(64)],
    )
    for fake in run.servers:
        fake.hold.clear()
    run.start_process(open_files)
    run.update(0)
    await run.until(lambda: sum(len(fake.requests) for fake in run.servers) == possible, 200)
    for fake in run.servers:
        fake.hold.set()
    await run.until(lambda: len(run.records) == rollouts, 200)
    assert all(isinstance(record, RolloutGroup) for record in run.records)
    limit = (
        f"open files are limited to {open_files}: a worker has {possible} requests under way at once, not {rollouts}"
    )
    assert limit in run.log()
    assert "event=request_repeated" not in run.log()


async def test_prompts_of_thirty_thousand_tokens_arrive_whole(make_run: Callable) -> None:
    run = await make_run(*long(40000, attempts=8), *asking(characters=30000), fakes=[LongAnswers(100)])
    run.start()
    run.update(0)
    await run.until(lambda: len(run.records) == 2, 200)
    sequence = run.records[0].rollouts[0].sequences[0]
    assert (len(sequence.token_ids), len(sequence.logprobs)) == (30000 + 4 + PROMPT_FRAME + 100, 100)


async def test_domain_that_returns_two_hundred_texts_is_trained_whole(make_run: Callable) -> None:
    run = await make_run(*long(2000), *asking(texts=200, characters=1000), fakes=[LongAnswers(20)])
    run.start()
    run.update(0)
    await run.until(lambda: bool(run.records), 100)
    assert [len(rollout.sequences) for rollout in run.records[0].rollouts] == [200] * 4


@pytest.mark.parametrize("tokens", [pytest.param(200_000, marks=slow), 20_000])
async def test_group_of_many_megabytes_arrives_whole(make_run: Callable, tokens: int) -> None:
    """64 rollouts of 200,000 tokens at 8 bytes each: 102 MB."""
    sizes = {"attempts": 64, "finetune.gradient_accumulation_passes": 64, "max_lag_steps": 0}
    run = await make_run(*long(tokens, **sizes), *asking(tokens=tokens), BUILT, "actor.llm_max_rollouts=64")
    run.start()
    run.update(0)
    await run.until(lambda: bool(run.records), 200)
    assert [len(rollout.sequences[0].logprobs) for rollout in run.records[0].rollouts] == [tokens] * 64


async def test_group_larger_than_a_record_may_be_is_dropped_with_its_size_and_the_key(make_run: Callable) -> None:
    """4 rollouts of 40,000 tokens at 8 bytes each; the next groups are dropped too and nothing hangs."""
    run = await make_run(*long(40_000), *asking(tokens=40_000), BUILT, "streams.max_record_mb=1")
    run.start()
    run.update(0)
    await run.until(lambda: len(run.records) >= 6, 200)
    dropped = run.records[0]
    assert isinstance(dropped, GroupDropped)
    assert dropped.reason == "too_large"
    assert re.search(r"128\d{4} bytes, but streams\.max_record_mb is 1: raise it", dropped.detail)


async def test_two_thousand_weight_versions_while_rollouts_are_under_way(make_run: Callable) -> None:
    run = await make_run("finetune.max_train_steps=5000", "max_lag_steps=1", fakes=[LongAnswers(50)])
    run.start()
    for version in range(2000):
        run.update(version)
    await run.until(lambda: len(run.records) > 100, 200)
    assert all(isinstance(record, RolloutGroup) for record in run.records)


def test_rollout_that_lived_through_two_thousand_versions_keeps_each_tokens_version() -> None:
    spans = np.array([(16 * i, 16 * (i + 1), i) for i in range(2000)], np.int32)
    tokens = CallTokens(
        prompt_ids=np.arange(30_000, dtype=np.int32),
        completion_ids=np.zeros(32_000, np.int32),
        logprobs=np.zeros(32_000, np.float32),
        version_spans=spans,
        finish_reason="stop",
    )
    text = TrainingText(text="", n_predicted=0)
    text.attach(tokens)
    result = RolloutResult(training_texts=[text], metrics=METRICS, latency=0.0)
    made = to_rollout(result, attempt=0, latency_s=1.0, num_llm_calls=1, fallback_version=0, seq_length=62_000)
    np.testing.assert_array_equal(made.sequences[0].spans, spans + np.array([30_000, 30_000, 0]))


def test_long_prompts_that_never_return_fill_no_memory() -> None:
    """110 prompts of 60,000 tokens take 360 KB each, 40 MB in all, of which 32 MB are kept."""
    renderer = ChatRenderer(TOKENIZER)
    messages = [[{"role": "user", "content": f"{i:06d}" + "x" * 60_000}] for i in range(110)]
    first = renderer.render(messages[0], None, {})
    assert renderer.render(messages[0], None, {}) is first
    for one in messages[1:]:
        renderer.render(one, None, {})
    held = sum(len(key) + len(kept.text) + kept.token_ids.nbytes for key, kept in renderer._prompts.items())
    assert 24 * 2**20 < held <= 32 * 2**20
    assert renderer.render(messages[0], None, {}) is not first


class Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_: ClassVar = [("counts", ctypes.c_size_t * 10)]


def allocated_bytes() -> int:
    """Of the main heap, whatever has been freed before and is still resident (``uordblks``)."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Allocated
    return mallinfo().counts[7]


def test_prompts_that_never_return_leave_nothing_in_the_tokenizer() -> None:
    """The tokenizer's own cache of words kept 4 KB of each: 4 MB of these 1,000."""
    renderer = ChatRenderer(byte_tokenizer())

    def render(numbers: range) -> int:
        for i in numbers:
            renderer.render([{"role": "user", "content": f"{i:06d}" + "x" * 100}], None, {})
        return allocated_bytes()

    before = render(range(500))
    assert render(range(500, 1500)) - before < 2**20
