"""A family's code renders where `llm.renderer` names it, and what it cannot render is refused by name.

That its prompts are those of its template is in `test_continuation`.
"""

import sys
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from pipelinerl.chat import renderer_of
from pipelinerl.chat.families import FamilyRenderer, check_family, family_renderer
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.testing import byte_tokenizer
from tests.pictures import question
from tests.says import says
from tests.vision import picture

QWEN3 = (
    "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
)
KIMI = (
    "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> [EOS] "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)
ASKED = {"role": "user", "content": "hi"}
NEXT = {"role": "user", "content": "and?"}


def tokenizer_with(tokens: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens.split()])
    return tokenizer


def family_of(tokens: str, family: str) -> FamilyRenderer:
    renderer = renderer_of(tokenizer_with(tokens), family)
    assert isinstance(renderer, FamilyRenderer)
    return renderer


def test_tokenizer_has_one_renderer_of_each_family_and_one_of_its_template() -> None:
    tokenizer = tokenizer_with(QWEN3)
    tokenizer.chat_template = "{{ messages[0].content }}!"
    assert renderer_of(tokenizer, "qwen3") is renderer_of(tokenizer, "qwen3")
    assert renderer_of(tokenizer) is renderer_of(tokenizer)
    texts = [renderer_of(tokenizer, family).render([ASKED], None, {}).text for family in ("", "qwen3")]
    assert texts == ["hi!", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"]


def test_options_of_the_family_are_those_of_each_prompt() -> None:
    renderer = family_of(QWEN3, "qwen3")
    for kwargs, end in (({}, "assistant\n"), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
        assert renderer.render([ASKED], None, kwargs).text.endswith(end)


@pytest.mark.parametrize(
    ("said", "kwargs", "continued"),
    [
        ("<think>why</think>one<|im_end|>", {}, True),
        ("<think>why</think>one", {}, True),
        ("<think>why<|im_end|>", {}, False),
        ("<think>why</think>one<|im_end|>", {"thinking_retention": "tool_cycle"}, False),
    ],
)
def test_family_says_whether_an_answer_is_continued(said: str, kwargs: dict[str, Any], continued: bool) -> None:
    """Thoughts stay in the history unless the options say otherwise. One that was ended without its end does not."""
    renderer = family_of(QWEN3, "qwen3")
    prompt, answer = renderer.render([ASKED], None, kwargs).token_ids, renderer.encode(said)
    ids = renderer.ids_between(prompt, answer, [{"role": "assistant", "content": "one"}, NEXT], None, kwargs)
    end = "" if said.endswith("<|im_end|>") else "<|im_end|>"
    expected = end + "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert (None if ids is None else renderer.decode(ids.tolist())) == (expected if continued else None)


def test_result_of_a_tool_has_its_name_where_the_family_writes_it() -> None:
    renderer = family_of(KIMI, "kimi-k2")
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "functions.add:0", "content": "2"}
    whole = renderer.render([ASKED, answer, result], None, {}).text
    ids = renderer.ids_between(np.array([1], np.int32), renderer.encode("x<|im_end|>"), [answer, result], None, {})
    assert ids is not None
    for text in (whole, renderer.decode(ids.tolist())):
        assert "<|im_system|>add<|im_middle|>## Return of functions.add:0\n2<|im_end|>" in text


def test_prompt_with_an_image_is_refused() -> None:
    with pytest.raises(DomainError, match=says("llm.renderer", "images")):
        family_of(QWEN3, "qwen3").render([question(picture(28, 28, seed=0))], None, {})


@pytest.mark.parametrize(
    ("family", "kwargs", "words"),
    [
        ("morse", {}, ["llm.renderer", "morse", "qwen3"]),
        ("auto", {}, ["llm.renderer", "auto", "family"]),
        ("qwen3", {"enable_thoughts": True}, ["chat_template_kwargs", "enable_thoughts"]),
    ],
)
def test_unknown_family_or_option_is_refused(family: str, kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError, match=says(*words)):
        check_family(family, kwargs)


def test_tokenizer_of_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("llm.renderer", "kimi-k2", "<|im_user|>")):
        family_renderer(tokenizer_with(QWEN3), "kimi-k2", {})


def test_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    said = says("llm.renderer", "pip install 'pipelinerl[renderers]'")
    with pytest.raises(ConfigError, match=said):
        check_family("qwen3", {})
    with pytest.raises(ConfigError, match=said):
        family_renderer(None, "qwen3", {})
