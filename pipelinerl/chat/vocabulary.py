"""Compares vocabularies: a teacher scores the policy's token ids, so an id must stand for the same token in both."""

from collections.abc import Iterable, Mapping

from pipelinerl.errors import ConfigError


def check_same_vocabulary(policy: str, others: Iterable[str], *, trust_remote_code: bool = False) -> None:
    """Refuses models in which a token id of the policy stands for another token, or for none.

    Args:
        policy, others: folders or Hugging Face names. The others score the policy's tokens.
    Raises:
        ConfigError: names the first token that differs.
    """
    wanted = sorted(set(others) - {policy})
    if not wanted:
        return
    from transformers import AutoTokenizer

    def vocabulary(model: str) -> dict[str, int]:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code).get_vocab()

    own = vocabulary(policy)
    for model in wanted:
        if difference := vocabulary_difference(own, vocabulary(model)):
            raise ConfigError(
                f"{model} cannot score the tokens of {policy}: it has another tokenizer, in which {difference}; "
                "take a teacher or reference (`teachers`, `reference_model_path`) of the policy's family"
            )


def vocabulary_difference(policy: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Returns a text with the first differing token and the number of differing tokens. None: there is none."""
    texts = {number: text for text, number in other.items()}
    wrong = sorted((number, text) for text, number in policy.items() if texts.get(number) != text)
    if not wrong:
        return None
    number, text = wrong[0]
    meant = repr(texts[number]) if number in texts else "no token"
    return f"id {number} is {meant} and not {text!r} ({len(wrong)} of {len(policy)} tokens differ)"
