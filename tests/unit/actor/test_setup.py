"""The chat template that `llm.chat_template` names."""

from pathlib import Path

import pytest

from pipelinerl.actor.setup import chosen_template
from pipelinerl.errors import ConfigError
from tests.says import says


def test_template_is_a_file_or_one_of_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert chosen_template(str(tmp_path / "own.jinja"), "theirs") == "{{ messages }}"
    assert chosen_template("rag", {"default": "a", "rag": "b"}) == "b"


@pytest.mark.parametrize(("known", "named"), [(None, "not named"), ({"default": "a"}, "default")])
def test_template_that_is_neither_is_refused(known: dict | None, named: str) -> None:
    with pytest.raises(ConfigError, match=says("llm.chat_template", "missing.jinja", named)):
        chosen_template("missing.jinja", known)
