r"""Splits an answer in LaTeX into tokens, and unifies spellings."""

import re
import unicodedata
from dataclasses import dataclass, field
from fractions import Fraction

from pipelinerl.domains.math.answers import forms
from pipelinerl.domains.math.answers.trees import NotParsedError, Num


@dataclass(frozen=True)
class Token:
    kind: str
    """``num``, ``cmd``, ``letter``, ``text``, ``sym``, or ``end`` behind the last token."""
    text: str
    gap: bool = False
    """Whether a space precedes the token."""
    number: Num | None = field(default=None, compare=False)

    @property
    def word(self) -> str:
        """The words of a text in small letters. Empty for other tokens."""
        return self.text.strip(" ,.").lower() if self.kind == "text" else ""


END = Token("end", "the end")

DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
PRIMES = re.compile(r"\^\s*(?:\\prime(?![A-Za-z])|\{(?:\s*\\prime)+\s*\})")
MODULUS = re.compile(r"\(\s*\\[bp]?mod\s*\{?(\w+)\}?\s*\)|\\text\s*\{\s*\(mod (\w+)\)\s*\}")
WITHOUT_MEANING = re.compile(
    rf"\\(?:left|right)\s*\.|\\(?:{'|'.join(sorted(forms.NO_MEANING))})(?![A-Za-z])"
    r"|\\(?:text)?color\s*\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\!"
    r"|(?<=\\\\)\s*\[[\d.]+\s*[a-z]+\]|(?<!\\)\\[()\[\]]|(?<!\\)\$"
    r"|\\(?:begin|end)\{(?:aligned|gathered|split)\}|&\s*(?==)"
)
SPACE = re.compile(r"(?<!\\)\\(?:[,;: >]|(?:quad|qquad|thinspace|enspace|space)(?![A-Za-z]))|\\hspace\s*\{[^{}]*\}|~")
TEXT = re.compile(r"\\(?:text|textrm|textnormal|textbf|textit|mathrm|rm|mbox|hbox)\s*(?=\{)")
REPEATING = re.compile(
    r"(?P<whole>\d*)\.(?P<part>\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(?P<over>\d+)\}|(?P<digit>\d))(?:(?P<inner>\d*)\\dot"
    r"\s*\{?(?P<last>\d)\}?)?|\((?P<brackets>\d+)\)|\s*(?P<dots>\.\.\.|\\(?:ldots|dots|cdots)(?![A-Za-z])))"
)
"""Repeating decimals: ``0.\\overline{3}``, ``0.1\\dot{4}2\\dot{7}``, ``0.(36)``, ``0.3636...``."""
NUMBER = re.compile(
    r"(?P<grouped>(?<![\d.])\d{1,3}(?:(?:\{,\}\d{3})+|(?:,\d{3})+|(?: \d{3})+)(?![\d])(?:\.\d+)?)"
    r"|(?P<plain>\d+\.\d+|\d+|\.\d+)(?:[eE](?P<exponent>[+-]?\d{1,4})(?![\d.]))?"
)
BRACE = re.compile(r"\\.|[{}]", re.S)
"""A brace, or a backslash with what it escapes."""
COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.S)
NAMED_FUNCTION = re.compile(r"\\operatorname\s*\{\s*([a-z]+)\s*\}")
RATIO = re.compile(r"\s*(\d+)\s+(to|in|out of)\s+(\d+)\s*")
NUMBER_AND_WORDS = re.compile(r"\s*([\d.,]*\d(?::\d\d)?)(\s*[APap]\.?[Mm]\.?\s*|\s+[A-Za-z][A-Za-z ]*)")


def tokenize(text: str) -> list[Token]:
    text = re.sub(r"(?<![\d.])\.\.\.", r"\\ldots ", _plain_characters(text))
    text = SPACE.sub(" ", WITHOUT_MEANING.sub(lambda m: "-" if "minus" in m[0] else " ", text)).strip()
    text = re.sub(r"\{([-+:=<>])\}", r"\1", text)
    text = re.sub(r"\\operatorname\*", r"\\operatorname", re.sub(r"(?<=\w|\}|\))\.$", "", text))
    tokens: list[Token] = []
    position, depth, gap = 0, 0, False
    while position < len(text):
        if text[position].isspace():
            position, gap = position + 1, True
            continue
        is_argument = bool(tokens) and tokens[-1].text in forms.TAKES_ARGUMENT
        found, position = _next_tokens(text, position, depth, gap, is_argument)
        tokens += found
        depth += sum(
            (token.text in forms.OPENING) - (token.text in forms.CLOSING)
            for token in found
            if token.text not in ("{", "}")
        )
        gap = not found
    return tokens


def _plain_characters(text: str) -> str:
    """Replaces Unicode's mathematical characters by LaTeX."""
    for mark, characters in forms.SCRIPTS.items():
        digits = str.maketrans(characters, "0123456789+-"[: len(characters)])
        text = re.sub(f"[{characters}]+", lambda run: f"{mark}{{{run[0].translate(digits)}}}", text)  # noqa: B023 — used at once
    text = re.sub(
        f"[{forms.VULGAR}]", lambda one: f"\\frac{{{unicodedata.normalize('NFKC', one[0]).replace('⁄', '}{')}}}", text
    )
    text = re.sub(r"\^\{?(\d+)\}?\s*/\s*_\{?(\d+)\}?", r"\\frac{\1}{\2}", text.translate(forms.UNICODE))
    text = re.sub(r",\s*\\!\s*(?=\d{3}(?!\d))", "{,}", MODULUS.sub(r"\\pmod{\1\2}", DEGREE.sub("°", text)))
    text = PRIMES.sub(lambda primes: "'" * primes[0].count("prime"), text)
    return text.replace("<=", r"\le ").replace(">=", r"\ge ")


