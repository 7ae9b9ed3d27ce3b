r"""Parses an answer in LaTeX into a tree. What the grammar does not cover raises ``NotParsedError``.

    answer   = item { ("," | ";" | "or" | "and") item }
    item     = [label] side { relation side }
    side     = sum { ("\cup" | "\cap" | "\setminus") sum }  |  sum { ":" sum }
    sum      = term { ("+" | "-" | "\pm" | "\mp" | nothing between two measures) term } [ "\pmod" atom ]
    term     = factor { ["\cdot" | "\times" | "*" | "/" | "\div"] factor }
    factor   = atom { "^" atom | "_" atom | "!" | "%" | "^\circ" }

An operator that stands for a computation (``\gcd``, ``\int``, ``\frac{d}{dx}``) becomes a symbol that is named by its
source: it equals itself and nothing else. Text inside a term is a ``UnitWords``.
"""

import re
from fractions import Fraction

from pipelinerl.domains.math.answers import forms, units
from pipelinerl.domains.math.answers.tokens import END, Token, tokenize, without_braces
from pipelinerl.domains.math.answers.trees import (
    MINUS_ONE,
    REAL_LINE,
    Based,
    Brackets,
    Builder,
    Cases,
    Chain,
    Clock,
    FiniteSet,
    Join,
    Matrix,
    NotParsedError,
    Num,
    Op,
    Ratio,
    Statement,
    Sym,
    Tree,
    UnitWords,
)  # fmt: skip

MAX_DEPTH = 60
"""Nested brackets. Each takes some ten calls, and the interpreter allows 1,000."""


def parse(text: str, *, bare_units: bool = True) -> Statement:
    """Parses a whole answer, LaTeX without its environment.

    ``bare_units``: letters behind a number and a space are a unit (``5 cm``), not a product.
    """
    tokens, parameter = _without_quantifier(without_braces(tokenize(text)))
    if (known := _known_words(_words_of(tokens))) is not None:
        return Statement((Chain((known,)),))
    reader = Parser(tokens, bare_units)
    answer = reader.answer(frozenset())
    if reader.next != END:
        raise NotParsedError(f"{reader.next.text!r} is not expected")
    return _family(answer if parameter is None else Statement((*answer.items, parameter), answer.separator or ","))


def _without_quantifier(tokens: list[Token]) -> tuple[list[Token], Chain | None]:
    """Takes a quantifier at the end of an answer. ``x \\in \\mathbb{R}`` is dropped."""
    for at in range(max(1, len(tokens) - forms.QUANTIFIER_TOKENS), len(tokens)):
        match = forms.QUANTIFIER.fullmatch(" ".join(" ".join(token.text for token in tokens[at:]).split()).strip(" ,."))
        if match is None:
            continue
        speaks = match["clause"] and (match["all"] or match["kind"] or match["taken"])
        if not speaks and not (match["integer"] and (match["clause"] or tokens[at - 1].text == ",")):
            continue
        at -= tokens[at - 1].text == ","
        domain = match["set"] or ("Z" if match["kind"] == "integer" or match["integer"] else "R")
        return tokens[:at], None if domain == "R" else Chain((Sym(match["name"]), Sym(f"mathbb {domain}")), ("in",))
    return tokens, None


def _family(answer: Statement) -> Statement:
    """Writes a set of expressions and a class of residues as ``7k + 3, k \\in \\mathbb{Z}``."""
    chain = answer.items[0]
    last = chain.sides[-1]
    if len(answer.items) > 1 or not set(chain.relations) <= {"=", "in"}:
        return answer
    if isinstance(last, Op) and last.name == "mod":
        value, modulus = last.args
        last = Builder(
            Op("+", (value, Op("*", (modulus, Sym("integer"))))),
            Statement((Chain((Sym("integer"), Sym("mathbb Z")), ("in",)),)),
        )
    if not isinstance(last, Builder) or last.domain is not None:
        return answer
    conditions = last.condition.items
    if isinstance(last.element, Sym):
        is_given = conditions[0].relations == ("=",) and conditions[0].sides[0] == last.element
        return last.condition if is_given else answer
    relations = tuple("=" for _ in chain.relations)
    return Statement((Chain((*chain.sides[:-1], last.element), relations, chain.labels), *conditions), ",")


