"""The lean answer route: takes ``AnswerRequest``, returns ``Answer``, and builds no object per token.

A request is cancelled in the engine when its client disconnects. Errors are JSON with vLLM's statuses: 400 can never be
answered, 404 another model, 422 not a request, 503 too many requests.
"""

import asyncio
import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.inference.images import ImagePrompts, image_spans_of
from pipelinerl.inference.scheduler import NAME, PINNED, STARTS, WHOLE
from pipelinerl.records.answers import (
    ANSWER_FORMAT,
    ANSWER_PATH,
    IMAGE_FORMAT,
    REQUEST_NAME,
    UNDER_WAY_PATH,
    Answer,
    AnswerRequest,
    Completion,
    RequestUnderWay,
    UnderWay,
)
from pipelinerl.streams.codec import Codec

SAMPLING_PARAMETERS = frozenset(SamplingParams.__struct_fields__)
MEDIA_TYPE = "application/msgpack"
MAX_NAME = 100
"""Characters of a request's name."""
LONG_TOKENS = 4000
"""Answers of at least this many tokens are encoded in a thread: they would block the event loop."""


def require_sampling_parameters(section: str, parameters: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if ``section.parameters`` holds what vLLM cannot sample with."""
    for name in sorted(parameters.keys() - SAMPLING_PARAMETERS):
        close = difflib.get_close_matches(name, SAMPLING_PARAMETERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"`{section}.parameters.{name}` is no sampling parameter of vLLM's{hint}")


class AnswerEngine(Protocol):
    """The part of vLLM's engine client that the routes use."""

    engine_core: Any

    def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str) -> Any: ...


class BadRequest(Exception):
    """An error with HTTP ``status`` and message for the client."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class Sampled:
    """Log-probabilities and weight versions of one completion, as the engine reported them."""

    logprobs: list[np.ndarray] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0


class PackedLogprobs(LogprobsProcessor):
    """Keeps the engine's log-probabilities as arrays, where vLLM would create an object per token."""

    @classmethod
    def from_new_request(cls, tokenizer: TokenizerLike | None, request: EngineCoreRequest) -> LogprobsProcessor:
        params = request.sampling_params
        if params is None or WHOLE not in (params.extra_args or {}):
            return LogprobsProcessor.from_new_request(tokenizer, request)
        return cls(
            tokenizer=None,
            logprobs=Sampled(),
            prompt_logprobs=[],
            cumulative_logprob=None,
            num_logprobs=params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
        )

    def update_from_output(self, output: EngineCoreOutput) -> None:
        sampled: Sampled = self.logprobs
        if output.new_logprobs is not None:
            sampled.logprobs.append(output.new_logprobs.logprobs[:, 0])
        if output.new_prompt_logprobs_tensors is not None:
            scored = output.new_prompt_logprobs_tensors
            self.prompt_logprobs.append((scored.logprob_token_ids.numpy(), scored.logprobs.numpy()))
        if output.kv_transfer_params:
            sampled.starts += [(version, start) for version, start in output.kv_transfer_params.get(STARTS, ())]
        if output.prefill_stats is not None:
            sampled.cached_tokens += output.prefill_stats.num_cached_tokens


