"""Asks the judges of the configuration (`judges`): a language model for an opinion, or a reward model for a number.

A judge is a server of the run or any URL with OpenAI's API. Verdicts are cached, and equal questions under way share
one. A judge that is unreachable, late, or answers without a verdict raises ``VerifierError``, never a reward.
"""

import asyncio
import functools
import hashlib
import math
import os
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from omegaconf import DictConfig, OmegaConf

from pipelinerl.async_llm import may_succeed
from pipelinerl.config.environment import JUDGE_KEY_VARIABLE, SECRET_VARIABLE
from pipelinerl.config.load import parse_container
from pipelinerl.config.names import with_one_name
from pipelinerl.config.sections import JudgeSection
from pipelinerl.config.servers import side_models
from pipelinerl.domains.columns import Messages
from pipelinerl.domains.judge_prompt import (
    FIRST_WINS,
    MAX_REASON_CHARS,
    Opinion,
    as_text,
    judge_messages,
    opinion_schema,
    read_opinion,
    without_control_tokens,
)
from pipelinerl.domains.verifier_client import take_address
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.records.check import LARGEST_NUMBER
from pipelinerl.records.verdicts import Verdict

T = TypeVar("T")
CHAT_PATH = "/v1/chat/completions"
SERVED_NAME = "reference"
"""Model name at the run's own servers, except the policy's."""
MISCONFIGURED = (401, 403, 404)
"""Statuses for a wrong address, model or key: a repetition cannot help."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
"""Delays double from the first to the longest, after which a server that is back is found."""
DEFAULT_PATIENCE_S = 30.0
"""Used where the configuration has no `launcher.startup_timeout_s`, as in a test of a domain."""
MAX_KEPT = 100_000
"""Newest verdicts that a client keeps: some 100 MB, since a detail has at most `MAX_REASON_CHARS`."""
TRIES = 2
"""Requests for one vote. A model that missed the format once may follow it the second time."""


class _JudgeMessage(msgspec.Struct):
    content: str | None = None


class _JudgeChoice(msgspec.Struct):
    message: _JudgeMessage
    finish_reason: str | None = None


class _JudgeAnswer(msgspec.Struct):
    choices: list[_JudgeChoice]


class _Class(msgspec.Struct):
    probs: list[float]


class _Classes(msgspec.Struct):
    data: list[_Class]


_chat_answer, _classes = msgspec.json.Decoder(_JudgeAnswer), msgspec.json.Decoder(_Classes)


@dataclass(eq=False)
class _UnderWay:
    """A request for a verdict, under way."""

    task: asyncio.Task[Verdict]
    waiting: int = 0
    """Number of callers that wait for it."""


class JudgeClient:
    """A client of one judge. ``judge_of`` makes one per process.

    Args:
        judge: its entry in the configuration.
        urls: base URLs of its servers.
        key: bearer token of requests. Empty: none.
        patience_s: how long a failing request is repeated, in seconds. A server of the run may still be starting.
        run_secret: key of the marks around answers. None: a random one for this process.

    Example:
        >>> # verdict = await judge_of(cfg, "helpful").check(session, "Why is the sky blue?", answer)
    """

    def __init__(
        self,
        judge: JudgeSection,
        urls: Sequence[str],
        *,
        key: str = "",
        patience_s: float = DEFAULT_PATIENCE_S,
        run_secret: bytes | None = None,
    ):
        self.kind = judge.kind
        self._judge, self._patience_s = judge, patience_s
        self._secret = run_secret or secrets.token_bytes(32)
        self._load = dict.fromkeys((address_of(judge.kind, url) for url in urls), 0)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._slots = asyncio.Semaphore(judge.concurrency)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._under_way: dict[bytes, _UnderWay] = {}
        self._takes_schema = True
        self.num_calls = 0
        """Requests sent so far, repetitions included."""

    async def check(
        self, session: aiohttp.ClientSession, question: str | Messages, answer: str, reference: str = ""
    ) -> Verdict:
        """Asks for the verdict on one answer.

        Args:
            session: HTTP session of the rollout.
            question: a text or messages. It is trusted: put the policy's earlier turns into ``answer``.
            answer: the model's output.
            reference: a right answer or criteria, if the problem has them.
        Returns:
            A verdict with ``score``, the judge's score divided by its best one, or the reward model's number. The
            status is ``correct`` for the best score, else ``wrong``.
        Raises:
            VerifierError: the judge gave no verdict.
            DomainError: ``max_calls`` is used up, or the address, the model or the key is wrong.
        """
        return await self._shared(session, question, encodable(answer), reference)

    async def compare(
        self,
        session: aiohttp.ClientSession,
        question: str | Messages,
        answers: Sequence[str],
        reference: str = "",
    ) -> list[float]:
        """Compares answers to one question pair by pair, each pair in both orders, and each with `votes` opinions.

        A reward model gives each a number, and the higher number wins. Equal answers tie without a request.

        Args:
            session, question, reference: as for ``check``.
            answers: the model's outputs.
        Returns:
            Of every answer, the share of the others that it beats, 0 to 1. A tie is half a win, and so are opposite
            opinions in the two orders. An answer alone has 0.5.
        Raises:
            As ``check``. Verdicts that came before an error are kept, so that a repetition asks for the others alone.
        """
        answers = [encodable(answer) for answer in answers]
        distinct = list(dict.fromkeys(answers))
        pairs = [(first, second) for first in distinct for second in distinct if first != second]
        if self.kind == "reward":
            verdicts = await all_of(self.check(session, question, answer, reference) for answer in distinct)
            numbers = dict(zip(distinct, (verdict.score for verdict in verdicts), strict=True))
            first_wins = {(a, b): ((numbers[a] > numbers[b]) - (numbers[a] < numbers[b]) + 1) / 2 for a, b in pairs}
        else:
            verdicts = await all_of(self._shared(session, question, pair, reference) for pair in pairs)
            first_wins = dict(zip(pairs, (verdict.score for verdict in verdicts), strict=True))
        return win_rates(answers, first_wins)

    async def _shared(
        self,
        session: aiohttp.ClientSession,
        question: str | Messages,
        answer: str | tuple[str, str],
        reference: str,
    ) -> Verdict:
        """Returns the verdict on an answer, or on whether the first of two wins, which equal questions share."""
        name = hashlib.sha256(msgspec.msgpack.encode((question, answer, reference))).digest()
        if name in self._verdicts:
            self._verdicts.move_to_end(name)
            return self._verdicts[name]
        if name not in self._under_way:
            task = asyncio.ensure_future(self._verdict(session, question, answer, reference))
            self._under_way[name] = _UnderWay(task)
            task.add_done_callback(functools.partial(self._keep, name))
        return await self._wait(name)

    async def _wait(self, name: bytes) -> Verdict:
        """Waits for a verdict under way, and cancels it when its last waiting caller is cancelled."""
        verdict = self._under_way[name]
        verdict.waiting += 1
        try:
            return await asyncio.shield(verdict.task)
        finally:
            verdict.waiting -= 1
            if not verdict.waiting and not verdict.task.done():
                del self._under_way[name]  # at once, so that the next caller starts a new request
                verdict.task.cancel()

    def _keep(self, name: bytes, task: asyncio.Task[Verdict]) -> None:
        if name in self._under_way and self._under_way[name].task is task:
            del self._under_way[name]
        if not task.cancelled() and task.exception() is None:
            self._verdicts[name] = task.result()
            if len(self._verdicts) > MAX_KEPT:
                self._verdicts.popitem(last=False)

    async def _verdict(
        self,
        session: aiohttp.ClientSession,
        question: str | Messages,
        answer: str | tuple[str, str],
        reference: str,
    ) -> Verdict:
        if self._judge.kind == "reward":
            assert isinstance(answer, str), "it compares numbers"
            return _verdict(await self._number(session, question, answer), best=math.inf)
        messages = judge_messages(
            as_text(question),
            answer,
            reference,
            rubric=self._judge.rubric,
            template=self._judge.template,
            levels=self._judge.levels,
            max_chars=self._judge.max_answer_chars,
            secret=self._secret,
        )
        levels = self._judge.levels if isinstance(answer, str) else FIRST_WINS
        opinions = await all_of(self._vote(session, messages, levels) for _ in range(self._judge.votes))
        score = agreed([opinion.score for opinion in opinions], by_majority=self._judge.vote == "majority")
        return _verdict(score / levels, best=1.0, detail=opinions[0].reason[:MAX_REASON_CHARS])

    async def _vote(self, session: aiohttp.ClientSession, messages: Messages, levels: int) -> Opinion:
        judge = self._judge
        request: dict[str, Any] = {
            "model": judge.model_path if judge.url else SERVED_NAME,
            "messages": messages,
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
        }
        said = ""
        for _ in range(TRIES):
            answer = await self._ask(session, request, opinion_schema(levels))
            try:
                (choice,) = _chat_answer.decode(answer).choices
                said = f"{choice.message.content} (finish_reason {choice.finish_reason})"
                if choice.finish_reason == "stop":
                    return read_opinion(choice.message.content or "", levels)
            except (ValueError, RecursionError) as error:
                said = f"{said or answer[:300].decode(errors='replace')}: {error}"
        raise VerifierError(f"judge {judge.name} gave no verdict in {TRIES} tries. Its last answer: {said[:500]}")

    async def _number(self, session: aiohttp.ClientSession, question: str | Messages, answer: str) -> float:
        """Returns the logit of a reward model, without its activation."""
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
        text = without_control_tokens(answer[: self._judge.max_answer_chars])
        request = {
            "model": self._judge.model_path if self._judge.url else SERVED_NAME,
            "messages": [*asked, {"role": "assistant", "content": text}],
            "use_activation": False,
        }
        found = await self._ask(session, request)
        try:
            ((number,),) = [one.probs for one in _classes.decode(found).data]
        except (ValueError, RecursionError) as error:
            said = found[:300].decode(errors="replace")
            raise VerifierError(f"judge {self._judge.name} did not return one number: {said}: {error}") from error
        if not abs(number) <= LARGEST_NUMBER:
            raise VerifierError(
                f"judge {self._judge.name} returned {number}, which is not a number within ±{LARGEST_NUMBER:g}"
            )
        return number

    async def _ask(
        self, session: aiohttp.ClientSession, request: dict[str, Any], schema: dict[str, Any] | None = None
    ) -> bytes:
        """Sends one request. If the server refuses the schema, this and all later requests go without it."""
        async with self._slots:
            if schema is not None and self._takes_schema:
                try:
                    return await self._send(session, request | {"response_format": schema})
                except _RefusedError:
                    answer = await self._send(session, request)
                    self._takes_schema = False
                    return answer
            return await self._send(session, request)

    async def _send(self, session: aiohttp.ClientSession, request: dict[str, Any]) -> bytes:
        """Asks the least loaded server, and after a failure another one, until the patience has passed.

        Raises:
            VerifierError: no answer in time. A request that times out is not repeated.
            DomainError: the address, the model or the key is wrong.
        """
        body, failed = msgspec.json.encode(request), set[str]()
        deadline, delay = time.monotonic() + self._patience_s, FIRST_DELAY_S
        timeout = aiohttp.ClientTimeout(total=self._judge.timeout_s)
        while True:
            self._count_call()
            url = take_address(self._load, failed)
            failure: Exception
            try:
                async with session.post(url, data=body, headers=self._headers, timeout=timeout) as answer:
                    content = await answer.read()
                if answer.status == 200:
                    return content
                said = f"{url} answered {answer.status}: {content[:300].decode(errors='replace')}"
                failure = VerifierError(said)
                if answer.status in MISCONFIGURED:
                    where = f"`judges.url`, `judges.model_path`, {JUDGE_KEY_VARIABLE}"
                    raise DomainError(f"judge {self._judge.name}: {said}: look at {where}")
                if not may_succeed(answer.status):
                    raise _RefusedError(f"judge {self._judge.name}: {said}")
            except TimeoutError as error:
                raise VerifierError(
                    f"judge {self._judge.name}: {url} took longer than `judges.timeout_s` = {self._judge.timeout_s:g} s"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                failure = error
            finally:
                self._load[url] -= 1
            failed.add(url)
            if failed < self._load.keys():
                continue
            failed.clear()
            if time.monotonic() + delay > deadline:
                raise VerifierError(
                    f"judge {self._judge.name} did not answer within {self._patience_s:.0f} s: "
                    f"{type(failure).__name__}: {failure}"
                ) from failure
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)

    def _count_call(self) -> None:
        """Counts a request before it is sent, repetitions included. Raises ``DomainError`` after `judges.max_calls`."""
        if self._judge.max_calls is not None and self.num_calls >= self._judge.max_calls:
            raise DomainError(
                f"judge {self._judge.name}: this worker has asked {self.num_calls} times, the limit of "
                "`judges.max_calls`"
            )
        self.num_calls += 1


async def all_of(awaited: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results in order. Raises the first error, and cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class _RefusedError(VerifierError):
    """The server refuses this request."""


def address_of(kind: str, url: str) -> str:
    """Returns the URL of requests. ``url`` is written as for OpenAI's clients: https://api.openai.com/v1."""
    base = url.rstrip("/")
    if kind == "reward":
        return base.removesuffix("/v1") + "/classify"
    return base + (CHAT_PATH if not urlsplit(base).path else CHAT_PATH.removeprefix("/v1"))


