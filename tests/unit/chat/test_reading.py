"""Tool calls read out of text: Hermes, and vLLM's parsers by name; turns of any format extend each other."""

import json

import aiohttp
import pytest

from pipelinerl.async_llm import llm_async_generate
from pipelinerl.chat.reading import ReadText, read_hermes, reader_of
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt
from pipelinerl.testing import FakeLLM, byte_tokenizer
from tests.says import says

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
vllm_is_imported = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("add", {"a": 1})]),
        (f"I add.\n{CALL}\n{CALL}", "I add.", [("add", {"a": 1})] * 2),
        (CALL.removesuffix("</tool_call>"), "", [("add", {"a": 1})]),
        (f"{CALL} <tool_call>{{broken", f"{CALL} <tool_call>{{broken", []),
        ('<tool_call>["add"]</tool_call>', '<tool_call>["add"]</tool_call>', []),
        ("plain", "plain", []),
    ],
)
def test_hermes_calls_are_read_or_the_text_stays(text, content, calls):
    assert read_hermes(text) == ReadText(content, calls)


BARE = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"thinking <tool_calls>[{BARE}, {BARE}]</tool_calls>", "", [("add", {"a": 1})] * 2),
        (f"<TOOL_CALLS> [{BARE}]", "", [("add", {"a": 1})]),
        (f"<tool_calls>[]</tool_calls> <tool_calls>[{BARE}]</tool_calls>", "", [("add", {"a": 1})]),
        (f"<tool_calls>[{BARE}] [BEGIN FINAL RESPONSE]3[END FINAL RESPONSE]", "3", []),
        (BARE, "", [("add", {"a": 1})]),
        (f" [{BARE}]\n", "", [("add", {"a": 1})]),
        (f"so: [BEGIN FINAL RESPONSE] {BARE} [END FINAL RESPONSE]", BARE, [("add", {"a": 1})]),
        (f"so: [BEGIN FINAL RESPONSE] {CALL} [END FINAL RESPONSE]", "", [("add", {"a": 1})]),
        (f"I add.\n{CALL}", "I add.", [("add", {"a": 1})]),
        ("so: [BEGIN FINAL RESPONSE] 3 [END FINAL RESPONSE]", "3", []),
        ('{"name": "add"}', '{"name": "add"}', []),
        ("[1, 2]", "[1, 2]", []),
        ("plain", "plain", []),
    ],
)
def test_pipelinerls_calls_are_read_as_its_plugin_reads_them(text, content, calls):
    assert reader_of("rl_tool", "", None, [TOOL], {})(text) == ReadText(content, calls)


@vllm_is_imported
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", CALL),
        ("pythonic", "[add(a=1)]"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}'),
        ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_formats_of_vllm_are_read_by_its_parsers(name, text):
    read = reader_of(name, "", byte_tokenizer_with_calls(), [TOOL], {})
    assert read(text) == ReadText("", [("add", {"a": 1})])
    assert read("3") == ReadText("3", [])


@vllm_is_imported
@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("deepseek_r1", f"add them\n</think>\n\n{CALL}", ReadText("", [("add", {"a": 1})], "add them")),
        ("qwen3", "<think>\nadd them\n</think>\n\nIt is 3.", ReadText("It is 3.", [], "add them")),
        ("deepseek_r1", "cut in the tho", ReadText("", [], "cut in the tho")),
    ],
)
def test_thoughts_are_read_apart_by_vllms_parsers(name, text, read):
    assert reader_of("", name, byte_tokenizer_with_calls(), [TOOL], {})(text) == read


@vllm_is_imported
def test_unknown_reasoning_parser_is_named_with_those_there_are():
    with pytest.raises(DomainError, match=says("llm.reasoning_parser", "morse", "qwen3")):
        reader_of("", "morse", byte_tokenizer(), None, {})


def byte_tokenizer_with_calls():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>"])
    return tokenizer


@vllm_is_imported
def test_unknown_parser_is_named_with_those_there_are():
    with pytest.raises(DomainError, match=says("llm.tool_parser", "morse", "hermes")):
        reader_of("morse", "", byte_tokenizer(), [TOOL], {})


@vllm_is_imported
async def test_turns_in_another_format_extend_each_other():
    """The template writes the call as the model did; the second prompt continues the first turn's tokens."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %})]{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    llm = FakeLLM.saying(["[add(a=1)]", "2"], tokenizer=byte_tokenizer(template), tool_parser="pythonic")
    messages: list[dict] = [{"role": "user", "content": "1 + 1?"}]
    async with aiohttp.ClientSession() as session:
        first = await llm_async_generate(llm, Prompt(messages=list(messages), tools=[TOOL]), session)
        (call,) = first.output.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        messages += [first.output.to_message(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        second = await llm_async_generate(llm, Prompt(messages=messages, tools=[TOOL]), session)
    before, after = first.call_tokens.token_ids.tolist(), second.call_tokens.prompt_ids.tolist()
    assert after[: len(before)] == before
    assert llm.tokenizer.decode(after).endswith("tool: 2<|im_end|>assistant: ")
