"""Requests a completion from a server and turns the answer into training data.

The names defined above ``DirectTransport`` are public.

The prompt is rendered once, here, and sent as token ids. The answer holds the sampled ids, their log-probabilities and
weight versions (``records.answers``). Text is never tokenised again. A completion without a finite log-probability for
every token is a failure of the server.
"""

import asyncio
import json
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import numpy as np

from pipelinerl.chat import (
    ChatRenderer,
    ReadText,
    Rendered,
    Turn,
    answers_of,
    extend,
    history_of,
    left_turn,
    renderer_of,
)
from pipelinerl.chat.continuation import History
from pipelinerl.chat.images import check_expansion, images_of
from pipelinerl.chat.reading import reader_of
from pipelinerl.chat.rendering import NO_SPANS
from pipelinerl.errors import DomainError, ServerError, StreamError, TransportError
from pipelinerl.llm import (
    FunctionCall,
    GenerateRequest,
    LLMCall,
    LLMOutput,
    Prompt,
    ToolCall,
    TrainableLLM,
    sampling_params,
)
from pipelinerl.records.answers import (
    ANSWER_FORMAT,
    ANSWER_PATH,
    IMAGE_FORMAT,
    REQUEST_NAME,
    TEXT_FORMAT,
    Answer,
    AnswerRequest,
    Completion,
)
from pipelinerl.records.check import LARGEST_LOGPROB
from pipelinerl.rollouts import CallTokens, TrainingText, apply_rollout_reward
from pipelinerl.streams.codec import Codec

MISSING_LOGPROB = -9999.0
"""vLLM's value for a token without a log-probability."""
MAX_BACKOFF_S = 10.0
"""A server that is back is found again this soon."""
MAX_CHARS_PER_TOKEN = 10
"""More than the average of any text that fills a context: English has 4, code 3."""
LONG_TOKENS = 4000
"""Completions of this length or more would block the event loop for about 1 ms, so a thread decodes them."""


class RetryableAbortedCompletionError(ServerError):
    """The server ended a completion before the model did. A repetition may succeed."""


async def llm_async_generate(
    llm: TrainableLLM, prompt: Prompt, session: aiohttp.ClientSession, max_tokens_override: int | None = None
) -> LLMCall:
    """Samples one completion.

    Args:
        llm: the server and its sampling parameters.
        prompt: messages (and tools) in OpenAI format.
        session: HTTP session of the rollout.
        max_tokens_override: longest completion of this call, in tokens. None: as in ``llm.parameters``.

    Returns:
        The call: ``output.content``, ``output.tool_calls``, ``logprobs`` (one per sampled token), token counts and
        ``llm_info["finish_reason"]`` ("stop", "length", …).

    Raises:
        TransportError: no server answered within the retries.
        ServerError: the server refused the request, for the reason in the message, or the prompt has more than
            ``MAX_CHARS_PER_TOKEN`` characters per token of the context.
        DomainError: the prompt's ``response_format`` would constrain the sampler.
    """
    llm.load_tokenizer()
    _refuse_constraint(prompt)
    refuse_too_long(llm, prompt.messages, prompt.tools)
    renderer = renderer_of(llm.tokenizer, llm.renderer)
    history = history_of(prompt.messages) if llm.state.turns is not None else ()
    rendered, continued = _prompt_tokens(renderer, llm, prompt, history)
    prefix_version = continued.prefix_version if continued else None
    hinted_ids = _hinted_ids(renderer, llm, prompt, rendered, continued)
    request = GenerateRequest(
        token_ids=rendered.token_ids,
        images=rendered.images,
        image_spans=rendered.image_spans if rendered.images else None,
        prefix_version=prefix_version,
        body_key=sampling_params(llm, max_tokens_override),
        model=llm.model_name,
        retries=llm.max_retries,
        base_delay_s=llm.base_delay,
    )
    state = llm.state
    transport = state.transport or _DIRECT
    index = state.begin_call()
    try:
        tokens = await transport.generate(llm, request, session)
    except TransportError as error:
        if is_retryable(error):  # the domain may handle a refusal, but a failure must not become a reward
            state.fail(error)
        raise
    state.add_prompt_tokens(len(tokens.prompt_ids), tokens.cached_tokens)
    if hinted_ids is not None:
        tokens = replace(tokens, hinted_ids=hinted_ids)
    texts = await _texts(renderer, tokens)
    return _to_call(llm, prompt, history, rendered.text, tokens, texts, index, prefix_version)


