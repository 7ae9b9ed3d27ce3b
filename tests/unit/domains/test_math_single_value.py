r"""Answers that math-verify accepts although they are not one computed value, and honest ones that must stay accepted.

math-verify falls back to the last number of a text that it cannot parse. The lists were written against its behaviour:
``test_math_verify_alone_accepts_the_cheats`` shows that the rules are needed.
"""

import pytest

from pipelinerl.domains.math.judge import judge, parse_text
from pipelinerl.domains.math.single_value import unit_of

CHEATS_FOR_42 = r"""
1 \lor 2 \lor 42
41 = 42
41 \to 42
41 \land 42
41 \cup 42
\sum_{k=1}^{42}1
\gcd(84,126)
41 \cap 42
41 \Rightarrow 42
41 \implies 42
41 \rightarrow 42
41 \longrightarrow 42
41 \mid 42
41 \nmid 42
41 \in 42
41 \notin 42
\max(41, 42)
\min(42, 43)
\max\{41, 42\}
\lfloor 42.5 \rfloor
\lceil 41.5 \rceil
\prod_{k=1}^{1}42
\int_0^{42} 1 dx
\lim_{x\to 42} x
41 \equiv 42
x = 41 = 42
x = 41 \lor x = 42
41 \\ 42
41 \iff 42
41 \Leftrightarrow 42
41 \mapsto 42
41 \vee 42
41 \wedge 42
\neg 41 \lor 42
41 \setminus 42
42 \text{ (or 41)}
1, 2, 3, \ldots, 42
\operatorname{lcm}(6,7)
\operatorname{gcd}(84,126)
41 \cong 42
41 \sim 42
41 \simeq 42
41 \sqcup 42
41 \colon 42
\sum_{k=42}^{42} k
41 \cdot 0 = 42
1 + 1 = 2 = 42
41 ? 42
41 # 42
41 @ 42
41 \star 42
41 \vert 42
41 \propto 42
41 \subset 42
41 \subseteq 42
41 \parallel 42
41 \perp 42
41 \therefore 42
41 \models 42
41 \uplus 42
41 \oplus 42
41, 42
41 \text{ or } 42
41 or 42
\{41, 42\}
(41, 42)
41 \pm 1
\pm 42
41 \le 42
41 \ne 42
41 < 42
41 \approx 42
41 \quad 42
41 maybe 42
\text{41 or 42}
\text{either } 41 \text{ or } 42
84 \bmod 126
""".strip().splitlines()

HONEST_FOR_42 = r"""
42
42.0
+42
\$42
42^\circ
42\text{ cm}
42 \text{ apples}
42\,\mathrm{cm}
x = 42
x=42
n = 42
AB = 42
a + b = 42
f(41) = 42
x_{41} = 42
P(X=1) = 42
\angle ABC = 42^\circ
x \approx 42
6 \cdot 7 = 42
40 + 2 = 42
6 \times 7
43 - 1
\frac{84}{2}
\dfrac{84}{2}
84/2
\sqrt{1764}
2^5 + 10
\left(42\right)
\mathbf{42}
|-42|
\lvert -42 \rvert
\binom{42}{1}
42 + 0i
""".strip().splitlines()

HONEST_PAIRS = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2} = 0.5", "0.5"),
    (r"1{,}000", "1000"),
    (r"1,000", "1000"),
    (r"10^3", "1000"),
    (r"\ln 2", r"\ln(2)"),
    (r"2\pi", r"2 \pi"),
    (r"\frac{\sqrt{3}}{2}", r"\frac12\sqrt3"),
    (r"3e^{2}", r"3 e^2"),
    (r"y = x+1", "x+1"),
    (r"V = \pi r^2 h", r"\pi r^2 h"),
    (r"(x+1)^2 = x^2+2x+1", "x^2+2x+1"),
    (r"x=1 \text{ or } x=2", r"\{1,2\}"),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(2,\infty)"),
    (r"\gcd(a,b)", r"\gcd(a,b)"),
    (r"5\text{ cm}", "5 cm"),
    (r"5\text{ cm}", "5"),
    (r"5", r"5\text{ cm}"),
    (r"5\text{ square meters}", r"5\text{ m}^2"),
    (r"5 \text{ kilometers per hour}", r"5\text{ km/h}"),
    (r"5\text{ minutes}", r"5\text{ min}"),
    (r"5\text{ apples}", r"5\text{ apples}"),
]

CHEATING_PAIRS = [
    ("x+2 = x+1", "x+1"),
    (r"5\text{ cm}", r"5\text{ m}"),
    ("5 cm", "5 m"),
    (r"5\text{ m}^3", r"5\text{ m}^2"),
    (r"5\text{ km/h}", r"5\text{ m/s}"),
    (r"5\text{ hours}", r"5\text{ minutes}"),
]


def status(answer: str, gold: str, **options: object) -> str:
    return judge(f"\\boxed{{{answer}}}", gold, dict(options)).status


def math_verify_accepts(answer: str, gold: str) -> bool:
    from math_verify import verify

    sides = [list(parse_text(f"\\boxed{{{text}}}")) for text in (gold, answer)]
    return verify(*sides, timeout_seconds=None)


@pytest.mark.parametrize("answer", CHEATS_FOR_42)
def test_judge_cheat_for_42_is_not_correct(answer: str) -> None:
    assert status(answer, "42") != "correct"


def test_math_verify_alone_accepts_the_cheats() -> None:
    assert sum(math_verify_accepts(answer, "42") for answer in CHEATS_FOR_42) >= 50


@pytest.mark.parametrize("answer", HONEST_FOR_42)
def test_judge_honest_42_is_correct(answer: str) -> None:
    assert status(answer, "42") == "correct"


@pytest.mark.parametrize(("answer", "gold"), HONEST_PAIRS)
def test_judge_honest_pair_is_correct(answer: str, gold: str) -> None:
    assert status(answer, gold) == "correct"


@pytest.mark.parametrize(("answer", "gold"), CHEATING_PAIRS)
def test_judge_cheating_pair_is_not_correct(answer: str, gold: str) -> None:
    assert math_verify_accepts(answer, gold)
    assert status(answer, gold) == "wrong"


def test_judge_unevaluated_operator_is_accepted_where_the_options_or_the_reference_allow_it() -> None:
    assert status(r"\gcd(84,126)", "42", operators="allow") == "correct"
    assert status(r"\gcd(84,126)", r"\gcd(84,126)") == "correct"
    assert status(r"1 \lor 42", "42", operators="allow") == "wrong"
    assert status("42", "42", operators="perhaps") == "error"


def test_judge_prose_without_a_box_is_held_to_the_same_rules() -> None:
    assert judge(r"The answer is $1 \lor 2 \lor 42$.", "42", {}).status == "wrong"
    assert judge(r"The answer is $x = 42$.", "42", {}).status == "correct"


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (r"5\text{ cm}", "cm"),
        (r"5\mathrm{cm}^2", "cm^2"),
        (r"5 \text{ cubic feet}", "ft^3"),
        (r"5\text{ m/s}", "m/s"),
        (r"50\%", "percent"),
        (r"90^\circ", "degree"),
        (r"\$5", "dollar"),
        (r"5\text{ apples}", None),
        ("x", None),
        ("42", None),
    ],
)
def test_unit_of_text_is_in_one_spelling(text: str, unit: str | None) -> None:
    assert unit_of(text) == unit