def _next_tokens(text: str, position: int, depth: int, gap: bool, is_argument: bool) -> tuple[list[Token], int]:
    """The tokens that begin at a position, and the position behind them."""
    if wrapped := TEXT.match(text, position):
        end = closing_brace(text, wrapped.end())
        content, behind = text[wrapped.end() + 1 : end], text[end + 1 :].strip()
        if behind and (sign := re.fullmatch(r"(.*?)\b(?:minus|negative)\s*", content, re.I | re.S)):
            return [*_tokens_of_words(sign[1], gap), Token("sym", "-", gap)], end + 1
        return _tokens_of_words(content, gap), end + 1
    if (match := REPEATING.match(text, position)) and (number := _repeating(match)) is not None:
        return [Token("num", match[0], gap, number)], match.end()
    if match := NUMBER.match(text, position):
        is_list = depth > 0 and match["grouped"] and "," in match["grouped"] and "{" not in match["grouped"]
        if is_list or (is_argument and " " in match[0]):
            match = re.compile(r"(?P<grouped>)(?P<exponent>)(?P<plain>\d+)").match(text, position) or match
        return [Token("num", match[0], gap, _number(match))], match.end()
    if (match := NAMED_FUNCTION.match(text, position)) and forms.OTHER_NAMES.get(match[1], match[1]) in forms.FUNCTIONS:
        return [Token("cmd", forms.OTHER_NAMES.get(match[1], match[1]), gap)], match.end()
    if match := COMMAND.match(text, position):
        if match[1] in forms.SYMBOLS:
            return [Token("sym", forms.SYMBOLS[match[1]], gap)], match.end()
        return [Token("cmd", forms.OTHER_NAMES.get(match[1], match[1]), gap)], match.end()
    if match := re.compile("[A-Za-z]+").match(text, position):
        if match[0] in ("or", "and") and (gap or position == 0):
            return [Token("text", match[0], gap)], match.end()
        if match[0] in forms.PLAIN_WORDS:
            return [Token("cmd", match[0], gap)], match.end()
        return [Token("letter", letter, gap and i == 0) for i, letter in enumerate(match[0])], match.end()
    return [Token("sym", text[position], gap)], position + 1


def _tokens_of_words(content: str, gap: bool) -> list[Token]:
    """Returns the tokens inside ``\\text{}``."""
    if re.search(r"\d", content) and not re.search(r"[A-Za-z]", COMMAND.sub("", content)):
        return tokenize(content)
    content = SPACE.sub(" ", content).replace("\\$", "$").replace("\\%", "%")
    word = content.strip()
    if ratio := RATIO.fullmatch(content):
        return [*tokenize(ratio[1]), Token("text", ratio[2]), *tokenize(ratio[3])]
    if counted := NUMBER_AND_WORDS.fullmatch(content):
        return [*tokenize(counted[1]), Token("text", counted[2])]
    if forms.CHOICES.fullmatch(content):
        return tokenize(content.replace("&", " and "))
    if word in ("$", "%") or word.removeprefix("\\") in forms.CURRENCY:
        return [Token("sym", word.removeprefix("\\"), gap)]
    return [Token("text", content, gap)] if word else []


def closing_brace(text: str, opening: int) -> int:
    """The position of the brace that closes the one at a position."""
    depth = 0
    for brace in BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    raise NotParsedError("a brace is not closed")


def _repeating(match: re.Match[str]) -> Num | None:
    """The value of a repeating decimal. None if the digits before dots show no period."""
    whole, part = match["whole"] or "0", match["part"]
    period = match["brackets"] or (match["over"] or match["digit"] or "") + (match["inner"] or "") + (
        match["last"] or ""
    )
    if match["dots"]:
        shown = re.search(r"(\d+?)\1{2,}$|(\d{2,}?)\2$", part)
        if shown is None:
            return None
        period = shown[1] or shown[2]
    scale = 10 ** len(part)
    value = Fraction(int(whole + part), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return Num(value, len(part), repeating=True)


def _number(match: re.Match[str]) -> Num:
    text = re.sub(r"[ ,{}]", "", match["grouped"] or match["plain"])
    decimals = len(text.partition(".")[2]) if "." in text else None
    value = Fraction(text if text[0] != "." else "0" + text)
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    return Num(value, decimals, len(text.replace(".", "").lstrip("0")))


def without_braces(tokens: list[Token]) -> list[Token]:
    """Drops braces around all tokens, which are left of a command without meaning, and brackets around equations."""
    if any(token.text in ("choose", "over") for token in tokens):
        return tokens  # they split the group that they are in
    depth = 0
    inside = set()
    for at, token in enumerate(tokens):
        depth += (token.text in forms.OPENING) - (token.text in forms.CLOSING)
        if depth == 1:
            inside.add(token.text)
        if depth == 0:
            drop = tokens[0].text == "{" or (
                tokens[0].text in forms.OPENING and "=" in inside and not inside & {":", "mid", "|"}
            )
            return without_braces(tokens[1:-1]) if drop and 0 < at == len(tokens) - 1 else tokens
    return tokens