def make_training_text(llm: TrainableLLM, llm_call: LLMCall) -> TrainingText:
    """Turns a call into training data: prompt tokens are masked, sampled tokens are trained.

    Set ``reward`` on the returned text.

    Args:
        llm: not used, kept for compatibility with PipelineRL.
        llm_call: a call made with ``collect_logprobs=True``.
    Raises:
        ValueError: the call has no log-probabilities.
    """
    tokens = llm_call.call_tokens
    if tokens is None or tokens.logprobs is None:
        raise ValueError("llm_call has no log-probabilities: create the TrainableLLM with collect_logprobs=True")
    prompt_text, output_text = llm_call.texts
    text = TrainingText(
        text=prompt_text + output_text,
        n_predicted=len(output_text),
        finished=tokens.finish_reason != "length",
        prompt_tokens=len(tokens.prompt_ids),
        output_tokens=len(tokens.completion_ids),
    )
    text.attach(tokens)
    return text


def make_training_texts_from_llm_calls(
    llm: TrainableLLM, llm_calls: Iterable[LLMCall], reward: float | None = None
) -> list[TrainingText]:
    """Makes one training text per call.

    Args:
        llm: see ``make_training_text``.
        llm_calls: the calls of a rollout, in order.
        reward: set on every text. None: the rewards stay unset.
    """
    texts = [make_training_text(llm, call) for call in llm_calls]
    return texts if reward is None else apply_rollout_reward(texts, reward)


class DirectTransport:
    """Posts to ``llm.base_url``, and repeats requests that failed in transport. The default outside the actor."""

    async def generate(self, llm: TrainableLLM, request: GenerateRequest, session: aiohttp.ClientSession) -> CallTokens:
        for repetition in range(request.retries + 1):
            try:
                return (await post_generate(session, llm.base_url, request, n=1, token=llm.api_token))[0]
            except TransportError as error:
                if repetition == request.retries or not is_retryable(error):
                    raise
            await asyncio.sleep(backoff_s(repetition, request.base_delay_s))
        raise AssertionError("the loop returns or raises")


_DIRECT = DirectTransport()


def is_retryable(error: TransportError) -> bool:
    """Whether a repetition can help. It cannot if the server refused a valid request."""
    return not isinstance(error, ServerError) or may_succeed(error.status)


def may_succeed(status: int) -> bool:
    """Whether a request that got this HTTP status may get another one when it is repeated."""
    return status >= 500 or status in (408, 429)


def backoff_s(repetition: int, base_s: float) -> float:
    """Returns the delay in seconds before repetition 0, 1, …

    It doubles from ``base_s`` up to a cap. The jitter keeps clients from repeating in step.
    """
    return min(MAX_BACKOFF_S, base_s * 2.0**repetition) * random.uniform(0.5, 1.0)