def agreed(scores: Sequence[int], *, by_majority: bool) -> float:
    """Returns the mean of the votes, or the most frequent one. A tie goes to the lowest."""
    if not by_majority:
        return sum(scores) / len(scores)
    counts = Counter(scores)
    return min(counts, key=lambda score: (-counts[score], score))


def encodable(text: str) -> str:
    """Returns the text with escapes in the place of half surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()


def win_rates(answers: Sequence[str], first_wins: Mapping[tuple[str, str], float]) -> list[float]:
    """Returns the share of the others that each answer beats.

    Args:
        answers: may be equal to each other. Those tie.
        first_wins: how far the first of a pair wins, 0 to 1, of every pair of different answers in both orders.

    >>> win_rates(["a", "b", "b"], {("a", "b"): 1.0, ("b", "a"): 0.5})
    [0.75, 0.375, 0.375]
    """
    if len(answers) == 1:
        return [0.5]

    def wins(one: str, other: str) -> float:
        return 0.5 if one == other else (first_wins[one, other] + 1 - first_wins[other, one]) / 2

    return [(sum(wins(one, other) for other in answers) - 0.5) / (len(answers) - 1) for one in answers]


def _verdict(score: float, *, best: float, detail: str = "") -> Verdict:
    return Verdict(status="correct" if score >= best else "wrong", score=score, detail=detail)


_clients: dict[tuple[str, ...], JudgeClient] = {}
_resolved: tuple[DictConfig | None, dict[str, JudgeClient]] = None, {}
"""The newest configuration and its judges. A worker passes the same configuration to every rollout."""


def judge_of(cfg: DictConfig, name: str) -> JudgeClient:
    """Returns the client of a judge of the configuration. There is one per process.

    Raises:
        DomainError: `judges` has no judge of this name, or it has no server.
    """
    global _resolved
    if _resolved[0] is not cfg:
        _resolved = cfg, {}
    known = _resolved[1]
    if name not in known:
        known[name] = _client_of(cfg, name)
    return known[name]


def _client_of(cfg: DictConfig, name: str) -> JudgeClient:
    found = [judge for judge in cfg.get("judges") or () if judge["name"] == name]
    if not found:
        names = [str(judge["name"]) for judge in cfg.get("judges") or ()]
        raise DomainError(f"`judges` has no judge {name!r}: it has {names}")
    judge = JudgeSection.model_validate(OmegaConf.to_container(found[0], resolve=True))
    urls = (judge.url,) if judge.url else _servers_of(cfg, judge)
    if (name, *urls) not in _clients:
        patience_s = OmegaConf.select(cfg, "launcher.startup_timeout_s") or DEFAULT_PATIENCE_S
        secret = os.environ.get(SECRET_VARIABLE, "")
        key = os.environ.get(JUDGE_KEY_VARIABLE, "") if judge.url else secret
        _clients[name, *urls] = JudgeClient(
            judge, urls, key=key, patience_s=float(patience_s), run_secret=secret.encode() or None
        )
    return _clients[name, *urls]


def _servers_of(cfg: DictConfig, judge: JudgeSection) -> tuple[str, ...]:
    container = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(container, dict)
    plain = with_one_name({str(name): value for name, value in container.items() if name != "jobs"})
    models = side_models(parse_container(plain))
    urls = tuple(
        str(job["url"])
        for job in cfg.get("jobs") or ()
        if job["kind"] == "preprocessor_llm" and models[job["replica_idx"] % len(models)] == judge
    )
    if not urls:
        raise DomainError(f"judge {judge.name} has no server in this run: raise world.preprocessor_fraction")
    return urls