def _words_of(tokens: list[Token]) -> str:
    """Returns an answer that only consists of words, in small letters, else an empty text."""
    if not all(token.kind in ("text", "letter") or token.text == "-" for token in tokens):
        return ""
    joined = "".join(" " * (token.gap or token.kind == "text") + token.text for token in tokens)
    return " ".join(joined.replace("-", " ").lower().split()).strip(" .")


def _known_words(words: str) -> Tree | None:
    """Returns the number or set that words name. None: they name none."""
    if words in forms.NAMED_SETS:
        return forms.NAMED_SETS[words]
    total, group = 0, 0
    last = 10**9
    for word in words.split():
        if (size := forms.SCALES.get(word, 0)) and group:
            total, group = (total, group * size) if size <= 100 else (total + group * size, 0)
            last = size
            continue
        value = forms.NUMBERS.get(word)
        if value is None or (group and not (last >= 100 or (20 <= last < 100 and 0 < value < 10))):
            return None
        group, last = group + value, value
    return Num(Fraction(total + group)) if words else None


class Parser:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[Token], bare_units: bool):
        self._tokens = tokens
        self._position = 0
        self._bare_units = bare_units
        self._depth = 0

    @property
    def next(self) -> Token:
        return self.token(self._position)

    def peek(self, ahead: int) -> Token:
        return self.token(self._position + ahead)

    def token(self, at: int) -> Token:
        return self._tokens[at] if 0 <= at < len(self._tokens) else END

    def sees(self, *texts: str) -> bool:
        return self.next.kind in ("sym", "cmd") and self.next.text in texts

    def accept(self, *texts: str) -> str | None:
        if not self.sees(*texts):
            return None
        self._position += 1
        return self._tokens[self._position - 1].text

    def expect(self, *texts: str) -> str:
        found = self.accept(*texts)
        if found is None:
            raise NotParsedError(f"{self.next.text!r} where {texts[0]!r} is expected")
        return found

    def source(self, start: int) -> str:
        return " ".join(token.text.strip() for token in self._tokens[start : self._position])

    # --- answer = item { separator item }

    def answer(self, ends: frozenset[str]) -> Statement:
        items, separator = [self.item(ends)], ""
        while (found := self.separator()) is not None:
            if found == "," and (self.next == END or (self.sees("\\", "end") and "end" in ends)):
                break
            separator = found if separator in ("", ",") else separator
            items.append(self.item(ends))
        return Statement(tuple(items), separator)

    def separator(self) -> str | None:
        found = None
        while True:
            token, word = self.next, self.next.word
            if token.kind == "sym" and token.text in (",", ";"):
                found = found or ","
            elif word in ("or", "and") or (token.kind == "text" and not word and "," in token.text):
                found = word or found or ","
            elif token.kind == "cmd" and token.text in forms.CONNECTIVES:
                found = forms.CONNECTIVES[token.text]
            else:
                return found
            self._position += 1

    # --- item = [label] side { relation side }

    def item(self, ends: frozenset[str]) -> Chain:
        self.skip_label()
        sides: list[Tree | None] = []
        relations: list[str] = []
        labels: set[int] = set()
        if self.sees("approx") or (self.sees("=") and self._position == 0):
            sides, relations, labels = [None], [forms.RELATIONS[self.expect("approx", "=")]], {0}
        while True:
            start = self._position
            name_end = self.plain_name()
            side: Tree | None = None
            try:
                side = self.side(in_set="\\}" in ends)
                if not self._at_end_of_side(ends):
                    raise NotParsedError(f"{self.next.text!r} is not expected")
            except NotParsedError:
                if name_end is None:
                    raise
                self._position, side = name_end, None
            if name_end is not None and name_end == self._position:
                labels.add(len(sides))
            assert self._position > start, "a side has tokens"
            sides.append(side)
            if (relation := self.accept(*forms.RELATIONS)) is None:
                break
            relations.append(forms.RELATIONS[relation])
            self.skip_label()
        if sides == [None]:
            raise NotParsedError("a name without a value")
        return Chain(tuple(sides), tuple(relations), frozenset(labels))

    def _at_end_of_side(self, ends: frozenset[str]) -> bool:
        token = self.next
        if token == END or self.sees(*forms.RELATIONS):
            return True
        if token.kind == "text":
            return token.word in ("or", "and", "")
        return token.text in ends or token.text in (",", ";") or token.text in forms.CONNECTIVES

    def skip_label(self) -> None:
        """Skips words in front of a value (``\\text{Area} =``, ``\\text{The answer is}``)."""
        token, following = self.next, self.peek(1)
        if token.kind != "text" or following == END or following.text == "_":
            return
        ends_in_verb = re.search(r"(?:\b(?:is|are|equals|to|by|total of)|:)[\s$]*$", token.text)
        is_figure = following.text.isupper() or following.text in forms.DECORATED
        of_name = is_figure or following.kind == "letter" or following.text in forms.GREEK
        words = re.sub(r" of\s*$", "", token.text) if of_name else token.text
        nouns = bool(ends_in_verb or is_figure or following.text in ("=", ":"))  # not `root of` x
        is_label = units.is_label(words, nouns=nouns) or forms.CHOICE.fullmatch(words)
        if not re.search("[A-Za-z]", words) or not is_label:
            return
        is_called = following.text == "(" and token.text[-1:].isalpha()
        if not is_called and following.kind != "text" and following.text not in (",", ";", "/", "^"):
            self._position += 1
            self.accept("=", ":")

    def plain_name(self) -> int | None:
        """The position behind a plain name that a relation follows: ``x``, ``AB``, ``f(41)``, ``P(X=1)``. Else None."""
        at = self._position
        while self.token(at).kind == "cmd" and self.token(at).text in forms.DECORATED:
            at += 1
        bars = at
        while self.token(at).text in ("|", "{"):
            at += 1
        bars, letters = at - bars, at
        while self.token(at).kind == "letter" or (self.token(at).kind == "cmd" and self.token(at).text in forms.GREEK):
            at += 1
        if at == letters or any(self.token(at + bar).text not in ("|", "}") for bar in range(bars)):
            return None
        if bars and self.token(letters - 1).text == "|" and at == letters + 1 and self.token(letters).text.islower():
            return None  # `|x|` is no `|AB|`
        at += bars
        while (mark := self.token(at).text) in ("_", "'"):
            at = at + 1 if mark == "'" else self._behind_argument(at + 1)
        if self.token(at).text == "(":
            at = self._behind_group(at)
        end = self.token(at)
        return at if end == END or (end.kind in ("sym", "cmd") and end.text in forms.RELATIONS) else None

    def _behind_argument(self, at: int) -> int:
        if self.token(at).text == "{":
            return self._behind_group(at)
        return min(at + 1, len(self._tokens))

    def _argument_text(self, at: int) -> tuple[str, int]:
        """The text of the argument at a position, without its braces, and the position behind it."""
        behind = self._behind_argument(at)
        return "".join(token.text.strip() for token in self._tokens[at:behind]).strip("{}"), behind

    def _behind_group(self, at: int) -> int:
        depth = 0
        while at < len(self._tokens):
            depth += (self._tokens[at].text in ("(", "{")) - (self._tokens[at].text in (")", "}"))
            at += 1
            if depth == 0:
                break
        return at

    # --- side

    def side(self, *, in_set: bool = False) -> Tree:
        left = self.sum()
        while joined := self.accept("cup", "cap", "setminus", "backslash"):
            left = Join("setminus" if joined == "backslash" else joined, (left, self.sum()))
        items = [left]
        while not in_set and (self._sees_ratio_word() or self.sees(":")):
            self._position += 1
            items.append(self.sum())
        return _clock(items) or (left if len(items) == 1 else Ratio(tuple(items)))

    def _sees_ratio_word(self) -> bool:
        """``2 to 3``, ``1 in 4``: `in` may be inches, too."""
        word = self.next.text.strip() if self.next.kind == "text" else ""
        return word == "to" or (word in ("in", "out of") and self.peek(1).kind == "num")

    def sum(self) -> Tree:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotParsedError("nested too deeply")
        total = self.signed_term()
        while (sign := self.accept("+", "-", "pm", "mp")) is not None:
            if self.sees("+", "-", "pm", "mp"):
                raise NotParsedError("two signs in a row")
            following = self.term()
            total = Op("+" if sign == "-" else sign, (total, Op("neg", (following,)) if sign == "-" else following))
        while self._measure_follows():
            total = Op("compound", (total, self.term()))
        if self.accept("pmod", "mod"):
            total = Op("mod", (total, self.argument(whole_number=True)))
        self._depth -= 1
        return total

    def signed_term(self) -> Tree:
        sign = self.accept("+", "-", "pm", "mp")
        if sign is None:
            return self.term()
        if self.sees("+", "-"):
            raise NotParsedError("two signs in a row")
        term = self.term()
        if sign == "+":
            return term
        if sign == "-":
            return Num(-term.value, term.decimals, term.digits) if isinstance(term, Num) else Op("neg", (term,))
        return Op(sign, (term,))

    def term(self) -> Tree:
        start = self._position
        product = self.factor()
        while True:
            if self.sees("bmod"):
                return self._undone(start)
            if (operator := self.accept("*", "/")) is not None:
                negative = self.accept("-") is not None
                following = self.factor()
                if negative:
                    following = Op("neg", (following,))
                product = Op(operator, (product, following))
            elif self._factor_follows():
                product = self._beside(product)
            else:
                return product

    def _factor_follows(self, ahead: int = 0) -> bool:
        token = self.peek(ahead)
        if token == END or self._measure_follows():
            return False
        if token.kind == "text":
            return token.word not in ("or", "and", "to", "") and not self._sees_ratio_word()
        if token.kind in ("num", "letter"):
            return True
        if token.kind == "sym":
            if token.text == "[":
                return self.peek(1).text == "-" or self._factor_follows(1)  # behind `]0, 1[` no factor may come
            return token.text in ("(", "{", "$", "%", "°") or (token.text == "|" and not self._in_bars)
        return token.text in (
            forms.FUNCTIONS | forms.GREEK | forms.UNDONE | forms.DECORATED | forms.CURRENCY.keys()
            | {"frac", "sqrt", "pi", "infty", "binom", "begin", "mathbb"}
        )  # fmt: skip

    def _measure_follows(self) -> bool:
        """Whether a number comes behind a unit: ``2 h 30 min``, ``7° 30'``."""
        before = self.peek(-1)
        return self.next.kind == "num" and (
            (before.kind == "text" and self._is_value(self.peek(-2))) or before.text in ("°", "'")
        )

    def _is_value(self, token: Token) -> bool:
        """Whether a unit may come behind a token."""
        return token.kind == "num" or token.text in ("}", ")", "°", "pi")

    _in_bars = False

    def _beside(self, left: Tree) -> Tree:
        """A factor directly beside another: a product, a mixed number, or nonsense (``4 2``)."""
        token, before = self.next, self.peek(-1)
        if before.kind == "num" and isinstance(left, Num) and left.value.denominator == 1 and left.decimals is None:
            start = self._position
            if token.kind == "cmd" and token.text == "frac":
                part = _fraction_of_integers(self.atom())
                if part is not None and not self.sees("^", "_", "!"):
                    return self._postfixed(Num(left.value + (part if left.value >= 0 else -part)), start)
                self._position = start
            following, last = self.peek(1), self.peek(2)
            if token.kind == "num" and following.text == "/" and last.kind == "num":
                part = _fraction_of_integers(Op("/", (token.number, last.number)))  # type: ignore[arg-type]
                if part is not None and part < 1:
                    self._position += 3
                    return self._postfixed(Num(left.value + part), start)
        if token.kind == "num" and (before.kind == "num" or _ends_in_number(left)):
            raise NotParsedError("two numbers side by side")
        return Op("*", (left, self.factor()))

    # --- factor

    def factor(self) -> Tree:
        start = self._position
        if (numeral := self._numeral_with_letters()) is not None:
            return numeral
        return self._postfixed(self.atom(), start)

    def _numeral_with_letters(self) -> Based | None:
        """``2A_{16}``, also in brackets or as a text."""
        at, digits = self._position, ""
        if self.next.kind == "text":
            digits, at = self.next.text.strip(), at + 1
        else:
            bracket = self.next.text == "("
            at += bracket
            while self.token(at).kind in ("num", "letter"):
                digits, at = digits + self.token(at).text, at + 1
            if bracket and self.token(at).text != ")":
                return None
            at += bracket
        if not re.fullmatch(r"(?=\d*[A-F])[0-9A-F]+", digits) or not (digits[0].isdigit() or len(digits) > 1):
            return None
        if self.token(at).text != "_":
            return None
        text, behind = self._argument_text(at + 1)
        base = _base(text)
        if base not in {"11", "12", "13", "14", "15", "16"}:
            return None
        self._position = behind
        return Based(digits, base)

    def _scale(self) -> int | None:
        """Takes a word such as ``million``, but not the words behind it."""
        token = self.next
        word, _, rest = token.text.strip().partition(" ")
        if token.kind != "text" or word not in forms.SCALES:
            return None
        if rest:
            self._tokens[self._position] = Token("text", rest, gap=True)
        else:
            self._position += 1
        return forms.SCALES[word]

    def _postfixed(self, base: Tree, start: int) -> Tree:
        while True:
            if self.accept("^"):
                base = self._raised(base, start)
            elif self.accept("_"):
                base = self._subscripted(base)
            elif self.accept("!"):
                base = Op("!", (base,))
            elif isinstance(base, Num) and (scale := self._scale()) is not None:
                base = Num(base.value * scale)
            elif self.accept("%"):
                base = Op("*", (base, UnitWords("%")))
            elif self.accept("°"):
                base = self._degrees(base)
            elif self.sees(*forms.CURRENCY) and self.peek(1).kind != "num" and self.peek(1).text != "(":
                base = Op("*", (base, UnitWords(forms.CURRENCY[self.expect(*forms.CURRENCY)])))
            elif self.accept("'"):
                if isinstance(base, Num) and self.token(start - 1).text in ("°", "'"):
                    base = Op("*", (base, UnitWords("arcsecond" if self.accept("'") else "arcminute")))
                elif isinstance(base, Num):
                    raise NotParsedError("a prime behind a number")
                else:
                    base = Sym(self.source(start))
            else:
                return base

    def _raised(self, base: Tree, start: int) -> Tree:
        mark, end = self._argument_text(self._position)
        row = base.items if isinstance(base, Brackets) else base.rows[0] if isinstance(base, Matrix) else ()
        if row and mark in ("T", "top", "intercal") and not (isinstance(base, Matrix) and len(base.rows) > 1):
            self._position = end
            return Matrix(tuple((item,) for item in row))
        if base == REAL_LINE and mark in ("+", "-"):
            self._position = end
            zero, infinity = Num(Fraction(0)), Sym("infty")
            return Brackets("(", ")", (zero, infinity) if mark == "+" else (Op("neg", (infinity,)), zero))
        power = self.argument(whole_number=True)
        if isinstance(base, Matrix | Brackets | FiniteSet | Join):
            return Sym("\\" + self.source(start))
        return Op("^", (base, power))

    def _degrees(self, base: Tree) -> Tree:
        scale = self.next.text.strip()
        is_temperature = self.next.kind in ("text", "letter") and scale in ("C", "F")
        self._position += is_temperature
        return Op("*", (base, UnitWords(f"deg{scale}" if is_temperature else "degree")))

    def _subscripted(self, base: Tree) -> Tree:
        start = self._position
        self._position = self._behind_argument(start)
        index = self.source(start).strip("{} ").replace("{ ", "").replace(" }", "")
        if isinstance(base, Sym | UnitWords):
            return Sym(f"{base.name if isinstance(base, Sym) else base.words}_{index}")
        if isinstance(base, Num) and base.value.denominator == 1 and abs(base.value) < 10**base.digits:
            return Based(str(base.value.numerator), _base(index))
        raise NotParsedError("a subscript of what is no symbol")

    def argument(self, *, whole_number: bool = False) -> Tree:
        """Reads a group in braces, or one token: only the first digit of a number, unless ``whole_number``."""
        if self.accept("{"):
            tree = self.side()
            self.expect("}")
            return tree
        token = self.next
        if token == END:
            raise NotParsedError("an argument is missing")
        if whole_number and self.accept("-"):
            return Op("neg", (self.argument(whole_number=True),))
        if token.kind == "num" and not whole_number and re.fullmatch(r"\d{2,}", token.text):
            rest = token.text[1:]
            self._tokens[self._position : self._position + 1] = [
                Token("num", token.text[0], token.gap, Num(Fraction(int(token.text[0])), digits=1)),
                Token("num", rest, False, Num(Fraction(int(rest)), digits=len(rest))),
            ]
        return self.atom()

    # --- atom

    def atom(self) -> Tree:
        token = self.next
        if token == END:
            raise NotParsedError("the answer ends too early")
        self._position += 1
        if token.kind == "num":
            assert token.number is not None
            return token.number
        if token.kind == "letter":
            return self._letter(token)
        if token.kind == "text":
            return self._unit_of_text(token)
        if token.text in forms.CURRENCY:
            negative = self.accept("-") is not None
            amount = self.factor()
            return Op("*", (UnitWords(forms.CURRENCY[token.text]), Op("neg", (amount,)) if negative else amount))
        if token.kind == "sym":
            return self._bracketed(token.text)
        return self._command(token.text)

    def _letter(self, token: Token) -> Tree:
        before = self.peek(-2)
        if self._bare_units and token.gap and self._is_value(before):
            word = token.text
            while self.next.kind == "letter" and not self.next.gap:
                word += self.next.text
                self._position += 1
            if len(word) > 1 or word in "mgsLlhNJWVKA":
                return UnitWords(word)
            return Sym(word)
        return Sym(token.text)

    def _unit_of_text(self, token: Token) -> Tree:
        if re.search(r"[?<>=]|(?<![\^\-{A-Za-z])\d", token.text):
            raise NotParsedError(f"the words {token.text.strip()[:40]!r}")
        if self.sees("(") and token.text[-1:].isalpha():
            raise NotParsedError(f"{token.text.strip()[:40]!r} is not evaluated")
        if self.sees("Omega") and len(token.text.strip()) == 1:
            self._position += 1
            return UnitWords(token.text.strip() + "ohm")
        if token.text.strip() in ("e", "i"):
            return Sym(token.text.strip())
        text, before = token.text.strip(), self.peek(-2)
        if before.kind == "text" or self._is_value(before):
            text = re.sub(r" of (?=\w)", " ", text)
        elif self._factor_follows() and not units.read(text).units:
            text += " of"  # `root 42`: only a unit may be dropped in front of a number
        return UnitWords(text)

    def _bracketed(self, opening: str) -> Tree:
        if opening == "{":
            tree = self.side()
            if self.accept("choose"):
                tree = Op("binom", (tree, self.side()))
            elif self.accept("over"):
                tree = Op("/", (tree, self.side()))
            self.expect("}")
            return tree
        if opening == "\\{":
            return self._set()
        if opening in ("(", "[", "]"):
            return self._tuple(opening)
        if opening == "|":
            start = self._position - 1
            outer, self._in_bars = self._in_bars, True
            tree = self.side()
            self._in_bars = outer
            self.expect("|")
            if isinstance(tree, Matrix | FiniteSet | Brackets):
                return Sym("\\" + self.source(start))
            return Op("abs", (tree,))
        raise NotParsedError(f"{opening!r} is not expected")

    def _tuple(self, opening: str) -> Tree:
        inner = self._inside(frozenset({")", "]", "["}), bars=False)
        closing = self.expect(")", "]", "[")
        trees = tuple(_single(chain) for chain in inner.items)
        if len(trees) == 1 and opening + closing in ("()", "[]"):
            return trees[0]
        if inner.separator not in ("", ","):
            raise NotParsedError("words inside brackets")
        return Brackets("(" if opening == "]" else opening, ")" if closing == "[" else closing, trees)

    def _inside(self, ends: frozenset[str], *, bars: bool) -> Statement:
        """Reads the inside of brackets. ``bars``: whether a bar ends it instead of opening an absolute value."""
        outer, self._in_bars = self._in_bars, bars
        inner = self.answer(ends)
        self._in_bars = outer
        return inner

    def _set(self) -> Tree:
        if self.accept("\\}"):
            return FiniteSet(())
        inner = self._inside(frozenset({"\\}", ":", "mid", "|"}), bars=True)
        if self.accept(":", "mid", "|"):
            condition = self.answer(frozenset({"\\}"}))
            self.expect("\\}")
            return _builder(inner, condition)
        self.expect("\\}")
        if inner.separator not in ("", ","):
            raise NotParsedError("words inside a set")
        return FiniteSet(tuple(_single(chain) for chain in inner.items))

    def _command(self, name: str) -> Tree:
        start = self._position - 1
        if name == "frac":
            return self._fraction(start)
        if name == "sqrt":
            degree: Tree = Num(Fraction(2))
            if self.accept("["):
                degree = self.side()
                self.expect("]")
            return Op("root", (degree, self.argument()))
        if name in forms.FUNCTIONS:
            return self._function(name)
        if name == "binom":
            return Op("binom", (self.argument(), self.argument()))
        if name in forms.UNDONE:
            return self._undone(start)
        if name in ("lfloor", "lceil"):
            self.side()
            self.expect("rfloor", "rceil")
            return Sym(self.source(start))
        if name == "begin":
            return self._matrix()
        if name in forms.VALUES:
            return forms.VALUES[name]
        if name == "mathbb":
            self._position = self._behind_argument(self._position)
            letter = self.source(start + 1).strip("{} ")
            return REAL_LINE if letter == "R" else Sym(f"mathbb {letter}")
        if name in forms.GREEK:
            if name in ("Omega", "mu") and self._bare_units and (unit := self._greek_unit(name)) is not None:
                return unit
            return Sym(name)
        if name in forms.DECORATED:
            self._position = self._behind_argument(self._position)
            if any(token.kind == "num" for token in self._tokens[start : self._position]):
                raise NotParsedError(f"\\{name} over digits")
            return Sym(self.source(start))
        raise NotParsedError(f"\\{name} is not expected")

    def _greek_unit(self, name: str) -> UnitWords | None:
        """``\\Omega`` and ``\\mu\\text{m}`` behind a number."""
        word = self.next.text.strip() if self.next.kind == "text" else ""
        if self.peek(-2).kind not in ("num", "text") or (name == "mu" and not word):
            return None
        self._position += name == "mu"
        return UnitWords("ohm" if name == "Omega" else ("micro" if len(word) > 2 else "u") + word)

    def _fraction(self, start: int) -> Tree:
        top, behind_top = self._argument_text(self._position)
        bottom, _ = self._argument_text(behind_top)
        is_derivative = re.fullmatch(r"((d|partial)[A-Za-z](\^\{?\d\}?)?)+", bottom)
        if is_derivative and re.match(r"d|partial", top):
            return self._undone(start)
        numerator = self.argument()
        return Op("/", (numerator, self.argument()))

    def _undone(self, start: int) -> Tree:
        """An operator with everything that it may apply to: the rest of the side."""
        depth = 0
        while (token := self.next) != END:
            closes = token.text in (*forms.CLOSING, "end")
            is_word = token.kind == "text" and token.text.strip() in ("or", "and")
            if depth == 0 and (closes or is_word or token.text in (",", "=", "+")):
                break
            depth += (token.text in (*forms.OPENING, "begin")) - closes
            self._position += 1
        return Sym("\\" + self.source(start))

    def _function(self, name: str) -> Tree:
        power: Tree | None = None
        base: Tree | None = None
        while self.sees("^", "_"):
            if self.accept("_"):
                base = self.argument()
            else:
                self.expect("^")
                power = self.argument(whole_number=True)
        argument = self._function_argument()
        if name == "exp":
            result = Op("^", (Sym("e"), argument))
        elif name in ("log", "lg") and (base is not None or name == "lg"):
            result = Op("log", (argument, Num(Fraction(10)) if base is None else base))
        elif name not in ("ln", "log") and power in (MINUS_ONE, Op("neg", (Num(Fraction(1), digits=1),))):
            return Op("arc" + name, (argument,))
        else:
            result = Op(name, (argument,))
        return result if power is None else Op("^", (result, power))

    def _function_argument(self) -> Tree:
        if self.sees("(", "[", "{", "|"):
            return self.atom()
        if self.sees("-"):
            self._position += 1
            return Op("neg", (self._function_argument(),))
        argument = self.factor()
        while self._factor_follows():
            is_function = self.next.kind == "cmd" and self.next.text in forms.FUNCTIONS | forms.UNDONE
            if is_function or self.next.kind == "text" or self.next.text == "(":
                break
            argument = self._beside(argument)
        return argument

    def _matrix(self) -> Tree:
        start = self._position
        name = self._environment()
        if name == "vmatrix":
            self._position = start - 1
            return self._undone(start - 1)
        if name == "array" and self.sees("{"):
            self._position = self._behind_group(self._position)
        if name not in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix", "cases"):
            raise NotParsedError(f"the environment {name!r}")
        if name == "cases":
            return self._cases()
        rows: list[tuple[Tree, ...]] = []
        row: list[Tree] = []
        while not self.sees("end"):
            row.append(self.side())
            if self.accept("&"):
                continue
            rows, row = [*rows, tuple(row)], []
            if not self.accept("\\") and not self.sees("end"):
                raise NotParsedError("a matrix is not closed")
        self._position += 1
        if self._environment() != name or len({len(row) for row in rows}) != 1:
            raise NotParsedError(f"rows of different lengths in {self.source(start)[:40]!r}")
        return Matrix(tuple(rows))

    def _cases(self) -> Cases:
        pieces: list[tuple[Tree, Statement | None]] = []
        while not self.sees("end"):
            value = self.side()
            self.accept(",")
            self.accept("&")
            word = self.next.text.strip(" ,.") if self.next.kind == "text" else ""
            self._position += word in ("if", "for", "when", "where", "otherwise", "else")
            pieces.append(
                (value, None if word in ("otherwise", "else") else self.answer(frozenset({"\\", "end", "."})))
            )
            self.accept(".")
            if not self.accept("\\") and not self.sees("end"):
                raise NotParsedError("cases are not closed")
        self._position += 1
        self._environment()
        return Cases(tuple(pieces))

    def _environment(self) -> str:
        self.expect("{")
        start = self._position
        while self.next != END and not self.sees("}"):
            self._position += 1
        name = self.source(start).replace(" ", "")
        self.expect("}")
        return name