async def post_generate(
    session: aiohttp.ClientSession, base_url: str, request: GenerateRequest, *, n: int, token: str, name: str = ""
) -> list[CallTokens]:
    """Sends one HTTP request for ``n`` completions of one prompt.

    Args:
        session: HTTP session.
        base_url: URL of the server.
        request: prompt and sampling parameters.
        n: number of completions.
        token: bearer token, or empty.
        name: name under which the server reports the progress of the answer, or empty.
    Raises:
        TransportError: no answer came, or the connection broke.
        ServerError: the server refused the request, or its answer is not valid.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if name:
        headers[REQUEST_NAME] = name
    url = base_url.rstrip("/") + ANSWER_PATH
    try:
        async with session.post(url, data=encode_request(request, n), headers=headers) as response:
            payload = await response.read()
            status = response.status
    except (aiohttp.ClientError, OSError) as error:
        raise TransportError(f"{url}: {type(error).__name__}: {error}") from error
    if status != 200:
        raise ServerError(f"{url} answered {status}: {payload[:500].decode(errors='replace')}", status)
    return read_answer(payload, request, n)


_decoding = ThreadPoolExecutor(1, "decoding")
_request_codec: Codec[AnswerRequest] = Codec(AnswerRequest)
_answer_codec: Codec[Answer] = Codec(Answer)


def encode_request(request: GenerateRequest, n: int) -> bytes:
    """Encodes the HTTP body that requests ``n`` samples."""
    sampling = msgspec.json.decode(request.body_key)
    if n > 1:
        sampling["n"] = n
    return _request_codec.encode(
        AnswerRequest(
            token_ids=request.token_ids,
            model=request.model,
            sampling=sampling,
            prefix_version=request.prefix_version,
            images=request.images,
            image_spans=request.image_spans,
            format=IMAGE_FORMAT if request.images else TEXT_FORMAT,
        )
    )


def read_answer(payload: bytes, request: GenerateRequest, n: int) -> list[CallTokens]:
    """Decodes and checks the completions of a server's answer.

    Args:
        payload: body of the answer (``records.answers.Answer``).
        request: the request that it answers.
        n: expected number of completions.
    Raises:
        ServerError: the body cannot be decoded, or a completion is incomplete.
    """
    try:
        answer = _answer_codec.decode(payload)
    except StreamError as error:
        raise ServerError(f"the server's answer cannot be read: {error}", 502) from error
    if answer.format > ANSWER_FORMAT:
        raise ServerError(f"the server answers in format {answer.format}, this client reads {ANSWER_FORMAT}", 502)
    if len(answer.completions) != n:
        raise ServerError(f"the server answered {len(answer.completions)} completions instead of {n}", 502)
    with_logprobs = b'"logprobs"' in request.body_key
    if request.image_spans is None:
        return [_checked(completion, request.token_ids, with_logprobs) for completion in answer.completions]
    prompt_ids, spans = check_expansion(request.token_ids, request.image_spans, answer.prompt_ids, answer.image_spans)
    checked = [_checked(completion, prompt_ids, with_logprobs) for completion in answer.completions]
    return [replace(tokens, images=request.images, image_spans=spans) for tokens in checked]


def _checked(completion: Completion, prompt_ids: np.ndarray, with_logprobs: bool) -> CallTokens:
    if completion.finish_reason in ("abort", "error"):
        raise RetryableAbortedCompletionError(f"the server ended a completion with {completion.finish_reason!r}", 503)
    token_ids, logprobs = completion.token_ids, completion.logprobs
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        raise ServerError(f"the server sent token ids as {token_ids.ndim}-D {token_ids.dtype}", 502)
    count = len(token_ids)
    if with_logprobs and (
        logprobs is None
        or logprobs.dtype != np.float32
        or logprobs.shape != (count,)
        or not np.isfinite(logprobs).all()
        or (count and logprobs.min() <= MISSING_LOGPROB)
    ):
        raise ServerError(f"the server sent no log-probability for some of {count} sampled tokens", 502)
    if with_logprobs and logprobs is not None and count and logprobs.max() > LARGEST_LOGPROB:
        worst = int(logprobs.argmax())
        raise ServerError(
            f"the server sent the log-probability {logprobs[worst]:.6g} for sampled token {worst} of {count} (id "
            f"{token_ids[worst]}); a log-probability is at most 0",
            502,
        )
    routed = completion.routed_experts
    if routed is not None and (routed.ndim != 2 or len(routed) != len(prompt_ids) + count - 1):
        raise ServerError(f"the server's routed experts {routed.shape} do not cover all tokens", 502)
    return CallTokens(
        prompt_ids=prompt_ids,
        completion_ids=token_ids,
        logprobs=logprobs if with_logprobs else None,
        version_spans=_version_spans(completion.version_spans, count),
        finish_reason=completion.finish_reason,
        cached_tokens=completion.cached_tokens,
        routed_experts=routed,
    )


def _version_spans(spans: np.ndarray | None, count: int) -> np.ndarray:
    """Checks and returns the spans, int32 [R, 3]. Empty: the weights do not come from an optimizer step."""
    if spans is None:
        return np.empty((0, 3), dtype=np.int32)
    is_table = spans.dtype == np.int32 and spans.ndim == 2 and spans.shape[1:] == (3,)
    ends = np.concatenate(([0], spans[:, 1])) if is_table else np.empty(0)
    if not is_table or ends[-1] != count or (spans[:, 0] != ends[:-1]).any() or (spans[:, 0] >= spans[:, 1]).any():
        raise ServerError(f"the server's weight versions {spans.tolist()} do not cover {count} tokens", 502)
    return spans


def _prompt_tokens(
    renderer: ChatRenderer, llm: TrainableLLM, prompt: Prompt, history: History
) -> tuple[Rendered, Turn | None]:
    """Returns the prompt, and the turn of the rollout that it continues, if any."""
    if prompt.token_ids:
        if images_of(prompt.messages):
            raise DomainError(
                "the prompt has token_ids and images in its messages: leave token_ids empty, or the images"
            )
        return Rendered(renderer.decode(prompt.token_ids), np.array(prompt.token_ids, dtype=np.int32)), None
    if not prompt.messages:
        raise DomainError("the prompt has neither messages nor token_ids")
    turns = llm.state.turns or ()
    extended = extend(renderer, turns, prompt.messages, history, prompt.tools, llm.chat_template_kwargs)
    rendered, continued = extended or (renderer.render(prompt.messages, prompt.tools, llm.chat_template_kwargs), None)
    left = left_turn(turns, prompt.messages, history, continued)
    if left is not None and not rendered.images and len(rendered.token_ids) < len(left.prompt_ids):
        llm.state.num_compacted += 1
    else:
        llm.state.num_forks += left is not None
    return rendered, continued


def _hinted_ids(
    renderer: ChatRenderer, llm: TrainableLLM, prompt: Prompt, rendered: Rendered, continued: Turn | None
) -> np.ndarray | None:
    """Returns the prompt for a teacher that sees the problem's hint, int32 [H]. None: no teacher does."""
    if llm.state.hint is None:
        return None
    if prompt.token_ids or rendered.images:
        raise DomainError("a teacher sees the problem's hint (`teachers.hint`), which needs prompts of text messages")
    if continued is not None and continued.hinted_ids is not None:
        return np.concatenate((continued.hinted_ids, rendered.token_ids[len(continued.prompt_ids) :]))
    messages = with_hint(prompt.messages, llm.state.hint)
    return renderer.render(messages, prompt.tools, llm.chat_template_kwargs).token_ids


