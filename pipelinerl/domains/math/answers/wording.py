"""Answers that are words or letters: compared as such, without markup."""

import re
from dataclasses import dataclass

from pipelinerl.domains.math.answers.forms import CHOICE, OTHER_WORDS
from pipelinerl.domains.math.answers.tokens import Token, tokenize, without_braces
from pipelinerl.domains.math.answers.trees import NotParsedError

WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|hbox)\s*(?=\{)|[${}]|\\[,;: ]|~")


@dataclass(frozen=True)
class Choice:
    """A letter of a multiple choice, and whether its text follows: ``(B) 42``."""

    letter: str
    has_text: bool


def choices(text: str) -> frozenset[str]:
    """The letters of an answer that chooses several: ``AC``, ``A, C``, ``A and C``. Empty for any other answer."""
    tokens = _tokens_of(text)
    letters = [token.text.strip() for token in tokens if token.text not in (",", ";") and token.text.strip() != "and"]
    known = all(CHOICE.fullmatch(letter) and len(letter) == 1 for letter in letters)
    return frozenset(letters) if known and len(set(letters)) == len(letters) > 1 else frozenset()


def _tokens_of(text: str) -> list[Token]:
    try:
        return without_braces(tokenize(text))
    except NotParsedError:
        return []


def choice(text: str) -> Choice | None:
    """The one letter that an answer chooses. None for an answer that is no choice, or names several."""
    if not (tokens := _tokens_of(text)):
        return None
    texts = [token.text for token in tokens]
    if tokens[0].kind == "text" and (label := CHOICE.fullmatch(texts[0])):
        letter, is_label, rest = label["letter"], bool(label["word"] or label["mark"]), tokens[1:]
    elif texts[:1] == ["("] and texts[2:3] == [")"] and CHOICE.fullmatch(texts[1]):
        letter, is_label, rest = texts[1], True, tokens[3:]
    elif tokens[0].kind == "letter" and CHOICE.fullmatch(texts[0]):
        letter, is_label, rest = texts[0], texts[1:2] == [")"], tokens[2:] if texts[1:2] == [")"] else tokens[1:]
    else:
        return None
    if not rest:
        return Choice(letter, has_text=False)
    names_more = any(CHOICE.fullmatch(t.text) or t.text.strip() in (",", ";", "or", "and", "not") for t in rest)
    follows = rest[0].gap or rest[0].kind in ("num", "text")
    return Choice(letter, has_text=True) if is_label and follows and not names_more else None


def words_of(text: str) -> str | None:
    """Returns the words of a text without markup, in small letters. A single letter, such as a choice, stays as it is.

    None for a text that is more than words.
    """
    bare = re.sub(r"\s+", " ", WRAPPER.sub(" ", text)).strip(" .")
    if re.fullmatch(r"\( ?[A-Za-z' -]+ ?\)", bare):
        bare = bare[1:-1].strip()
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9' :-]*", bare) or re.search(r"[\^_]", text):
        return None
    if len(bare) == 1 or re.search(r"(?<![A-Za-z])[B-HJ-Zb-hj-z](?![A-Za-z])", bare):
        return bare
    bare = re.sub(r"^(?:an?|the) (?!(?:and|or) )", "", bare.lower())
    bare = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", OTHER_WORDS.get(bare, bare))
    return " ".join(word[:-1] if len(word) > 3 and word.endswith("s") else word for word in bare.split())
