"""The model's own template and parsers are tried before the start."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse, to_container
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.launcher.chat_trial import parsers_of, refusal_of_parsers, try_chat
from pipelinerl.launcher.domain_check import check_domains
from pipelinerl.testing import CHAT_TEMPLATE, byte_tokenizer, save_tokenizer
from tests.says import says

SYSTEM, USER = {"role": "system", "content": "Reason."}, {"role": "user", "content": "1 + 1?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
)
KNOWS_ITS_ROLES = "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A'}[m.role] + m.content }}{% endfor %}"
ONE_TURN = "{% if messages[-1].role != 'system' %}{{ raise_exception('ends in a system message') }}{% endif %}"
NEEDS_A_VARIABLE = "{{ 'date: ' + today + messages[0].content }}"


@pytest.fixture(autouse=True)
def no_tokenizers_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.llm._TOKENIZERS", {})


def tried(
    folder: Path, template: str | None, *overrides: str, asked=([SYSTEM, USER], None), count: int = 1
) -> list[str]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    save_tokenizer(folder, tokenizer)
    return list(try_chat(configuration(folder, *overrides), [asked] * count))


def configuration(folder: Path, *overrides: str) -> Config:
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", f"model_path={folder}"]
    return parse(compose("base", [*required, *overrides]))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (REFUSES_SYSTEM + TURNS, ["System role not supported", "actor.system_prompt=''"]),
        (ALTERNATES + TURNS, ["must alternate", "actor.system_prompt=''"]),
        (KNOWS_ITS_ROLES, ["actor.system_prompt=''"]),
        (ONE_TURN + TURNS, ["ends in a system message"]),
        (NEEDS_A_VARIABLE, ["today"]),
        (None, ["no chat template", "`llm.chat_template`", "`llm.renderer`"]),
    ],
)
def test_template_that_refuses_the_prompts_is_refused_with_the_cure(
    tmp_path: Path, template: str | None, said: list[str]
) -> None:
    with pytest.raises(ConfigError, match=says(str(tmp_path), *said)) as refused:
        tried(tmp_path, template)
    is_cured = "actor.system_prompt=''" in said
    assert ("actor.system_prompt" in str(refused.value)) == is_cured
    if is_cured:
        assert tried(tmp_path, template, asked=([USER], None)) == []


def test_chosen_template_and_its_variables_are_those_that_are_tried(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(NEEDS_A_VARIABLE)
    with pytest.raises(ConfigError, match=says("own.jinja", "today")):
        tried(tmp_path, CHAT_TEMPLATE, f"llm.chat_template={tmp_path}/own.jinja")
    dated = [f"+{name}.chat_template_kwargs.today=Monday" for name in ("llm", "test_llm")]
    assert tried(tmp_path, CHAT_TEMPLATE, f"llm.chat_template={tmp_path}/own.jinja", *dated) == []


def test_one_prompt_of_several_may_be_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_tokenizer(REFUSES_SYSTEM + TURNS))
    assert list(try_chat(configuration(tmp_path), [([SYSTEM, USER], None), ([USER], None)])) == []


def test_template_that_hides_tools_gives_a_warning(tmp_path: Path) -> None:
    assert tried(tmp_path / "shows", CHAT_TEMPLATE, asked=([USER], [TOOL])) == []
    (warning,) = tried(tmp_path / "hides", TURNS, asked=([USER], [TOOL]), count=2)
    assert "does not show the domain's tools" in warning
    assert tried(tmp_path / "needs", "{% for tool in tools %}{{ tool }}{% endfor %}", asked=([USER], [TOOL])) == []


def test_template_that_hides_the_system_message_gives_a_warning(tmp_path: Path) -> None:
    (warning,) = tried(tmp_path / "hides", "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert re.search(says("does not show the system message", "actor.system_prompt=''"), warning)
    has_the_same_default = "{% if messages[0].role != 'system' %}[system] Reason.{% endif %}" + TURNS
    assert tried(tmp_path / "shows", has_the_same_default) == []


def test_check_of_the_domain_tries_the_prompts_of_its_rollouts(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_tokenizer(REFUSES_SYSTEM + TURNS))
    given = ["output_dir=x", f"model_path={tmp_path}", "actor.system_prompt=Reason."]
    with pytest.raises(ConfigError, match=says("System role not supported", "actor.system_prompt=''")):
        check_domains(to_container(compose("arithmetic", given)), [])
    warnings: list[str] = []
    check_domains(to_container(compose("arithmetic", [*given, "actor.system_prompt="])), warnings)
    assert warnings == []


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (save_tokenizer(tmp_path, byte_tokenizer()) / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=says("`model_path`", str(tmp_path), "its tokenizer")):
        list(try_chat(configuration(tmp_path), []))


def test_model_that_is_not_here_is_not_tried(tmp_path: Path) -> None:
    assert list(try_chat(configuration(tmp_path), [([SYSTEM], None)])) == []


@pytest.mark.parametrize("key", ["llm.tool_parser", "test_llm.reasoning_parser"])
@pytest.mark.parametrize(
    ("value", "said"), [("no_such", "vLLM has"), ("needs_a_token", "cannot find its token"), ("known", "")]
)
def test_parsers_are_made_with_the_model_s_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, said: str
) -> None:
    """With stand-ins for vLLM's two registries, whose import takes seconds."""

    def make(name: str, tokenizer: Any, _: object) -> None:
        if name == "no_such":
            raise DomainError(f"`{key}` is {name}: vLLM has others")
        if name == "needs_a_token" and "<tool>" not in tokenizer.get_vocab():
            raise RuntimeError("cannot find its token")

    monkeypatch.setattr("pipelinerl.chat.reading.vllm_reader", make)
    monkeypatch.setattr("pipelinerl.chat.reading.thought_splitter", make)
    cfg = configuration(save_tokenizer(tmp_path, byte_tokenizer()), f"{key}={value}")
    refusal = refusal_of_parsers(cfg)
    assert refusal is None if not said else refusal and re.search(says(f"`{key}`", value, said), refusal)


def test_hermes_and_rl_tool_need_no_trial(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, byte_tokenizer())
    assert parsers_of(configuration(folder)) == []
    assert parsers_of(configuration(folder, "llm.tool_parser=rl_tool")) == []
    assert ("llm.reasoning_parser", "rl_tool") in parsers_of(configuration(folder, "llm.reasoning_parser=rl_tool"))
    assert parsers_of(configuration(folder, "llm.tool_parser=pythonic")) == [
        ("llm.tool_parser", "pythonic"),
        ("test_llm.tool_parser", "pythonic"),
    ]
    assert parsers_of(configuration(tmp_path / "elsewhere", "llm.tool_parser=pythonic")) == []