def with_hint(messages: list[dict], hint: str) -> list[dict]:
    """Returns the messages with the hint at the end of the last user message."""
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        raise DomainError("a teacher sees the problem's hint (`teachers.hint`), but the prompt has no user's message")
    asked = dict(messages[users[-1]])
    content = asked.get("content") or ""
    asked["content"] = (
        [*content, {"type": "text", "text": hint}] if isinstance(content, list) else f"{content}\n\n{hint}"
    )
    return [*messages[: users[-1]], asked, *messages[users[-1] + 1 :]]


def refuse_too_long(llm: TrainableLLM, messages: Any, tools: Any) -> None:
    """Refuses messages that are too long for the context, by their characters: rendering them would block the loop.

    Args:
        llm: the model, with its ``context_size`` in tokens.
        messages: in OpenAI format.
        tools: likewise.
    Raises:
        ServerError: they have more than ``MAX_CHARS_PER_TOKEN`` characters per token of the context.
    """
    count, most = _num_chars((messages, tools)), MAX_CHARS_PER_TOKEN * llm.context_size
    if count > most:
        raise ServerError(
            f"the prompt has {count} characters, longer than the maximum context length of {llm.context_size} tokens "
            f"at {MAX_CHARS_PER_TOKEN} characters per token",
            400,
        )


