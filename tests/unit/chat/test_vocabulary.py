"""A teacher with another tokenizer is refused, with the first token in which it differs."""

from pathlib import Path

import pytest

from pipelinerl.chat.vocabulary import check_same_vocabulary, vocabulary_difference
from pipelinerl.errors import ConfigError
from pipelinerl.testing import byte_tokenizer
from tests.says import says

POLICY = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (POLICY, None),
        (POLICY | {"more": 3}, None),
        ({"a": 0, "c": 1, "b": 2}, "id 1 is 'c' and not 'b' (2 of 3 tokens differ)"),
        ({"a": 0, "b": 1}, "id 2 is no token and not 'c' (1 of 3 tokens differ)"),
    ],
)
def test_difference_is_the_first_id_with_another_meaning(other: dict[str, int], difference: str | None) -> None:
    assert vocabulary_difference(POLICY, other) == difference


def test_model_with_another_tokenizer_is_refused_with_the_reason(tmp_path: Path) -> None:
    for name in ("policy", "other"):
        tokenizer = byte_tokenizer()
        if name == "other":
            tokenizer.add_tokens(["<first>"])
        if name == "policy":
            tokenizer.add_tokens(["<mine>"])
        tokenizer.save_pretrained(tmp_path / name)
    policy = str(tmp_path / "policy")
    check_same_vocabulary(policy, [policy])
    with pytest.raises(ConfigError, match=says("other", "another tokenizer", "first", "mine", "teachers")):
        check_same_vocabulary(policy, [str(tmp_path / "other")])
