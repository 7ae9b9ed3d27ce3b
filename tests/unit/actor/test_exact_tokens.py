"""Training tokens are the tokens that the server was given and sampled, in every kind of conversation."""

import json

import aiohttp
import msgspec
import numpy as np
import pytest

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.async_llm import llm_async_generate, make_training_text, read_answer
from pipelinerl.errors import DomainError, ServerError
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.records import Rollout
from pipelinerl.records.answers import Answer
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.streams.codec import Codec
from pipelinerl.testing import FakeLLM, FakeServer, byte_tokenizer, completion, run_rollout
from tests.says import says

TOKENIZER = byte_tokenizer()
NO_SESSION: aiohttp.ClientSession = None  # type: ignore[assignment]
USER = {"role": "user", "content": "2+2?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}},
}


async def say(llm: TrainableLLM, messages: list[dict], tools: list[dict] | None = None) -> LLMCall:
    return await llm_async_generate(llm, Prompt(messages=messages, tools=tools), NO_SESSION)


def trained(llm: TrainableLLM, *calls: LLMCall) -> Rollout:
    metrics = BaseMetrics(reward=1, success=True, no_error=True, no_answer=False)
    texts = [make_training_text(llm, call) for call in calls]
    return to_rollout(
        RolloutResult(training_texts=texts, metrics=metrics, latency=0.0),
        attempt=0,
        latency_s=0.0,
        num_llm_calls=len(calls),
        fallback_version=0,
        seq_length=10**6,
    )


async def test_call_has_the_fields_of_the_public_interface() -> None:
    llm = FakeLLM.saying(["four"], tokenizer=TOKENIZER, version=6)
    call = await say(llm, [USER])
    assert call.output.content == "four"
    assert call.output.tool_calls is None
    assert [lp.token_id for lp in call.logprobs] == [*TOKENIZER.encode("four"), TOKENIZER.eos_token_id]
    assert {lp.logprob for lp in call.logprobs} == {-0.5}
    rendered = TOKENIZER.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert (call.prompt_length_tokens, call.output_length_tokens) == (len(rendered), 5)
    assert call.llm_info["finish_reason"] == "stop"
    assert (call.model_version, call.prompt.messages, call.cached) == (6, [USER], False)
    text = make_training_text(llm, call)
    assert text.input_ids == rendered + [lp.token_id for lp in call.logprobs]
    assert text.labels == [-100] * len(rendered) + [lp.token_id for lp in call.logprobs]
    assert text.prompt_text == TOKENIZER.decode(rendered)
    assert (text.output_text, text.finished, text.n_predicted) == ("four<|im_end|>", True, len("four<|im_end|>"))
    assert text.model_dump()["input_ids"] == text.input_ids


async def test_answer_that_retokenises_differently_is_continued_by_its_own_tokens() -> None:
    """The byte é (two tokens) arrives cut in two halves: its text is not what was sampled, its tokens are."""
    server = FakeServer(lambda prompt, params, index: [*TOKENIZER.encode("é")[:1], TOKENIZER.eos_token_id])
    async with server, aiohttp.ClientSession() as session:
        llm = TrainableLLM(base_url=server.url, model_name="policy", tokenizer=TOKENIZER, collect_logprobs=True)
        llm.state.turns = []
        first = await llm_async_generate(llm, Prompt(messages=[USER]), session)
        messages = [USER, {"role": "assistant", "content": first.output.content}, USER]
        second = await llm_async_generate(llm, Prompt(messages=messages), session)
    assert first.output.content == "\ufffd"
    sent = server.requests[1]["token_ids"]
    sampled = [*TOKENIZER.encode("é")[:1], TOKENIZER.eos_token_id]
    assert sent[: len(server.requests[0]["token_ids"]) + 2] == server.requests[0]["token_ids"] + sampled
    rollout = trained(llm, first, second)
    assert len(rollout.sequences) == 1
    assert rollout.sequences[0].token_ids.tolist() == sent + sampled


async def test_three_turns_send_what_the_template_renders() -> None:
    llm = FakeLLM.saying(["a", "b", "c"], tokenizer=TOKENIZER)
    messages = [USER]
    calls = []
    for _ in range(3):
        calls.append(await say(llm, messages))
        messages = [*messages, calls[-1].output.to_message(), {"role": "user", "content": "next"}]
        assert calls[-1].call_tokens is not None
    rendered = TOKENIZER.apply_chat_template(messages[:5], add_generation_prompt=True, return_dict=False)
    assert calls[2].call_tokens.prompt_ids.tolist() == rendered
    (sequence,) = trained(llm, *calls).sequences
    assert sequence.token_ids.tolist() == [*rendered, *TOKENIZER.encode("c"), TOKENIZER.eos_token_id]
    assert [end - start for start, end, _ in sequence.spans.tolist()] == [2, 2, 2]


