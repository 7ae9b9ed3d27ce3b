"""Calls that a policy may sample and nobody can read: they stay text, in every parser, domain and dialect."""

import json
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from examples.tool_use.domain import generate_rollout
from pipelinerl.agents.chat_completions import ChatCompletions
from pipelinerl.agents.dialect import ChatRequest
from pipelinerl.agents.messages import Messages
from pipelinerl.agents.responses import Responses
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.chat.reading import ReadText, reader_of
from pipelinerl.llm import Prompt
from pipelinerl.testing import FakeLLM, byte_tokenizer, run_rollout

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def with_arguments(arguments: str) -> str:
    return f'{{"name": "add", "arguments": {arguments}}}'


def with_name(name: str) -> str:
    return f'{{"name": {name}, "arguments": {{"a": 1}}}}'


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    return with_arguments(opening * depth + "1" + closing * depth)


TEXT = [
    *(with_name(name) for name in ("null", "7", "1.5", "true", "[]", '["add"]', "{}", '""', '" "', '"\\ud800"', "NaN")),
    '{"arguments": {"a": 1}}',
    '{"name": "add", "id": null, "arguments": "no JSON"}',
    *(with_arguments(f'{{"a": {number}}}') for number in ("NaN", "Infinity", "-Infinity", "1e999", "[NaN]")),
    *(with_arguments(f'{{"a": {sign}1{"0" * digits}}}') for sign, digits in (("", 309), ("-", 400), ("", 5000))),
    *(with_arguments(one) for one in ('{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ["\\ud800x"]}')),
    *(with_arguments(one) for one in ("[1]", "7", "true", '"x"', '"[1]"', "NaN", '"{\\"a\\": NaN}"', "{", "{'a': 1}")),
    with_arguments('{"a": "<tool_call>{}</tool_call>"'),
    nested(65),
    nested(500),
    nested(100_000),
    with_arguments('{"a": ' + "[" * 64 + "]" * 64 + "}"),
    "null",
    "7",
    '"add"',
    "[[]]",
    "\\ud800",
    "",
]
CALLS: list[tuple[str, Any]] = [
    (with_arguments('{"a": 1}'), {"a": 1}),
    (with_arguments("{}"), {}),
    (with_arguments("null"), {}),
    (with_arguments('""'), {}),
    (with_arguments('"{\\"a\\": 1}"'), {"a": 1}),
    (with_arguments('{"a": 1, "a": 2}'), {"a": 2}),
    (with_arguments('{"a": "\\ud83d\\ude00", "": null, "b": 1e308}'), {"a": "😀", "": None, "b": 1e308}),
    (with_arguments(f'{{"a": {10**300}}}'), {"a": 10**300}),
    (nested(64), json.loads('{"a":' * 64 + "1" + "}" * 64)),
    ('{"name": "add", "id": {"x": NaN}, "arguments": {"a": 1}}', {"a": 1}),
]
WRITTEN = {
    "": "<tool_call>{}</tool_call>",
    "rl_tool": "<tool_calls>[{}]</tool_calls>",
    "rl_tool bare": "{}",
    "rl_tool hermes": "so <tool_call>{}</tool_call>",
}


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("call", TEXT, ids=range(len(TEXT)))
def test_call_that_cannot_be_read_stays_text(form: str, call: str) -> None:
    text = WRITTEN[form].replace("{}", call)
    assert reader_of(form.partition(" ")[0], "", None, [TOOL], {})(text) == ReadText(text, [])


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize(("call", "arguments"), CALLS, ids=range(len(CALLS)))
def test_odd_call_that_can_be_read_is_a_call(form: str, call: str, arguments: Any) -> None:
    found = reader_of(form.partition(" ")[0], "", None, [TOOL], {})(WRITTEN[form].replace("{}", call))
    assert found.calls == [("add", arguments)]


SHAPES = [*TEXT, *(call for call, _ in CALLS)]


