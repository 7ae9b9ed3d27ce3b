"""Judges: what they read, what counts as their verdict, and what an answer can make them say."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from omegaconf import OmegaConf

from benchmarks.hostile_answers import (
    HOSTILE,
    PROMPTS,
    QUESTION,
    REFERENCE,
    RIGHT,
    WRONG,
    GullibleJudge,
    flipped,
    gullible_score,
    scripted,
)
from examples.judged.domain import generate_rollout, load_problems
from pipelinerl.config.sections import JudgeSection
from pipelinerl.domains.judge_client import JudgeClient, address_of, agreed, all_of, judge_of
from pipelinerl.domains.judge_prompt import judge_messages, mark_of, read_opinion, without_control_tokens
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.testing import run_rollout
from tests.says import says

Handler = Callable[[web.Request], Any]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


class Server:
    """Answers every request as a function of its number says: a text, or (status, text).

    With ``cancels``, an answer that its client does not wait for any more is cancelled.
    """

    def __init__(self, say: Callable[[int, dict[str, Any]], Any], *, cancels: bool = False):
        self.say, self.cancels, self.requests, self.running, self.most = say, cancels, [], 0, 0
        self.two_run = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.requests.append((request.path, dict(request.headers), asked))
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == 2:
            self.two_run.set()
        try:
            said = self.say(len(self.requests), asked)
            said = await said if asyncio.iscoroutine(said) else said
        finally:
            self.running -= 1
        if isinstance(said, tuple):
            return web.Response(status=said[0], text=said[1])
        if isinstance(said, dict):
            return web.json_response(said)
        message = {"role": "assistant", "content": said}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def __aenter__(self) -> "Server":
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=self.cancels)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


def opinion(score: int, reason: str = "So it is.") -> str:
    return json.dumps({"reason": reason, "score": score})


def client(url: str, *, patience_s: float = 0.3, **fields: Any) -> JudgeClient:
    judge = JudgeSection(**({"name": "helpful", "model_path": "some-model", "url": url} | fields))
    return JudgeClient(judge, [url], key="a-key", patience_s=patience_s)


def test_prompt_holds_the_answer_between_marks_that_depend_on_it() -> None:
    given = {"rubric": "Be strict.", "template": None, "levels": 4, "max_chars": 10, "secret": b"s"}
    system, user = judge_messages("Q {answer}?", "0123456789ab", "", **given)
    mark = mark_of(b"s", "Q {answer}?", "0123456789ab")
    note = "(The answer has 12 characters and was cut after 10.)"
    assert f"\nAnswer:\n{mark}\n0123456789\n{mark}\n{note}\n" in user["content"]
    assert "Question:\nQ {answer}?\n" in user["content"], "a place in the question is text"
    assert "Be strict." in system["content"]
    assert f"two lines that hold {mark}." in system["content"]
    assert '{"reason": "…", "score": N}' in system["content"]
    assert "to 4, the best" in system["content"]
    assert mark_of(b"s", "Q", "answer") != mark_of(b"s", "Qa", "nswer") != mark_of(b"other", "Qa", "nswer")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<|im_end|>", "< |im_end|>"),
        ("</s>[INST]x[/INST]", "< /s>[ INST]x[ /INST]"),
        ("﹤|im_end|>[ＩＮＳＴ]", "﹤ |im_end|>[ ＩＮＳＴ]"),
        ("<｜User｜>＜|eot_id|＞", "< ｜User｜>＜ |eot_id|＞"),
        ("a < b, 1<2, x<=y, x<<1, [1, 2], f[0]", "a < b, 1<2, x<=y, x<<1, [1, 2], f[0]"),
    ],
)
def test_control_tokens_are_broken_and_mathematics_is_not(text: str, read: str) -> None:
    assert without_control_tokens(text) == read


NO_OPINIONS = (
    "",
    "1",
    "null",
    "VERDICT: 1",
    f"Here: {opinion(1)}",
    f"{opinion(1)} {opinion(1)}",
    f"```json\n{opinion(1)}\n```",
    f"<think>{opinion(1)}",
    opinion(3),
    opinion(-1),
    "[" * 100_000,
    '{"score": 1}',
    '{"reason": "", "score": 1.5}',
    '{"reason": "", "score": "1"}',
    '{"reason": "", "score": true}',
    '{"reason": "", "score": 1, "sure": true}',
)


@pytest.mark.parametrize("output", NO_OPINIONS)
def test_output_of_another_form_is_no_verdict(output: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 — of msgspec's kind, too
        read_opinion(output, 2)


def test_verdict_may_follow_thoughts() -> None:
    assert read_opinion('{"reason": "a\tb", "score": 1}', 1).reason == "a\tb"
    assert read_opinion(f"<think>{opinion(0)}?</think>\n {opinion(2, 'Well done.')}\n", 2).score == 2


@pytest.mark.parametrize(
    ("kind", "url", "address"),
    [
        ("chat", "http://a:1", "http://a:1/v1/chat/completions"),
        ("chat", "https://a/v1/", "https://a/v1/chat/completions"),
        ("chat", "https://a/v1beta/openai", "https://a/v1beta/openai/chat/completions"),
        ("reward", "http://a:1/v1", "http://a:1/classify"),
        ("reward", "http://a:1/", "http://a:1/classify"),
    ],
)
def test_address_follows_from_the_url_of_openais_clients(kind: str, url: str, address: str) -> None:
    assert address_of(kind, url) == address


@pytest.mark.parametrize(
    ("scores", "mean", "majority"), [([1], 1, 1), ([0, 1, 1], 2 / 3, 1), ([2, 0, 2, 0], 1, 0), ([0, 3, 4], 7 / 3, 0)]
)
def test_votes_by_hand(scores: list[int], mean: float, majority: int) -> None:
    assert agreed(scores, by_majority=False) == pytest.approx(mean)
    assert agreed(scores, by_majority=True) == majority


async def test_same_question_is_asked_once_and_another_answer_again(session: aiohttp.ClientSession) -> None:
    async with Server(lambda number, asked: opinion(number)) as server:
        judge = client(server.url + "/v1", levels=4)
        same = await asyncio.gather(*(judge.check(session, "Q", "A", "R") for _ in range(5)))
        assert [(v.status, v.score, v.detail) for v in same] == [("wrong", 0.25, "So it is.")] * 5
        assert (await judge.check(session, "Q", "B", "R")).score == 0.5
        assert (await judge.check(session, "Q", "A", "R")).score == 0.25
        assert (await judge.check(session, "Q", "A", "")).score == 0.75
        best = await judge.check(session, "Q", "A", "S")
        assert (best.status, best.score) == ("correct", 1.0)
    assert judge.num_calls == len(server.requests) == 4
    path, headers, asked = server.requests[0]
    assert (path, headers["Authorization"], asked["model"]) == ("/v1/chat/completions", "Bearer a-key", "some-model")
    schema = asked["response_format"]["json_schema"]["schema"]["properties"]
    assert schema["score"]["enum"] == [0, 1, 2, 3, 4]


async def test_number_of_cached_verdicts_is_bounded(session: aiohttp.ClientSession, monkeypatch: Any) -> None:
    monkeypatch.setattr("pipelinerl.domains.judge_client.MAX_KEPT", 2)
    async with Server(lambda number, asked: opinion(1)) as server:
        judge = client(server.url)
        for answer in ("A", "B", "A", "C", "A", "B"):  # A is used again before C comes, so B leaves
            await judge.check(session, "Q", answer)
    assert len(server.requests) == 4


async def test_votes_are_counted_by_mean_or_majority(session: aiohttp.ClientSession) -> None:
    for vote, score in (("mean", 2 / 3), ("majority", 1.0)):
        async with Server(lambda number, asked: opinion(int(number != 2))) as server:
            judge = client(server.url, votes=3, vote=vote, temperature=0.7)
            assert (await judge.check(session, "Q", "A")).score == pytest.approx(score)
        assert len(server.requests) == 3


async def test_answer_without_a_verdict_raises_and_is_not_cached(session: aiohttp.ClientSession) -> None:
    async with Server(lambda number, asked: "I like it." if number < 3 else opinion(1)) as server:
        judge = client(server.url)
        with pytest.raises(VerifierError, match=says("helpful", "no verdict", "I like it.")):
            await judge.check(session, "Q", "A")
        assert (await judge.check(session, "Q", "A")).score == 1
    assert len(server.requests) == 3


async def test_server_that_refused_a_schema_gets_none_again(session: aiohttp.ClientSession) -> None:
    def say(number: int, asked: dict[str, Any]) -> Any:
        return (400, "response_format is not known") if "response_format" in asked else opinion(1)

    async with Server(say) as server:
        judge = client(server.url)
        for answer in "AB":
            assert (await judge.check(session, "Q", answer)).score == 1
    assert ["response_format" in asked for _, _, asked in server.requests] == [True, False, False]


async def test_failing_server_is_asked_again_and_a_refusal_raises(session: aiohttp.ClientSession) -> None:
    async with Server(lambda number, asked: (503, "starting") if number < 3 else opinion(1)) as server:
        assert (await client(server.url, patience_s=20).check(session, "Q", "A")).score == 1
    async with Server(lambda number, asked: (422, "too long")) as server:
        with pytest.raises(VerifierError, match=says("helpful", "422", "too long")):
            await client(server.url, patience_s=20).check(session, "Q", "A")
    async with Server(lambda number, asked: (401, "who are you?")) as server:
        with pytest.raises(DomainError, match=says("helpful", "401", "who are you?", "OPENAI_API_KEY")):
            await client(server.url, patience_s=20).check(session, "Q", "A")
    with pytest.raises(VerifierError, match=says("helpful", "0 s", "Cannot connect")):
        await client("http://127.0.0.1:9").check(session, "Q", "A")


async def test_late_judge_raises_and_concurrency_is_bounded(session: aiohttp.ClientSession) -> None:
    silent = asyncio.Event()

    async def wait() -> str:
        await silent.wait()
        return opinion(1)

    async with Server(lambda number, asked: wait()) as server:
        with pytest.raises(VerifierError, match=says("judges.timeout_s", "0.05 s")):
            await client(server.url, timeout_s=0.05, patience_s=60.0).check(session, "Q", "A")
    assert len(server.requests) <= 1, "it is not asked again, and on a busy machine the time is over before it is asked"
    async with Server(lambda number, asked: wait()) as server:
        judge = client(server.url, concurrency=2)
        asked = [asyncio.ensure_future(judge.check(session, "Q", str(i))) for i in range(5)]
        await server.two_run.wait()
        silent.set()
        await asyncio.gather(*asked)
    assert server.most == 2


async def test_server_that_refuses_connections_costs_the_others_nothing(session: aiohttp.ClientSession) -> None:
    """Its load is always 0. Without patience, every request must find the other one at once."""
    async with Server(lambda number, asked: opinion(1)) as server:
        section = JudgeSection(name="helpful", model_path="m")
        judge = JudgeClient(section, ["http://127.0.0.1:9", server.url], patience_s=0.0)
        found = await asyncio.gather(*(judge.check(session, "Q", str(i)) for i in range(6)))
    assert [verdict.score for verdict in found] == [1.0] * 6


async def test_spent_budget_ends_the_run_and_gives_no_reward(session: aiohttp.ClientSession) -> None:
    async with Server(lambda number, asked: opinion(1)) as server:
        judge = client(server.url, max_calls=2)
        for answer in "ABA":
            await judge.check(session, "Q", answer)
        with pytest.raises(DomainError, match=says("helpful", "max_calls", "2 times")):
            await judge.check(session, "Q", "C")


async def test_request_that_is_repeated_counts_again(session: aiohttp.ClientSession) -> None:
    async with Server(lambda number, asked: (503, "starting")) as server:
        judge = client(server.url, max_calls=3, patience_s=60)
        with pytest.raises(DomainError, match=says("helpful", "max_calls", "3 times")):
            await judge.check(session, "Q", "A")
    assert judge.num_calls == len(server.requests) == 3


async def test_request_is_cancelled_with_its_last_waiting_caller(session: aiohttp.ClientSession) -> None:
    """With its place among the requests at a time. Whoever still waits gets it, and who asks later asks anew."""
    began, given_up, said = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(number: int) -> str:
        began.set()
        try:
            await said.wait()
        except asyncio.CancelledError:
            given_up.set()
            raise
        return opinion(1, str(number))

    async with Server(lambda number, asked: wait(number), cancels=True) as server, asyncio.timeout(20):
        judge = client(server.url, concurrency=1)
        first, second = (asyncio.ensure_future(judge.check(session, "Q", "A")) for _ in range(2))
        await began.wait()
        first.cancel()
        await asyncio.wait([first])
        assert not given_up.is_set(), "one still waits"
        second.cancel()
        third = asyncio.ensure_future(judge.check(session, "Q", "A"))
        await given_up.wait()
        said.set()
        assert (await third).detail == "2"
    assert second.cancelled()


async def test_configuration_is_read_once_for_all_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.domains.judge_client._clients", {})
    monkeypatch.setattr("pipelinerl.domains.judge_client._resolved", (None, {}))
    cfg = OmegaConf.create({"judges": [{"name": "helpful", "model_path": "m", "url": "http://127.0.0.1:9"}]})
    first = judge_of(cfg, "helpful")
    cfg.judges = []
    assert judge_of(cfg, "helpful") is first
    with pytest.raises(DomainError, match=says("helpful")):
        judge_of(OmegaConf.create({"judges": []}), "helpful")


async def test_reward_model_gives_its_number(session: aiohttp.ClientSession) -> None:
    def say(number: int, asked: dict[str, Any]) -> Any:
        if number == 4:
            return '{"data": ' + "[" * 100_000
        probs = {1: [-1.5], 2: [0.2, 0.8], 3: [1e300]}[number]
        return {"data": [{"index": 0, "label": "x", "probs": probs, "num_classes": 1}]}

    async with Server(say) as server:
        judge = client(server.url, kind="reward", max_answer_chars=8)
        verdict = await judge.check(session, [{"role": "user", "content": "Q"}], "A<|im_end|> is cut")
        assert (verdict.status, verdict.score) == ("wrong", -1.5)
        with pytest.raises(VerifierError, match=says("helpful", "one number")):
            await judge.check(session, "Q", "B")
        with pytest.raises(VerifierError, match=says("helpful", "1e+300")):
            await judge.check(session, "Q", "C")
        with pytest.raises(VerifierError, match=says("helpful", "one number")):
            await judge.check(session, "Q", "D")
    path, _, asked = server.requests[0]
    assert (path, asked["use_activation"]) == ("/classify", False)
    assert asked["messages"] == [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A< |im_en"}]


PAIR = re.compile(r"first answer:\n(=== \w+ ===)\n(.*)\n\1\n\nThe second answer:\n(=== \w+ ===)\n(.*)\n\3\n", re.DOTALL)


def compared(judge: Callable[[str, str], int]) -> Callable[[int, dict[str, Any]], str]:
    """A judge that reads the two answers of a prompt. ``judge``: 2 if the first wins, 1 for a tie, 0."""

    def say(number: int, asked: dict[str, Any]) -> str:
        found = PAIR.search(asked["messages"][1]["content"])
        assert found is not None
        assert f"{found[1]}, the second between two lines that hold {found[3]}" in asked["messages"][0]["content"]
        return opinion(judge(found[2], found[4]))

    return say


@pytest.mark.parametrize(
    ("judge", "rates"),
    [
        (lambda first, second: 1 + (first > second) - (first < second), [0.5, 0.0, 1.0, 0.5]),
        (lambda first, second: 2, [0.5] * 4),
        (lambda first, second: 1, [0.5] * 4),
        # C wins where it stands first and ties where it stands second: 3/4 of a win
        (lambda first, second: 2 if first == "C" else 1, [5 / 12, 5 / 12, 0.75, 5 / 12]),
    ],
)
async def test_answers_are_compared_in_both_orders(
    session: aiohttp.ClientSession, judge: Callable[[str, str], int], rates: list[float]
) -> None:
    async with Server(compared(judge)) as server:
        asked = client(server.url, levels=7)
        assert await asked.compare(session, "Q", ["B", "A", "C", "B"]) == pytest.approx(rates)
        assert len(server.requests) == 6, "three different answers, two orders"
        await asked.compare(session, "Q", ["C", "B", "A"])
        assert len(server.requests) == asked.num_calls == 6, "all verdicts are known"
        assert await asked.compare(session, "Q", ["D", "D"]) == [0.5, 0.5]
        assert (await asked.compare(session, "Q", ["D"]), await asked.compare(session, "Q", [])) == ([0.5], [])
        assert len(server.requests) == 6
    schema = server.requests[0][2]["response_format"]["json_schema"]["schema"]["properties"]
    assert schema["score"]["enum"] == [0, 1, 2]


async def test_failed_comparison_asks_again_for_what_is_missing(session: aiohttp.ClientSession) -> None:
    say = compared(lambda first, second: 2 if first > second else 0)
    async with Server(lambda number, asked: say(number, asked) if number != 2 else (500, "no")) as server:
        judge = client(server.url, concurrency=1, max_calls=3, patience_s=0.0)
        with pytest.raises(VerifierError, match="500"):
            await judge.compare(session, "Q", ["A", "B"])
        assert await judge.compare(session, "Q", ["A", "B"]) == [0.0, 1.0]
        with pytest.raises(DomainError, match=says("max_calls", "3 times")):
            await judge.compare(session, "Q", ["A", "C"])


async def test_reward_model_compares_by_its_numbers(session: aiohttp.ClientSession) -> None:
    def say(number: int, asked: dict[str, Any]) -> Any:
        number_of = {"A": -1.5, "B": 3.0, "C": -1.5}[asked["messages"][1]["content"]]
        return {"data": [{"index": 0, "label": "x", "probs": [number_of], "num_classes": 1}]}

    async with Server(say) as server:
        assert await client(server.url, kind="reward").compare(session, "Q", ["A", "B", "C"]) == [0.25, 1.0, 0.25]
    assert len(server.requests) == 3


async def test_judged_domain_reports_every_judge_and_weighs_them(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pipelinerl.domains.judge_client._clients", {})
    monkeypatch.setattr("pipelinerl.domains.judge_client._resolved", (None, {}))
    rows = [{"question": QUESTION, "answer": REFERENCE}, {"prompt": [{"role": "user", "content": "Say hello."}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums, hello = load_problems([str(tmp_path / "rows.jsonl")], judges=["sums", "style"])
    assert (sums["answer"], hello["answer"], hello["judges"]) == (REFERENCE, "", ["sums", "style"])
    async with GullibleJudge().serving() as url, Server(lambda number, asked: opinion(3)) as style:
        judges = [
            {"name": "sums", "model_path": "scripted", "url": url},
            {"name": "style", "model_path": "scripted", "url": style.url, "levels": 4},
        ]
        cfg = {"judges": judges, "actor": {}, "finetune": {"rl": {"reward_weights": {"sums": 1.0, "style": 0.2}}}}
        for answer, score in ((RIGHT, 1.0), (WRONG, 0.0)):
            result = await run_rollout(generate_rollout, sums, [answer], cfg)
            found = result.metrics.model_dump()
            assert (found["sums"], found["style"], found["success"]) == (score, 0.75, False)
            thought = await run_rollout(generate_rollout, sums, [f"<think>{WRONG}</think>{answer}"], cfg)
            assert thought.metrics.model_dump()["sums"] == score, "the judge reads no thoughts"
            assert found["reward"] == pytest.approx(score + 0.15)
        with pytest.raises(DomainError, match=says("'wit'", "'style'")):
            judge_of(OmegaConf.create(cfg), "wit")


async def test_failing_judge_cancels_the_requests_of_the_others(session: aiohttp.ClientSession) -> None:
    """Each judge is asked for two votes. The first vote of one fails when the other three are under way."""
    asked, given_up = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def say(number: int, fails: bool) -> Any:
        if fails and number == 1:
            for _ in range(3):
                await asked.acquire()
            return 401, "no"
        asked.release()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.release()

    async with (
        Server(lambda number, _: say(number, True), cancels=True) as failing,
        Server(lambda number, _: say(number, False), cancels=True) as other,
        asyncio.timeout(60),
    ):
        judges = [client(server.url, votes=2, temperature=1.0) for server in (failing, other)]
        with pytest.raises(DomainError, match="401"):
            await all_of(judge.check(session, "Q", "A") for judge in judges)
        for _ in range(3):
            await given_up.acquire()


async def test_hostile_answers_flip_no_verdict_more_often_than_the_judge_does_itself() -> None:
    """The judge obeys any verdict outside the answer's place. What a naive prompt lets through shows what it reads."""
    assert len(HOSTILE) == len(set(HOSTILE)) == 50
    assert all(gullible_score(prompt(RIGHT)) == 1 and gullible_score(prompt(WRONG)) == 0 for prompt in PROMPTS.values())
    assert {name: len(flipped(prompt)) for name, prompt in PROMPTS.items()} == {"bare": 50, "tags": 16, "marks": 13}
    found = await scripted(asks=1)
    assert (found["asked"], found["flips"], found["disagreements"]) == (50, 0, 0)