async def test_cut_answer_is_closed_by_the_template_and_the_closing_is_not_trained() -> None:
    llm = FakeLLM.saying(["abc", "d"], tokenizer=TOKENIZER, finish_reason="length")
    first = await say(llm, [USER])
    second = await say(llm, [USER, {"role": "assistant", "content": "abc"}, USER])
    (sequence,) = trained(llm, first, second).sequences
    (start, end, _), _ = sequence.spans.tolist()
    assert TOKENIZER.decode(sequence.token_ids[start:end]) == "abc"
    assert sequence.token_ids[end] == TOKENIZER.eos_token_id


@pytest.mark.parametrize(
    "sampled",
    [
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>{"arguments":{"b":2,"a":1},"name":"add"}</tool_call>',
        '<tool_call>\n{"name": "add",\n  "arguments": {"a":  1,  "b": 2}}\n</tool_call>\n',
    ],
)
async def test_tool_call_written_unlike_the_template_is_still_continued_exactly(sampled: str) -> None:
    llm = FakeLLM.saying([sampled, "3"], tokenizer=TOKENIZER)
    first = await say(llm, [USER], [TOOL])
    (call,) = first.output.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    answer = {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": call.id}
    second = await say(llm, [USER, first.output.to_message(), answer], [TOOL])
    (sequence,) = trained(llm, first, second).sequences
    (start, end, _), _ = sequence.spans.tolist()
    assert TOKENIZER.decode(sequence.token_ids[start:end]) == sampled + "<|im_end|>"
    assert TOKENIZER.decode(sequence.token_ids[end:]).startswith("\n<|im_start|>tool\n3<|im_end|>\n")


async def test_tool_call_that_is_not_json_stays_content() -> None:
    llm = FakeLLM.saying(["<tool_call>{oops</tool_call>"], tokenizer=TOKENIZER)
    call = await say(llm, [USER], [TOOL])
    assert (call.output.content, call.output.tool_calls) == ("<tool_call>{oops</tool_call>", None)


REWRITING = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and not loop.last %}{{- message.content.split('</think>')[-1] }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


async def test_template_that_rewrites_history_is_continued_all_the_same() -> None:
    tokenizer = byte_tokenizer(REWRITING)
    llm = FakeLLM.saying(["<think>x</think>a", "b"], tokenizer=tokenizer)
    first = await say(llm, [USER])
    second = await say(llm, [USER, first.output.to_message(), USER])
    (sequence,) = trained(llm, first, second).sequences
    question = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sequence.token_ids) == f"{question}<think>x</think>a<|im_end|>\n{question}b<|im_end|>"


async def test_edited_answer_is_a_new_prompt() -> None:
    llm = FakeLLM.saying(["a", "b"], tokenizer=TOKENIZER)
    first = await say(llm, [USER])
    second = await say(llm, [USER, {"role": "assistant", "content": "edited"}, USER])
    rollout = trained(llm, first, second)
    assert (len(rollout.sequences), rollout.num_unmerged_turns) == (2, 1)


async def test_message_edited_after_the_call_is_a_new_prompt() -> None:
    llm = FakeLLM.saying(["a", "b"], tokenizer=TOKENIZER)
    parts = [{"type": "text", "text": "long observation"}]
    first = await say(llm, [{"role": "user", "content": parts}])
    parts[0]["text"] = "omitted"
    second = await say(llm, [{"role": "user", "content": parts}, first.output.to_message(), USER])
    rollout = trained(llm, first, second)
    assert len(rollout.sequences) == 2
    assert "omitted" in TOKENIZER.decode(rollout.sequences[1].token_ids)