def strict(body: str) -> Any:
    """Decodes JSON as a client in another language does."""
    msgspec.json.decode(body.encode(), type=Any, strict=True)

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(body, parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def vllm_forms() -> dict[str, str]:
    """How vLLM's parsers want a call written."""
    return {
        "hermes": "<tool_call>{}</tool_call>",
        "llama3_json": "{}",
        "mistral": "[TOOL_CALLS][{}]",
        "pythonic": "[{}]",
        "qwen3_xml": "<tool_call>\n{}\n</tool_call>",
        "granite-20b-fc": "<function_call> {}",
        "phi4_mini_json": "functools[{}]",
        "xlam": "[{}]",
        "internlm": "<|action_start|><|plugin|>{}<|action_end|>",
        "jamba": "<tool_calls>[{}]</tool_calls>",
        "hunyuan_a13b": "<tool_calls>[{}]</tool_calls>",
    }


PYTHONIC = [
    "add(a=float('nan'))", "add(a=1e999)", "add(a='\\ud800')", "add(a=" + "[" * 90 + "]" * 90 + ")", "add(1)",
    "add(**{})", "add(a=add(a=1))", "7", "add", "f'{x}'()", "add(a=b)", "add(a={1:2})", "a.b(c=1)", "add(a=10**400)",
]  # fmt: skip
XML = [
    f"<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
    for name in ("add", "", "null", "\ud7ff")
    for key in ("a", "", "b")
    for value in ("NaN", "1e999", "[" * 200, "9" * 400, "9" * 5000, '"\\ud800"', "", "null", "{", "<tool_call>")
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported
@pytest.mark.parametrize("parser", vllm_forms())
def test_parser_of_vllm_makes_calls_that_every_reader_takes_or_the_text_stays(parser: str) -> None:
    tokenizer = byte_tokenizer()
    marks = "<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] <|action_start|> <|plugin|> <|action_end|>"
    tokenizer.add_tokens([*marks.split(), "<tool_calls>", "</tool_calls>", "<function_call>"])
    read = reader_of(parser, "", tokenizer, [TOOL], {})
    form = vllm_forms()[parser]
    for shape in [*SHAPES, *PYTHONIC, *XML]:
        text = form.replace("{}", shape)
        found = read(text)
        assert found.calls or found.content == text, shape[:100]
        for name, arguments in found.calls:
            assert name.strip()
            assert isinstance(arguments, dict)
            strict(json.dumps([name, arguments]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parser_that_raises_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def parser(tokenizer: Any, tools: Any) -> Any:
        return SimpleNamespace(extract_tool_calls=lambda text, request: [][0])

    from vllm.tool_parsers import ToolParserManager

    monkeypatch.setattr(ToolParserManager, "get_tool_parser", lambda name: parser)
    read = reader_of("broken", "", None, [TOOL], {})
    assert [read("a"), read("b")] == [ReadText("a", []), ReadText("b", [])]
    assert caplog.text.count("event=parser_raised parser=broken error=IndexError") == 1


@pytest.mark.parametrize("call", SHAPES, ids=range(len(SHAPES)))
async def test_answer_to_any_call_is_valid_json_in_every_dialect(call: str) -> None:
    llm = FakeLLM.saying([f"<tool_call>{call}</tool_call>"])
    async with aiohttp.ClientSession() as session:
        said = await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": "?"}], tools=[TOOL]), session)
    for dialect in (ChatCompletions("policy", str), Responses("policy"), Messages("policy")):
        asked = ChatRequest(messages=[{"role": "user", "content": "?"}])
        assert strict(json.dumps(dialect.answer(said, asked)))
        for _, data in dialect.events(said, asked):
            strict(json.dumps(data))


@pytest.mark.parametrize("call", SHAPES, ids=range(len(SHAPES)))
async def test_rollout_with_any_call_earns_what_its_text_earns(call: str) -> None:
    cfg = {
        "rewards": {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None},
        "environment": {"tools": ["calculator"], "max_turns": 2},
    }
    problem = {"dataset": "test", "task": "What is 12 * 12?", "answer": "144"}
    result = await run_rollout(generate_rollout, problem, lambda _: f"<tool_call>{call}</tool_call>", cfg)
    assert result.metrics.reward == -1.0
    assert result.metrics.num_turns == (2 if call in dict(CALLS) else 1)  # type: ignore[attr-defined]


async def test_history_with_a_number_beyond_64_bits_goes_back_to_the_policy() -> None:
    """Clients of Anthropic send a call's arguments back as JSON, of which the prompt's cache makes msgpack."""
    block = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 10**30}}
    body = {"model": "m", "max_tokens": 9, "tools": [{"name": "add", "input_schema": {}}]}
    body |= {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": [block]}]}
    body["messages"] += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]}]
    asked = Messages("policy").read(body)
    async with aiohttp.ClientSession() as session:
        call = await llm_async_generate(
            FakeLLM.saying(["3"]), Prompt(messages=asked.messages, tools=asked.tools), session
        )
    assert str(10**30) in call.texts[0]
