r"""Refuses answers that name several values or leave a computation undone, if the reference is a single value.

If math-verify cannot parse a text, it takes the last number in it. Of an equation it compares the last side. So it
accepts ``1 \lor 2 \lor 42``, ``41 \to 42`` and ``41 = 42`` for 42, and also ``\gcd(84,126)``, which is not computed. A
policy that is rewarded for such texts learns to list candidates or to copy the problem. The rules here look only at the
LaTeX text, or ask math-verify whether two sides are equal. They never accept an answer that math-verify rejects.
"""

import re
from collections.abc import Callable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARITHMETIC = _words(
    """
    frac dfrac tfrac cfrac sqrt cdot times div pi ln log lg exp sin cos tan cot sec csc arcsin arccos arctan
    sinh cosh tanh binom dbinom tbinom choose infty left right big Big bigg Bigg bigl bigr Bigl Bigr lvert
    rvert vert degree circ deg text textbf textit textrm textnormal mathrm mathbf mathit mathsf mbox hbox rm
    bf it displaystyle textstyle boxed fbox color textcolor underline phantom hspace quad qquad thinspace
    enspace space cents dollar percent euro pounds approx imath emptyset e i ldotp overline bar dot lbrace
    rbrace
    """
)
"""Commands that a computed value may contain: arithmetic, elementary functions, constants, units, formatting."""
UNEVALUATED = _words(
    """
    sum prod int iint iiint oint lim limsup liminf gcd lcm max min sup inf det dim arg mod bmod pmod pod
    lfloor rfloor lceil rceil floor ceil phi varphi bigcup bigcap coprod partial nabla
    """
)
"""Commands for computations that remain to be done."""
CONNECTIVES = _words(
    """
    lor vee land wedge lnot neg to rightarrow longrightarrow Rightarrow Longrightarrow implies impliedby
    leftarrow gets Leftarrow iff Leftrightarrow leftrightarrow mapsto longmapsto cup cap setminus sqcup sqcap
    oplus otimes sim simeq cong propto in notin ni subset subseteq supset supseteq le leq leqslant ge geq
    geqslant lt gt ne neq pm mp colon parallel perp models vdash therefore because ldots cdots dots dotsc
    dotsb vdots bigvee bigwedge nmid uplus ast star bullet diamond triangle searrow nearrow hookrightarrow
    rightsquigarrow leadsto xrightarrow asymp doteq mid
    """
)
"""Commands that join several values or make a statement about them."""
SAME = re.compile(r"\\(?:approx|equiv|doteq)(?![A-Za-z])|(?<![<>!:\\])=")
COMMAND = re.compile(r"\\([A-Za-z]+)")
NAMED_OPERATOR = re.compile(
    r"\\(?:operatorname|operatorname\*|mathrm|text|mathop)\s*\{\s*\\?([A-Za-z]+)\s*\}\s*(?=[({\[\\_])"
)
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox|hbox)\s*\{([^{}]*)\}")
JOINING_WORDS = re.compile(
    r"(?<![A-Za-z])(?:or|and|not|either|neither|nor|maybe|perhaps|possibly|xor)(?![A-Za-z])", re.I
)
STATEMENT = re.compile(r"[<>|&~:;?#@`\"]|\\\\|[A-Za-z]{2,}[^A-Za-z0-9]*[0-9]|[0-9]\s+[0-9]")
"""Relations, separators, line breaks, and words or gaps between numbers. For texts without commands and ``\\text``."""
UNIT = re.compile(
    r"(?:\\(?:text|textrm|mathrm|mbox|hbox)\s*\{(?P<wrapped>[^{}]*)\}|(?<=[0-9}\s])(?P<bare>[A-Za-z]+(?:\s*/\s*[A-Za-z]+)?))"
    r"\s*(?:\^\s*\{?(?P<power>[23])\}?)?\s*[.$]*\s*$"
)
_UNITS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram gramme",
    "kg": "kilogram kilo", "lb": "pound lbs", "oz": "ounce", "ml": "milliliter millilitre", "l": "liter litre",
    "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "week": "", "month": "", "year": "yr",
    "cent": "", "dollar": "usd", "euro": "eur", "degree": "deg", "radian": "rad", "percent": "",
    "hz": "hertz", "j": "joule", "w": "watt", "n": "newton", "pa": "pascal", "v": "volt",
}  # fmt: skip
UNITS = {name: unit for unit, others in _UNITS.items() for name in (unit, *others.split())}


def objection(answer: str, reference: str, equal: Callable[[str, str], bool], *, operators: bool = False) -> str | None:
    r"""Returns why an answer cannot be one computed value. None if no rule objects.

    Args:
        answer: the LaTeX inside the answer's box.
        reference: the reference answer, a number or an expression, without a LaTeX environment.
        equal: whether math-verify finds two LaTeX texts equal.
        operators: accept operators that were not evaluated, such as ``\gcd`` and ``\sum``.
    """
    answer, reference = _operators_as_commands(answer), _operators_as_commands(reference)
    used, known = set(COMMAND.findall(answer)), set(COMMAND.findall(reference))
    if joining := used & (CONNECTIVES - known):
        return f"several values or a statement: \\{min(joining)}"
    if JOINING_WORDS.search(answer) and not JOINING_WORDS.search(reference):
        return "several values: a joining word"
    if not operators and (undone := used & (UNEVALUATED - known)):
        return f"an operator that was not evaluated: \\{min(undone)}"
    return _unit_objection(answer, reference) or _chain_objection(answer, reference, equal)


