"""Rollouts in a worker: joined requests, failures and their types, deadlines, retries."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from omegaconf import OmegaConf

from benchmarks.whole_group import run_whole_group
from pipelinerl.actor import growth, router
from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import FromWorker, GroupFinished, RolloutFailed, StartGroup
from pipelinerl.actor.router import Client, JoinPolicy, RequestLimits
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import ServerError, TransportError, VerifierError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.streams.codec import Codec
from pipelinerl.testing import FakeServer, byte_tokenizer

TOKENIZER = byte_tokenizer()
METRICS = BaseMetrics(reward=1, success=True, no_error=True, no_answer=False)


def answer(prompt_ids: list[int], params: dict[str, Any], index: int) -> list[int]:
    return [*TOKENIZER.encode(str(index)), TOKENIZER.eos_token_id]


async def ask(llm: TrainableLLM, session: aiohttp.ClientSession, text: str = "?") -> RolloutResult:
    call = await llm_async_generate(llm, Prompt.from_user_message(text), session)
    return RolloutResult(training_texts=[make_training_text(llm, call)], metrics=METRICS, latency=0.0)


async def plain(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    return await ask(llm, session)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(answer) as running:
        yield running


Run = Callable[..., Any]


async def follow(client: Client, every_s: float) -> None:
    """Asks the servers again and again how far their answers are, as a worker does."""
    while True:
        await asyncio.sleep(every_s)
        await client.follow()


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    async with aiohttp.ClientSession() as session:

        async def run_group(
            function: Callable, *servers: FakeServer, attempts: int = 4, problem: dict | None = None, **changes: Any
        ) -> GroupFinished:
            rules = {"timeout_s": changes.pop("rollout_timeout_s", 60.0), "seq_length": changes.pop("seq_length", 1000)}
            rules["named_rewards"] = changes.pop("named_rewards", ())
            limits = {"timeout_s": changes.pop("request_timeout_s", 60.0), "max_completions": 64}
            limits |= {"max_retries": changes.pop("max_request_retries", 2)}
            parameters = changes.pop("parameters", {"max_tokens": 8})
            group_id, follow_s = changes.pop("group_id", "g"), changes.pop("follow_s", None)
            assert not changes
            llm = TrainableLLM(model_name="policy", tokenizer=TOKENIZER, parameters=parameters, collect_logprobs=True)
            client = Client(session, RequestLimits(**limits))
            executor = Executor(OmegaConf.create({}), [function], (llm, llm), client, RolloutRules(**rules))
            executor.servers.update(
                {str(i): running.url for i, running in enumerate(servers)}, {str(i): 7 for i in range(len(servers))}
            )
            start = StartGroup(
                task_id=1,
                group_id=group_id,
                domain=0,
                problem=problem or {"p": 1},
                attempts=tuple(range(attempts)),
                evaluation=False,
                version=0,
            )
            following = asyncio.create_task(follow(client, follow_s)) if follow_s else None
            try:
                return await run_whole_group(executor, start)
            finally:
                if following:
                    following.cancel()

        yield run_group


async def test_rollout_names_its_server_and_the_probes_that_it_had_missed_before_it_answered(
    run: Run, server: FakeServer
) -> None:
    def miss(llm: TrainableLLM) -> None:
        llm.state.transport._route._pool.update({"0": server.url}, {"0": 7}, {"0": 1})

    async def missed_after(cfg: Any, llm: TrainableLLM, problem: dict, session: Any) -> RolloutResult:
        result = await ask(llm, session)
        miss(llm)
        return result

    async def missed_before(cfg: Any, llm: TrainableLLM, problem: dict, session: Any) -> RolloutResult:
        miss(llm)
        return await ask(llm, session)

    for function, missed in ((missed_after, 0), (missed_before, 1)):
        for rollout in (await run(function, server, attempts=2)).rollouts:
            assert (rollout.servers, rollout.probes_missed) == (("0",), (missed,))


async def test_rollout_without_a_named_reward_is_an_error_of_the_domain(run: Run, server: FakeServer) -> None:
    assert len((await run(plain, server, named_rewards=("reward", "success"))).rollouts) == 4
    finished = await run(plain, server, named_rewards=("success", "style"))
    assert {failure.reason for failure in finished.failures} == {"domain_error"}
    assert all("'style'" in failure.detail for failure in finished.failures)


async def test_equal_requests_of_a_group_travel_as_one(run: Run, server: FakeServer) -> None:
    finished = await run(plain, server)
    assert [request["sampling_params"]["n"] for request in server.requests] == [4]
    sampled = sorted(TOKENIZER.decode(r.sequences[0].token_ids)[-len("0<|im_end|>") :][0] for r in finished.rollouts)
    assert sampled == ["0", "1", "2", "3"]


async def test_a_seed_or_different_prompts_keep_requests_apart(run: Run, server: FakeServer) -> None:
    await run(plain, server, parameters={"max_tokens": 8, "seed": 1})
    assert len(server.requests) == 4
    count = iter(range(4))

    async def different(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        return await ask(llm, session, str(next(count)))

    await run(different, server)
    assert len(server.requests) == 8


async def test_seed_gives_every_attempt_and_call_of_every_group_a_seed_of_its_own(run: Run, server: FakeServer) -> None:
    """One seed for all would make a group's attempts equal and every advantage zero."""

    async def two_turns(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        await ask(llm, session)
        return await ask(llm, session)

    async def seeds(group_id: str, seed: int) -> list[int]:
        server.requests.clear()
        await run(two_turns, server, parameters={"max_tokens": 8, "seed": seed}, group_id=group_id)
        return sorted(request["sampling_params"]["seed"] for request in server.requests)

    first, again, next_epoch, other = [
        await seeds(group, seed) for group, seed in [("0-1", 5), ("0-1", 5), ("1-1", 5), ("0-1", 6)]
    ]
    assert first == again
    assert len({*first, *next_epoch, *other}) == 3 * 4 * 2
    assert all(0 <= seed < 2**63 for seed in first)


def test_requests_are_joined_only_while_completions_have_equal_lengths() -> None:
    policy = JoinPolicy()
    assert policy.joins
    for number in range(1, 101):
        policy.observe([5, 50, 200, 120])  # mean 93.75 of 200
        # .46875 + .53125 · .95ⁿ is .804 after nine of them, .787 after ten
        assert policy.joins == (number < 10)
    for _ in range(100):
        policy.observe([9, 10, 10, 10])
    assert policy.joins


async def test_unequal_lengths_separate_the_requests_of_later_groups(run: Run) -> None:
    def uneven(prompt_ids: list[int], params: dict[str, Any], index: int) -> list[int]:
        return answer(prompt_ids, params, 0) * (1 if uneven_count() else 7)

    count = iter(range(10**6))

    def uneven_count() -> bool:
        return next(count) % 4 != 0

    async with FakeServer(uneven) as server, aiohttp.ClientSession() as session:
        llm = TrainableLLM(
            model_name="policy", tokenizer=TOKENIZER, parameters={"max_tokens": 99}, collect_logprobs=True
        )
        client = Client(session, RequestLimits(timeout_s=60, max_retries=0, max_completions=64))
        rules = RolloutRules(timeout_s=60, seq_length=1000)
        executor = Executor(OmegaConf.create({}), [plain], (llm, llm), client, rules)
        executor.servers.update({"0": server.url}, {"0": 7})
        for task_id in range(20):
            start = StartGroup(
                task_id=task_id,
                group_id="g",
                domain=0,
                problem={},
                attempts=(0, 1, 2, 3),
                evaluation=False,
                version=0,
            )
            assert len((await run_whole_group(executor, start)).rollouts) == 4
    sizes = [request["sampling_params"].get("n", 1) for request in server.requests]
    assert (sizes[0], sizes[-1]) == (4, 1)


async def test_failing_server_is_left_for_another(run: Run, server: FakeServer) -> None:
    async with FakeServer(answer) as broken:
        broken.status = 500
        finished = [await run(plain, broken, server) for _ in range(4)]
    assert all(len(one.rollouts) == 4 for one in finished)


@pytest.mark.parametrize(("status", "reason"), [(500, "transport"), (400, "domain_error"), (429, "transport")])
async def test_status_of_the_server_types_the_failure(run: Run, server: FakeServer, status: int, reason: str) -> None:
    server.status = status
    finished = await run(plain, server, attempts=2, max_request_retries=1)
    assert [failure.reason for failure in finished.failures] == [reason] * 2
    assert len(server.requests) == (1 if status == 400 else 2)


async def test_domain_that_swallows_a_transport_failure_earns_no_reward(run: Run, server: FakeServer) -> None:
    async def swallowing(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        try:
            return await ask(llm, session)
        except Exception:
            return RolloutResult(training_texts=[], metrics=METRICS, latency=0.0)

    server.status = 500
    finished = await run(swallowing, server, max_request_retries=0)
    assert finished.rollouts == ()
    assert {failure.reason for failure in finished.failures} == {"transport"}


async def test_domain_that_wraps_a_transport_failure_is_not_blamed(run: Run, server: FakeServer) -> None:
    async def wrapping(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        try:
            return await ask(llm, session)
        except TransportError:
            raise RuntimeError("my agent failed") from None

    server.status = 503
    finished = await run(wrapping, server, attempts=1, max_request_retries=0)
    assert finished.failures[0].reason == "transport"


async def test_domain_may_handle_a_refused_prompt(run: Run, server: FakeServer) -> None:
    async def handling(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        first = await ask(llm, session)
        server.status = 400
        with pytest.raises(ServerError, match="400"):
            await ask(llm, session, "too long")
        return first

    finished = await run(handling, server, attempts=1)
    assert (len(finished.rollouts), finished.failures) == (1, ())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("answer"), "domain_error"),
        (VerifierError("verifier_0 did not answer"), "verifier"),
        (TransportError("tool server"), "transport"),
        (aiohttp.ServerDisconnectedError(), "transport"),
        (TimeoutError("my own"), "timeout"),
        (asyncio.CancelledError(), "domain_error"),
        (SystemExit(1), "domain_error"),
        (ValueError("\ud800 and a long text: " + "x" * 10**6), "domain_error"),
    ],
)
async def test_exception_of_the_domain_is_typed_and_costs_one_rollout(
    run: Run, server: FakeServer, error: BaseException, reason: str
) -> None:
    turn = iter(range(4))

    async def failing(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        if next(turn) == 1:
            raise error
        return await ask(llm, session)

    finished = await run(failing, server)
    assert len(finished.rollouts) == 3
    (failure,) = finished.failures
    assert failure.reason == reason
    assert f"failing raised {type(error).__name__}" in failure.detail
    assert "{'p': 1}" in failure.detail
    assert len(Codec(FromWorker).encode(RolloutFailed(task_id=1, failure=failure))) < 4000


async def test_rollout_deadline_ends_it_as_timeout(run: Run, server: FakeServer) -> None:
    server.hold.clear()
    finished = await run(plain, server, attempts=1, rollout_timeout_s=0.2)
    (failure,) = finished.failures
    assert failure.reason == "timeout"
    assert "actor.rollout_timeout_s=0.2" in failure.detail


class GrowingServer(FakeServer):
    """Has sampled one more token of every request each time it is asked. Answers at the ``last``."""

    def __init__(self, last: int):
        super().__init__(answer)
        self.last = last
        self.hold.clear()

    async def _under_way(self, request: web.Request) -> web.Response:
        self.num_sampled += 1
        if self.num_sampled >= self.last:
            self.hold.set()
        return await super()._under_way(request)


async def test_answer_that_grows_outlives_the_time_limits_of_request_and_rollout(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are 3 s, and the answer takes 80 questions, one every 0.05 s."""
    monkeypatch.setattr(growth, "FOLLOW_S", 0.0)
    async with GrowingServer(80) as growing:
        finished = await run(plain, growing, attempts=2, request_timeout_s=3.0, rollout_timeout_s=3.0, follow_s=0.05)
        assert (len(finished.rollouts), len(growing.requests)) == (2, 1)
        assert growing.num_sampled >= 80


async def test_attempt_that_has_ended_is_no_load_of_its_server(run: Run, server: FakeServer) -> None:
    loads: list[int] = []
    answered: list[str] = []

    async def one_is_slow(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        result = await ask(llm, session)
        answered.append(llm.state.name)
        if len(answered) == 4:  # the last to be answered
            for _ in range(100):  # turns of the loop in which the others end
                await asyncio.sleep(0)
            loads.append(llm.state.transport._route.server.load)
        return result

    finished = await run(one_is_slow, server)
    assert len(finished.rollouts) == 4
    assert loads == [1]


@pytest.mark.parametrize(("text", "sent", "left"), [("?", [4], [1, 1, 1, 0]), (None, [1, 1, 1, 1], [3, 2, 1, 0])])
async def test_request_is_given_up_when_nobody_waits_for_it_any_more(
    run: Run, server: FakeServer, text: str | None, sent: list[int], left: list[int]
) -> None:
    """A domain bounds its calls. What it gave up was sampled to its end, or until the whole group had ended."""
    under_way: list[int] = []
    gave_up = [asyncio.Event() for _ in range(4)]
    server.hold.clear()

    async def impatient(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        number = int(llm.state.name[-1])
        call = asyncio.create_task(ask(llm, session, text or str(number)))
        while len(server.requests) < len(sent):  # noqa: ASYNC110 — the server tells nobody
            await asyncio.sleep(0)
        if number:
            await gave_up[number - 1].wait()
        call.cancel()
        for _ in range(100):  # turns of the loop in which the request may end
            await asyncio.sleep(0)
        under_way.append(len(llm.state.transport._route.server.requests))
        gave_up[number].set()
        await gave_up[-1].wait()
        server.hold.set()
        return await ask(llm, session, "again")

    finished = await run(impatient, server)
    assert len(finished.rollouts) == 4
    assert [request["sampling_params"].get("n", 1) for request in server.requests][: len(sent)] == sent
    assert under_way == left


@pytest.mark.parametrize("state", ["sent", "not sent", "asks again"])
async def test_call_that_a_domain_leaves_behind_ends_with_its_group(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """As after `asyncio.wait`, which cancels nothing. It waited for ever, with what it held, or asked on and on."""
    left: list[asyncio.Task] = []
    is_over = asyncio.Event()
    server.hold.clear()
    if state == "not sent":
        monkeypatch.setattr(router, "COALESCE_WINDOW_S", 3600)

    async def stay(llm: TrainableLLM, session: aiohttp.ClientSession) -> None:
        if state == "asks again":
            await is_over.wait()
        await ask(llm, session, llm.state.name)

    async def leaves(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        left.append(asyncio.create_task(stay(llm, session)))
        while state == "sent" and len(server.requests) < 4:  # noqa: ASYNC110 — the server tells nobody
            await asyncio.sleep(0)
        raise ValueError("no result")

    assert len((await run(leaves, server)).failures) == 4
    is_over.set()
    ended, _ = await asyncio.wait(left, timeout=60)
    assert len(ended) == 4
    assert all(task.cancelled() for task in ended)
    assert len(server.requests) == (4 if state == "sent" else 0)


async def test_request_deadline_is_a_transport_failure_that_is_repeated(run: Run, server: FakeServer) -> None:
    server.hold.clear()
    finished = await run(plain, server, attempts=1, request_timeout_s=0.1, max_request_retries=1)
    assert finished.failures[0].reason == "transport"
    assert len(server.requests) == 2


async def test_sequence_longer_than_seq_length_is_too_long(run: Run, server: FakeServer) -> None:
    finished = await run(plain, server, attempts=1, seq_length=3)
    assert finished.failures[0].reason == "too_long"


async def test_result_without_tokens_is_not_trained(run: Run, server: FakeServer) -> None:
    async def empty(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        return RolloutResult(training_texts=[], metrics=METRICS, latency=0.0)

    finished = await run(empty, server, attempts=1)
    assert finished.failures[0].reason == "no_trained_tokens"
    assert "returned 0 training texts" in finished.failures[0].detail


async def test_result_whose_labels_are_all_masked_is_not_trained_and_says_so(run: Run, server: FakeServer) -> None:
    async def masked(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        result = await plain(cfg, llm, problem, session)
        for text in result.training_texts:
            text.labels = [-100] * len(text.labels)
        return result

    finished = await run(masked, server, attempts=1)
    assert finished.failures[0].reason == "no_trained_tokens"
    assert "masked returned 1 training texts" in finished.failures[0].detail


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.3), ("top_p", 0.9), ("min_tokens", 4), ("structured_outputs", {"regex": "a"})]
)
async def test_rollout_function_that_samples_from_another_distribution_fails_before_it_samples(
    run: Run, server: FakeServer, name: str, value: object
) -> None:
    async def distort(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        llm.parameters[name] = value
        return await ask(llm, session)

    finished = await run(distort, server, attempts=2, parameters={"max_tokens": 8, "temperature": 0.7})
    assert [failure.reason for failure in finished.failures] == ["domain_error"] * 2
    assert f"sets llm.parameters['{name}']={value!r}" in finished.failures[0].detail
    assert server.requests == []


async def test_rollout_function_may_choose_lengths_and_stop_strings(run: Run, server: FakeServer) -> None:
    async def shorter(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
        llm.parameters |= {"max_tokens": 4, "stop": ["x"], "top_p": 1.0}
        return await ask(llm, session)

    finished = await run(shorter, server, attempts=2, parameters={"max_tokens": 8, "temperature": 0.7})
    assert len(finished.rollouts) == 2


async def test_calls_of_a_copied_model_are_counted_and_their_failure_fails_the_rollout(
    run: Run, server: FakeServer
) -> None:
    async def through_a_copy(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> Any:
        copies = [llm.model_copy(update={"parameters": llm.parameters | {"max_tokens": n}}) for n in (2, 3)]
        results = [await ask(copy, session) for copy in copies]
        if problem["fails"]:
            llm.state.transport = None
            copies[0].base_url, copies[0].max_retries = "http://127.0.0.1:9", 0
            with contextlib.suppress(TransportError):
                await ask(copies[0], session)
        return results[0]

    (rollout,) = (await run(through_a_copy, server, attempts=1, problem={"fails": False})).rollouts
    assert rollout.num_llm_calls == 2
    assert rollout.sent_tokens == sum(len(request["token_ids"]) for request in server.requests)
    (failure,) = (await run(through_a_copy, server, attempts=1, problem={"fails": True})).failures
    assert "127.0.0.1:9" in failure.detail
