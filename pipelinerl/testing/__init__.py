"""Test doubles for a domain's tests: a language model without a server, and a server without a language model.

``FakeLLM`` answers from a script, inside the process. ``FakeServer`` answers over HTTP exactly as inference servers do
(``records.answers``), with weight versions that a test can change.
"""

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from omegaconf import DictConfig, OmegaConf

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.errors import RecordError
from pipelinerl.llm import GenerateRequest, RolloutState, TrainableLLM
from pipelinerl.records.answers import (
    ANSWER_PATH,
    REQUEST_NAME,
    UNDER_WAY_PATH,
    Answer,
    AnswerRequest,
    Completion,
    RequestUnderWay,
    UnderWay,
)
from pipelinerl.rollouts import (
    MASKED_TOKEN_ID,
    CallTokens,
    RewardMode,
    RolloutResult,
    check_named_rewards,
    check_result,
)
from pipelinerl.streams.codec import Codec
from pipelinerl.world.proxies import open_session

CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\n<tool_call>\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{- '\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Any:
    """Makes a tokenizer with one token per byte, ChatML markers and tool calls. It takes milliseconds, and no files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    return fast


class FakeLLM(TrainableLLM):
    """A language model that returns scripted replies.

    Args (``FakeLLM.saying``):
        replies: texts in the order of the calls, or a function (sync or async) from the prompt's text to a text, which
            may raise the errors of a server. A reply ends after its first ``stop`` string, if any, and is cut at
            ``max_tokens``.
        tokenizer: None: ``byte_tokenizer()``.
        version: weight version of the tokens.
        logprob: log-probability of every token.
        finish_reason: finish reason of every reply that is not cut.

    Example:
        >>> llm = FakeLLM.saying(["<answer>512</answer>", "<answer>256</answer>"])
        >>> # result = await generate_guessing_rollout(cfg, llm, {"answer": 256}, session)
    """

    @classmethod
    def saying(
        cls,
        replies: Iterable[str] | Callable[[str], Any],
        *,
        tokenizer: Any = None,
        version: int = 0,
        logprob: float = -0.5,
        finish_reason: str = "stop",
        **fields: Any,
    ) -> "FakeLLM":
        """Makes a language model with these replies. For the arguments, see the class.

        ``fields`` are fields of ``TrainableLLM``.
        """
        defaults: dict[str, Any] = {"model_name": "fake", "collect_logprobs": True}
        llm = cls(tokenizer=byte_tokenizer() if tokenizer is None else tokenizer, **(defaults | fields))
        script = _Script(replies, version=version, logprob=logprob, finish_reason=finish_reason)
        llm.bind(RolloutState(script, turns=[], generate=llm_async_generate))
        return llm


class _Script:
    """A transport that answers from a script."""

    def __init__(
        self, replies: Iterable[str] | Callable[[str], Any], *, version: int, logprob: float, finish_reason: str
    ):
        self._say = replies if callable(replies) else None
        self._replies = iter(()) if callable(replies) else iter(replies)
        self._version, self._logprob, self._finish_reason = version, logprob, finish_reason

    async def generate(self, llm: TrainableLLM, request: GenerateRequest, session: aiohttp.ClientSession) -> CallTokens:
        backend = llm.tokenizer.backend_tokenizer
        text = await self._reply(backend.decode(request.token_ids.tolist(), skip_special_tokens=False))
        params = msgspec.json.decode(request.body_key)
        stop = params.get("stop") or []
        ends = [text.index(end) + len(end) for end in ([stop] if isinstance(stop, str) else stop) if end in text]
        token_ids = backend.encode(text[: min(ends, default=None)], add_special_tokens=False).ids
        eos = llm.tokenizer.eos_token_id
        if self._finish_reason == "stop" and not ends and eos is not None:
            token_ids.append(eos)
        limit = params.get("max_tokens") or len(token_ids)
        count = min(len(token_ids), limit)
        return CallTokens(
            prompt_ids=request.token_ids,
            completion_ids=np.array(token_ids[:count], dtype=np.int32),
            logprobs=np.full(count, self._logprob, dtype=np.float32),
            version_spans=np.array([(0, count, self._version)], dtype=np.int32).reshape(-1, 3),
            finish_reason="length" if count < len(token_ids) else self._finish_reason,
            images=request.images,
            image_spans=request.image_spans,
        )

    async def _reply(self, prompt: str) -> str:
        if self._say is not None:
            reply = self._say(prompt)
            return await reply if inspect.isawaitable(reply) else reply
        try:
            return next(self._replies)
        except StopIteration:
            raise AssertionError("the domain made more LLM calls than the FakeLLM has replies") from None


async def run_rollout(
    function: Callable[..., Any],
    problem: dict[str, Any],
    replies: Iterable[str] | Callable[[str], Any],
    cfg: DictConfig | dict | None = None,
    **fields: Any,
) -> RolloutResult:
    """Runs a domain's rollout function once with a ``FakeLLM`` and checks the result as the actor does.

    Args:
        function: the domain's rollout function.
        problem: the problem for the function.
        replies: see ``FakeLLM``.
        cfg: the configuration for the function. The check uses its `actor.rewards`, `finetune.seq_length` and
            `finetune.rl.reward_weights`.
        fields: passed to ``FakeLLM.saying``.
    Raises:
        DomainError, RecordError: the actor would refuse the result. The message names the field.
    """
    config = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(cfg or {})
    llm = FakeLLM.saying(replies, **fields)
    async with open_session() as session:
        result = await function(config, llm, problem, session)
    if llm.state.failure is not None:  # the function caught it, but no rollout goes on without the answer
        raise llm.state.failure
    mode: RewardMode = OmegaConf.select(config, "actor.rewards") or "rollout"
    rollout = to_rollout(
        check_result(result, mode),
        attempt=0,
        latency_s=0.0,
        num_llm_calls=llm.state.num_calls,
        fallback_version=0,
        seq_length=OmegaConf.select(config, "finetune.seq_length") or sys.maxsize,
        rewards=mode,
    )
    names = OmegaConf.select(config, "finetune.rl.reward_weights") or ()
    check_named_rewards(rollout.metrics, rollout.rewards, names)
    if not rollout.sequences:
        raise RecordError(f"no training text has a sampled token to train on: labels of {MASKED_TOKEN_ID} mask tokens")
    return result


Sampler = Callable[[list[int], dict[str, Any], int], list[int]]
"""(prompt ids, sampling parameters, index of the completion) → sampled ids."""

_request_codec: Codec[AnswerRequest] = Codec(AnswerRequest)
_answer_codec: Codec[Answer] = Codec(Answer)


class FakeServer:
    """An HTTP server that answers as inference servers do. The log-probability of every token is log ½.

    A test may change these attributes while the server runs:
        version: weight version of the tokens. "default" means weights from disk.
        status: HTTP status of every answer. With another than 200, all requests fail.
        delay_s: seconds before each answer.
        hold: an event. Answers wait until it is set.

    Example:
        >>> # async with FakeServer(lambda prompt_ids, params, i: [72, 105]) as server: ... server.url
    """

    def __init__(self, answer: Sampler, *, version: int | str = 0, delay_s: float = 0.0):
        self.answer = answer
        self.version = version
        self.status = 200
        self.delay_s = delay_s
        self.hold = asyncio.Event()
        self.hold.set()
        self.requests: list[dict[str, Any]] = []
        self.num_answering = 0
        """Requests being answered now."""
        self.num_sampled = 0
        """Tokens sampled so far that the server reports for each request."""
        self._names: set[str] = set()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "FakeServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens on ``port`` (0: any free port) and sets ``url``."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post(ANSWER_PATH, self._generate)
        app.router.add_get(UNDER_WAY_PATH, self._under_way)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Closes every connection, including those of unanswered requests."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _under_way(self, request: web.Request) -> web.Response:
        one = RequestUnderWay(tokens=(self.num_sampled,), waits=False)
        requests = dict.fromkeys(self._names, one)
        return web.Response(body=msgspec.json.encode(UnderWay(sampled=self.num_sampled, requests=requests)))

    async def _generate(self, request: web.Request) -> web.Response:
        name = request.headers.get(REQUEST_NAME, "")
        self.num_answering += 1
        self._names.add(name)
        try:
            return await self._answer(request)
        finally:
            self.num_answering -= 1
            self._names.discard(name)

    async def _answer(self, request: web.Request) -> web.Response:
        asked = _request_codec.decode(await request.read())
        token_ids = asked.token_ids.tolist()
        self.requests.append({"model": asked.model, "token_ids": token_ids, "sampling_params": asked.sampling})
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self.hold.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if asked.scores:
            scores = np.full(len(token_ids), math.log(0.5), dtype=np.float32)
            lengths = [len(token_ids)] if asked.prompt_lengths is None else asked.prompt_lengths
            scores[np.cumsum(lengths) - lengths] = 0.0
            return web.Response(body=_answer_codec.encode(Answer(prompt_scores=scores)))
        count = asked.sampling.get("n", 1)
        sampled = [self.answer(token_ids, asked.sampling, i) for i in range(count)]
        completions = tuple(completion(each, asked.sampling, self.version) for each in sampled)
        return web.Response(body=_answer_codec.encode(Answer(completions=completions)))


def completion(token_ids: Sequence[int], params: dict[str, Any], version: int | str) -> Completion:
    """Builds a completion as inference servers send it, cut at ``max_tokens``.

    Args:
        token_ids: the sampled tokens.
        params: sampling parameters of the request.
        version: weight version of the tokens. Text that is not a number makes a completion without versions.
    """
    limit = params.get("max_tokens", 16)
    count = min(len(token_ids), limit)
    spans = [(0, count, version)] if count else []
    return Completion(
        token_ids=np.array(token_ids[:count], dtype=np.int32),
        logprobs=np.full(count, math.log(0.5), dtype=np.float32) if "logprobs" in params else None,
        version_spans=np.array(spans, dtype=np.int32).reshape(-1, 3) if str(version).isdecimal() else None,
        finish_reason="length" if len(token_ids) > limit else "stop",
    )


def save_tokenizer(folder: Path, tokenizer: Any = None) -> Path:
    """Saves a tokenizer (None: ``byte_tokenizer()``) in a folder for ``model_path`` and returns the folder."""
    (tokenizer or byte_tokenizer()).save_pretrained(str(folder))
    return folder
