"""The chat template that `llm.chat_template` names, and the family that `llm.renderer` does."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import AddedToken

from pipelinerl.actor.setup import make_llm
from pipelinerl.chat import renderer_of
from pipelinerl.chat.families import family_renderer
from pipelinerl.chat.rendering import chosen_template
from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError
from pipelinerl.testing import byte_tokenizer
from tests.says import says

QWEN3 = "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <tool_response> </tool_response> </think>"


def test_template_is_a_file_or_one_of_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert chosen_template(str(tmp_path / "own.jinja"), "theirs") == "{{ messages }}"
    assert chosen_template("rag", {"default": "a", "rag": "b"}) == "b"


@pytest.mark.parametrize(("known", "named"), [(None, "not named"), ({"default": "a"}, "default")])
def test_template_that_is_neither_is_refused(known: dict | None, named: str) -> None:
    with pytest.raises(ConfigError, match=says("llm.chat_template", "missing.jinja", named)):
        chosen_template("missing.jinja", known)


def test_family_that_renders_is_the_models_and_must_fit_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.llm._TOKENIZERS", {})
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in QWEN3.split()])
    tokenizer.save_pretrained(tmp_path)
    settings = [f"model_path={tmp_path}", f"output_dir={tmp_path}"]
    cfg = parse(compose("base_cpu", [*settings, "llm.renderer=qwen3", "test_llm.renderer=kimi-k2"]))
    made = Mock(side_effect=family_renderer)
    monkeypatch.setattr("pipelinerl.chat.families.family_renderer", made)
    llm = make_llm(cfg, cfg.llm)
    renderer = renderer_of(llm.tokenizer, llm.renderer)
    assert renderer.render([{"role": "user", "content": "hi"}], None, llm.chat_template_kwargs).text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert made.call_count == 1
    with pytest.raises(ConfigError, match=says("llm.renderer", "kimi-k2", "<|im_user|>")):
        make_llm(cfg, cfg.test_llm)