async def test_list_of_parts_renders_like_its_text_and_no_image_is_refused() -> None:
    llm = FakeLLM.saying(["a"] * 2, tokenizer=TOKENIZER)
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    one = await say(llm, [{"role": "user", "content": parts}])
    other = await say(llm, [{"role": "user", "content": "2+\n2?"}])
    assert one.call_tokens is not None
    assert other.call_tokens is not None
    np.testing.assert_array_equal(one.call_tokens.prompt_ids, other.call_tokens.prompt_ids)
    with pytest.raises(DomainError, match=says("'image_url'", "no image")):
        await say(llm, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


async def test_prompt_token_ids_are_sent_as_they_are() -> None:
    llm = FakeLLM.saying(["a"], tokenizer=TOKENIZER)
    call = await llm_async_generate(llm, Prompt(token_ids=[5, 6, 7]), NO_SESSION)
    assert make_training_text(llm, call).input_ids[:3] == [5, 6, 7]


async def test_parameters_that_would_break_the_interface_are_refused() -> None:
    llm = FakeLLM.saying(["a"], tokenizer=TOKENIZER, parameters={"n": 2})
    with pytest.raises(DomainError, match="'n'"):
        await say(llm, [USER])


async def test_training_text_without_logprobs_is_refused() -> None:
    llm = FakeLLM.saying(["a"], tokenizer=TOKENIZER)
    call = LLMCall(prompt=Prompt(messages=[USER]), output={"content": "a"})
    with pytest.raises(ValueError, match="collect_logprobs=True"):
        make_training_text(llm, call)


def answer(change: dict | None = None, count: int = 3) -> bytes:
    whole = completion(list(range(count)), {"max_tokens": 99, "logprobs": 0}, 4)
    return Codec(Answer).encode(Answer(completions=(msgspec.structs.replace(whole, **(change or {})),)))


class Request:
    token_ids = np.array([1], np.int32)
    body_key = b'{"logprobs":0}'
    image_spans = None


def spans(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


def test_spans_of_several_versions_are_kept() -> None:
    payload = answer({"version_spans": spans((0, 2, 4), (2, 3, 5)), "cached_tokens": 7})
    (tokens,) = read_answer(payload, Request, 1)  # type: ignore[arg-type]
    assert tokens.version_spans.tolist() == [[0, 2, 4], [2, 3, 5]]
    assert tokens.logprobs is not None
    assert tokens.logprobs.tolist() == pytest.approx([-0.6931472] * 3)
    assert tokens.cached_tokens == 7


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": None},
        {"logprobs": np.array([-1.0], np.float32)},
        {"logprobs": np.array([-1.0, -9999.0, -1.0], np.float32)},
        {"logprobs": np.array([-1.0, np.nan, -1.0], np.float32)},
        {"logprobs": np.array([-1.0, 0.1, -1.0], np.float32)},
        {"logprobs": np.array([-1.0, -1.0, -1.0], np.float64)},
        {"version_spans": spans((0, 2, 4))},
        {"version_spans": spans((1, 4, 4))},
        {"version_spans": spans((0, 2, 4), (1, 3, 5))},
        {"version_spans": spans()},
        {"version_spans": np.array([0, 3, 4], np.int32)},
        {"finish_reason": "abort"},
        {"token_ids": "x"},
        {"token_ids": np.array([1.0, 2.0, 3.0], np.float32)},
    ],
)
def test_answer_that_lacks_something_is_a_server_failure(change: dict) -> None:
    with pytest.raises(ServerError):
        read_answer(answer(change), Request, 1)  # type: ignore[arg-type]


def test_answer_of_a_newer_format_and_of_other_counts_is_a_server_failure() -> None:
    with pytest.raises(ServerError, match=says("format", 3, 2)):
        read_answer(Codec(Answer).encode(Answer(format=3)), Request, 1)  # type: ignore[arg-type]
    with pytest.raises(ServerError, match=says(1, "completions", 2)):
        read_answer(answer(), Request, 2)  # type: ignore[arg-type]


def test_answer_with_fields_of_a_later_version_is_read() -> None:
    later = msgspec.msgpack.decode(Codec(Answer).encode(Answer()))
    assert read_answer(msgspec.msgpack.encode(later | {"later": 1}), Request, 0) == []  # type: ignore[arg-type]


async def test_shipped_run_rollout_plays_a_domain_without_a_server() -> None:
    from pipelinerl.domains.largest import generate_rollout

    problem = {"question": "Which?", "answer": 30, "dataset": "test"}
    result = await run_rollout(generate_rollout, problem, ["<answer>30</answer>"])
    assert (result.metrics.success, result.training_texts[0].reward, result.dataset_name) == (True, 1.0, "test")


async def test_token_ids_beside_an_image_are_refused() -> None:
    """The ids were sent without the image, of which the model then saw nothing."""
    messages = [{"role": "user", "content": [{"type": "image", "image": b"x"}]}]
    with pytest.raises(DomainError, match=says("token_ids", "images")):
        await llm_async_generate(FakeLLM.saying(["a"]), Prompt(messages=messages, token_ids=[1, 2]), NO_SESSION)