class Answers:
    """Answers requests from one engine.

    Args:
        model: the name under which clients address it.
        max_model_len: longest prompt and completion together, in tokens.
        keeps_conversations: whether ``prefix_version`` is respected.
        images: puts images into prompts. None: there are none.
    """

    def __init__(
        self,
        engine: AnswerEngine,
        *,
        model: str,
        max_model_len: int,
        keeps_conversations: bool,
        images: ImagePrompts | None = None,
    ):
        output_processor.LogprobsProcessor = PackedLogprobs
        self._images = images
        self._engine, self._model, self._max_model_len = engine, model, max_model_len
        self._keeps = keeps_conversations
        self._request_codec: Codec[AnswerRequest] = Codec(AnswerRequest)
        self._answer_codec: Codec[Answer] = Codec(Answer)
        self._numbers = itertools.count()

    async def answer(self, body: bytes, name: str = "") -> bytes:
        """Returns the encoded answer. Raises ``BadRequest``. ``name``: the client's, for ``under_way``."""
        try:
            request = self._request_codec.decode(body)
        except StreamError as error:
            raise BadRequest(422, f"not an answer request: {error}") from error
        try:
            prompts = await self._engine_prompts(request)
            outputs = await self._sample(request, prompts, name)
        except GracefulHTTPError as error:
            raise BadRequest(503, str(error)) from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise BadRequest(400, str(error)) from error
        if sum(len(each.prompt_token_ids or ()) + _num_sampled(each) for each in outputs) < LONG_TOKENS:
            return self._encode(request, prompts, outputs)
        return await asyncio.to_thread(self._encode, request, prompts, outputs)

    async def _engine_prompts(self, request: AnswerRequest) -> list[Any]:
        """The engine's inputs, one per prompt."""
        prompts, salt = self._prompts(request), self._salt(request)
        if not request.images:
            return [tokens_input(token_ids.tolist(), cache_salt=salt) for token_ids in prompts]
        if self._images is None or len(prompts) > 1:
            raise BadRequest(400, "images go with one prompt, to a server whose model takes them")
        return [await self._images.prompt(prompts[0], request.image_spans, request.images, salt)]

    def _salt(self, request: AnswerRequest) -> str | None:
        return str(request.prefix_version) if self._keeps and request.prefix_version is not None else None

    async def _sample(self, request: AnswerRequest, prompts: Sequence[Any], name: str) -> list[RequestOutput]:
        tasks = [asyncio.create_task(self._generate(request, prompt, name)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _generate(self, request: AnswerRequest, prompt: Any, name: str) -> RequestOutput:
        length = len(prompt["prompt_token_ids"]) if request.images else len(request.token_ids)
        params = msgspec.convert(self._sampling(request, length), SamplingParams)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.extra_args = {WHOLE: not params.stop}  # stop strings are found by vLLM's front, token by token
        if prompt.get("cache_salt") is not None:
            params.extra_args[PINNED] = True
        if name:
            params.extra_args[NAME] = name
        outputs = self._engine.generate(prompt, params, f"answer-{next(self._numbers)}")
        return [output async for output in outputs][-1]

    async def under_way(self, prefix: str) -> UnderWay:
        """Returns how far the answers are to the requests whose names begin so."""
        sampled, completions = await self._engine.engine_core.call_utility_async("answers_under_way", prefix)
        requests: dict[str, RequestUnderWay] = {}
        for name, tokens, waits in completions:
            before = requests.get(name, RequestUnderWay(tokens=(), waits=False))
            requests[name] = RequestUnderWay(tokens=(*before.tokens, tokens), waits=before.waits or waits)
        return UnderWay(sampled=sampled, requests=requests)

    def _prompts(self, request: AnswerRequest) -> list[np.ndarray]:
        if request.format > ANSWER_FORMAT:
            raise BadRequest(400, f"format {request.format} is newer than this server's {ANSWER_FORMAT}: update it")
        if request.model not in ("", self._model):
            raise BadRequest(404, f"this server's model is {self._model!r}, not {request.model!r}")
        ids = request.token_ids
        if ids.ndim != 1 or ids.dtype != np.int32 or not len(ids) or ids.min() < 0:
            raise BadRequest(400, "token_ids must be a non-empty 1-D int32 array without negative values")
        lengths = request.prompt_lengths
        if lengths is None:
            return [ids]
        if not request.scores or lengths.ndim != 1 or (lengths < 1).any() or lengths.sum() != len(ids):
            raise BadRequest(400, f"prompt_lengths must divide the {len(ids)} token_ids of a request for scores")
        return np.split(ids, np.cumsum(lengths)[:-1])

    def _sampling(self, request: AnswerRequest, length: int) -> dict[str, Any]:
        if request.scores:
            return {"max_tokens": 1, "prompt_logprobs": request.top_scores, "detokenize": False}
        unknown = sorted(request.sampling.keys() - SAMPLING_PARAMETERS)
        if unknown:
            raise BadRequest(400, f"vLLM has no sampling parameter {unknown[0]!r}: correct llm.parameters")
        room = {"max_tokens": max(1, self._max_model_len - length)}
        return room | request.sampling | {"detokenize": bool(request.sampling.get("stop"))}

    def _encode(self, request: AnswerRequest, prompts: Sequence[Any], results: list[RequestOutput]) -> bytes:
        with_logprobs = request.sampling.get("logprobs") is not None
        if request.scores:
            return self._answer_codec.encode(_scores(results, request.top_scores))
        outputs = sorted(results[0].outputs, key=lambda each: each.index)
        completions = tuple(_completion(each, with_logprobs=with_logprobs) for each in outputs)
        if not request.images:
            return self._answer_codec.encode(Answer(completions=completions))
        prompt_ids = np.array(prompts[0]["prompt_token_ids"], dtype=np.int32)
        return self._answer_codec.encode(
            Answer(
                completions=completions,
                prompt_ids=prompt_ids,
                image_spans=image_spans_of(prompts[0]),
                format=IMAGE_FORMAT,
            )
        )


def _scores(results: list[RequestOutput], num_top: int) -> Answer:
    """The scores of the prompts of ``results``. vLLM's first column is the prompt's own token, the others the best."""
    ids, logprobs = (
        np.concatenate([part for result in results for part in (first, *(each[i] for each in result.prompt_logprobs))])
        for i, first in enumerate((np.zeros((1, num_top + 1), np.int32), np.zeros((1, num_top + 1), np.float32)))
    )
    own, logprobs = logprobs[:, 0].astype(np.float32), logprobs[:, 1:].astype(np.float32)
    labels = [version_spans(_starts(result.outputs[0]), 1) for result in results]
    versions = [int(spans[-1, 2]) for spans in labels if spans is not None]
    version = min(versions) if len(versions) == len(results) else None
    if not num_top:
        return Answer(prompt_scores=own, scored_by=version)
    return Answer(prompt_scores=own, scored_by=version, top_ids=ids[:, 1:].astype(np.int32), top_scores=logprobs)


def _completion(output: CompletionOutput, *, with_logprobs: bool) -> Completion:
    sampled: Sampled = output.logprobs
    logprobs = np.concatenate([np.empty(0, np.float32), *sampled.logprobs]) if with_logprobs else None
    return Completion(
        token_ids=np.array(output.token_ids, dtype=np.int32),
        logprobs=logprobs,
        version_spans=version_spans(_starts(output), len(output.token_ids)),
        finish_reason=output.finish_reason or "stop",
        cached_tokens=sampled.cached_tokens,
        routed_experts=None if output.routed_experts is None else _flat(output.routed_experts),
    )


def _starts(output: CompletionOutput) -> list[tuple[str, int]]:
    """The weight versions that sampled an output, each with the place of its first token."""
    return output.logprobs.starts or [(span.version, span.start) for span in output.weight_versions or ()]


def _num_sampled(result: RequestOutput) -> int:
    return sum(len(output.token_ids) for output in result.outputs)


def _flat(routed_experts: np.ndarray) -> np.ndarray:
    flat = routed_experts.reshape(len(routed_experts), -1)
    return flat if flat.dtype == np.uint8 else flat.astype(np.int16)


def version_spans(starts: Sequence[tuple[str, int]], count: int) -> np.ndarray | None:
    """Returns int32 [R, 3] for ``count`` tokens, or None if the weights come from no optimizer step.

    ``starts`` holds (version, index of its first token).
    """
    if not starts or not all(version.isdecimal() for version, _ in starts):
        return None
    ends = [start for _, start in starts[1:]] + [count]
    rows = [(start, end, int(version)) for (version, start), end in zip(starts, ends, strict=True) if end > start]
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


def answers_router(answers: Answers) -> APIRouter:
    """Returns the routes of answers and of requests under way."""
    router = APIRouter()

    @router.get(UNDER_WAY_PATH)
    async def under_way(prefix: str = "") -> Response:
        told = await answers.under_way(prefix)
        return Response(msgspec.json.encode(told), media_type="application/json")

    @router.post(ANSWER_PATH)
    async def answer(raw: Request) -> Response:
        body = await raw.body()
        work = asyncio.ensure_future(answers.answer(body, raw.headers.get(REQUEST_NAME, "")[:MAX_NAME]))
        gone = asyncio.ensure_future(_gone(raw))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)
            return Response(work.result(), media_type=MEDIA_TYPE)
        except BadRequest as error:
            content = {"error": {"message": str(error), "code": error.status}}
            return Response(msgspec.json.encode(content), status_code=error.status, media_type="application/json")
        finally:
            work.cancel()
            gone.cancel()

    return router


async def _gone(raw: Request) -> None:
    while (await raw.receive())["type"] != "http.disconnect":
        pass