def _num_chars(value: Any) -> int:
    """Returns the number of characters in all texts of messages or tools, without images in data URLs."""
    if isinstance(value, str):
        return 0 if value.startswith("data:image/") else len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_num_chars, inner))


def _refuse_constraint(prompt: Prompt) -> None:
    if prompt.response_format not in (None, {"type": "text"}):
        raise DomainError(
            f"Prompt.response_format is {prompt.response_format!r}: a constrained sampler has another distribution "
            "than the one that is trained; ask for the format in the prompt, and give an answer without it a low reward"
        )


def _to_call(
    llm: TrainableLLM,
    prompt: Prompt,
    history: History,
    prompt_text: str,
    tokens: CallTokens,
    texts: tuple[str, str],
    index: int,
    prefix_version: int | None,
) -> LLMCall:
    sampled_text, end_text = texts
    read = reader_of(llm.tool_parser, llm.reasoning_parser, llm.tokenizer, prompt.tools, llm.chat_template_kwargs)
    said = read(sampled_text)
    spans = tokens.version_spans
    if prefix_version is None and len(spans):
        prefix_version = int(spans[0, 2])
    if llm.state.turns is not None:
        stop = llm.parameters.get("stop") or []
        llm.state.turns.append(
            Turn(
                history,
                answers_of(sampled_text, end_text, said, [stop] if isinstance(stop, str) else stop),
                prompt.tools,
                tokens.prompt_ids,
                tokens.completion_ids,
                end_text,
                prefix_version,
                NO_SPANS if tokens.image_spans is None else tokens.image_spans,
                tokens.hinted_ids,
            )
        )
    call = LLMCall(
        prompt=prompt,
        output=_output_of(sampled_text, said, index),
        prompt_length_tokens=len(tokens.prompt_ids),
        output_length_tokens=len(tokens.completion_ids),
        model_version=int(spans[:, 2].min()) if len(spans) else None,
        llm_info={
            "model_name": llm.model_name,
            "parameters": llm.parameters,
            "context_size": llm.context_size,
            "finish_reason": tokens.finish_reason,
        },
    )
    call.attach(tokens)
    call.attach_texts(prompt_text, sampled_text + end_text, said)
    return call


def _output_of(text: str, said: ReadText, index: int) -> LLMOutput:
    """Builds the assistant's message from the sampled text and the tool calls found in it.

    ``index``: of the answer in the rollout. Ids have nine letters and digits, which Mistral's templates require.
    """
    if not said.calls:
        return LLMOutput(content=text)
    tool_calls = [
        ToolCall(id=f"c{index:05d}{i:03d}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for i, (name, arguments) in enumerate(said.calls)
    ]
    return LLMOutput(content=said.content or None, tool_calls=tool_calls)


async def _texts(renderer: ChatRenderer, tokens: CallTokens) -> tuple[str, str]:
    """Runs ``_split_end``, for long completions in a thread, one at a time."""
    if len(tokens.completion_ids) < LONG_TOKENS:
        return _split_end(renderer, tokens)
    return await asyncio.get_running_loop().run_in_executor(_decoding, _split_end, renderer, tokens)


def _split_end(renderer: ChatRenderer, tokens: CallTokens) -> tuple[str, str]:
    """Returns (sampled text, text of the token that ended it). The second is empty if no such token was sampled."""
    token_ids = tokens.completion_ids.tolist()
    if token_ids and tokens.finish_reason == "stop" and renderer.is_end_token(token_ids[-1]):
        return renderer.decode(token_ids[:-1]), renderer.token_text(token_ids[-1])
    return renderer.decode(token_ids), ""