def number_objection(answer: str, reference: str) -> str | None:
    """Returns why an answer cannot be a number, or None.

    The rules object to commands outside arithmetic, to relations, and to digits in a text next to the number.
    """
    allowed = ARITHMETIC | UNEVALUATED | CONNECTIVES | set(COMMAND.findall(reference)) | {"equiv", "doteq"}
    value = _sides(_operators_as_commands(answer))[-1]
    if unknown := set(COMMAND.findall(value)) - allowed:
        return f"not a number: \\{min(unknown)}"
    if STATEMENT.search(_plain(answer)):
        return "several values or a statement"
    if any(re.search(r"[0-9]", text) for text in TEXT.findall(value)) and re.search(r"[0-9]", TEXT.sub("", value)):
        return "several values: the text has digits besides the number"
    return None


def _operators_as_commands(text: str) -> str:
    r"""``\operatorname{lcm}(6,7)`` → ``\lcm (6,7)``."""
    return NAMED_OPERATOR.sub(lambda match: f"\\{match[1]} " if match[1] in UNEVALUATED else match[0], text)


def _plain(text: str) -> str:
    """Strips commands, texts, a pair of absolute-value bars, thin spaces, and names before an equals sign."""
    text = re.sub(r"(?<!\\)\\[:;|,!&%$# ]", "", TEXT.sub(" ", _sides(text)[-1]))
    text = re.sub(r"\\[lr]?vert(?![A-Za-z])", "|", text)
    text = text.replace("|", "") if text.count("|") == 2 else text
    return re.sub(r"(?<!\\)\\[A-Za-z]+", ".", text)


def _sides(text: str) -> list[str]:
    """Splits a text at the equals signs that are outside all brackets."""
    sides, depth, start = [], 0, 0
    for match in re.finditer(rf"[({{\[]|[)}}\]]|{SAME.pattern}", text):
        depth += (match[0] in "({[") - (match[0] in ")}]")
        if depth == 0 and match[0] not in "(){}[]":
            sides.append(text[start : match.start()].strip())
            start = match.end()
    return [*sides, text[start:].strip()]


def _chain_objection(answer: str, reference: str, equal: Callable[[str, str], bool]) -> str | None:
    """Objects if a side of ``a = b = c`` neither names the value (``x``, ``f(41)``, ``a+b``) nor equals the last."""
    *others, value = _sides(answer)
    for part in others:
        if _is_name(part, reference) or (part and equal(part, value)):
            continue
        return f"two values in one equation: {part[:40]} and {value[:40]}"
    return None


def _is_name(part: str, reference: str) -> bool:
    """Whether a side only names the value: a plain name, or an expression with letters, none of them the reference's.

    Letters of commands do not count.
    """
    letters, known = _letters(part), _letters(reference)
    return bool(letters) and (
        re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\([^()]*\))?", part) is not None or not letters & known
    )


def _letters(text: str) -> set[str]:
    greek = {name for name in COMMAND.findall(text) if name not in ARITHMETIC | UNEVALUATED | CONNECTIVES}
    return greek | set(re.findall(r"[A-Za-z]", COMMAND.sub(" ", TEXT.sub(" ", text))))


def _unit_objection(answer: str, reference: str) -> str | None:
    left, right = unit_of(answer), unit_of(reference)
    return f"another unit: {left} for {right}" if left and right and left != right else None


def unit_of(text: str) -> str | None:
    r"""Returns the unit at the end of a text in a uniform spelling: ``m^2`` for ``5\text{ square meters}``."""
    text = text.strip().removesuffix("}").strip() if text.startswith("\\boxed") else text.strip()
    if re.search(r"\\%$", text):
        return "percent"
    if re.search(r"(?:\\degree|\^\s*\{?\s*\\circ\s*\}?)$", text):
        return "degree"
    if re.match(r"-?\\\$", text):
        return "dollar"
    match = UNIT.search(text)
    if match is None:
        return None
    words = (match["wrapped"] or match["bare"] or "").strip().rstrip(".")
    power = match["power"]
    for prefix, exponent in (("square", "2"), ("sq", "2"), ("cubic", "3"), ("cu", "3")):
        if re.match(rf"{prefix}\.?\s+", words):
            words, power = re.sub(rf"^{prefix}\.?\s+", "", words), exponent
    parts = [_spelling(part) for part in re.split(r"\s*/\s*|\s+per\s+", words)]
    if not all(parts):
        return None
    return "/".join(map(str, parts)) + (f"^{power}" if power else "")


def _spelling(word: str) -> str | None:
    """Returns the unit that a word means. Case matters for one or two letters. Longer words may be in the plural."""
    word = word.strip()
    lower = word.lower() if len(word) > 2 else word
    return UNITS.get(lower) or (UNITS.get(lower.removesuffix("s")) if len(lower) > 3 else None)