def _base(text: str) -> str:
    """The base of a numeral, from the text below it."""
    names = {"two": "2", "three": "3", "five": "5", "eight": "8", "ten": "10", "sixteen": "16"}
    name = re.sub(r"[{}()\s]", "", text)
    return names.get(name, name)


def _clock(items: list[Tree]) -> Clock | None:
    """The time that ``3:45 p.m.`` or ``10 AM`` says. None for other items."""
    *first, last = items
    if not (isinstance(last, Op) and last.name == "*" and isinstance(last.args[1], UnitWords)):
        return None
    half = re.sub(r"[.\s]", "", last.args[1].words).lower()
    numbers = [*first, last.args[0]]
    values = [int(n.value) for n in numbers if isinstance(n, Num) and n.value.denominator == 1 and n.decimals is None]
    if half not in ("am", "pm") or len(values) != len(numbers) or len(values) > 2:
        return None
    hour, minute = (*values, 0)[:2]
    return Clock(hour % 12 * 60 + minute, half) if 1 <= hour <= 12 and 0 <= minute < 60 else None


def _builder(variable: Statement, condition: Statement) -> Builder:
    (chain,) = variable.items if len(variable.items) == 1 else (Chain((None,)),)
    element = chain.sides[0]
    if element is None or chain.relations not in ((), ("in",)):
        raise NotParsedError("a set of what is no single value")
    domain = chain.sides[1] if chain.relations else REAL_LINE
    return Builder(element, condition, None if domain == REAL_LINE else domain)


def _single(chain: Chain) -> Tree:
    if chain.relations or chain.sides[0] is None:
        raise NotParsedError("a relation inside brackets")
    return chain.sides[0]


def _fraction_of_integers(tree: Tree) -> Fraction | None:
    if not (isinstance(tree, Op) and tree.name == "/"):
        return None
    top, bottom = tree.args
    if not (isinstance(top, Num) and isinstance(bottom, Num)) or top.decimals or bottom.decimals or bottom.value <= 0:
        return None
    return top.value / bottom.value if top.value >= 0 else None


def _ends_in_number(tree: Tree) -> bool:
    return isinstance(tree, Num) or (
        isinstance(tree, Op) and tree.name in ("*", "/") and _ends_in_number(tree.args[-1])
    )
