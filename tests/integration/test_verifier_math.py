"""The math judge agrees with math-verify on plain answers, but for percent, units and sets of an inequality."""

import itertools
import re
from fractions import Fraction
from random import Random

import pytest
from math_verify import parse, verify

from pipelinerl.domains.math.judge import judge, last_boxed, warm_up

FAMILIES = {
    "integers": ["42", "-7", "0", "007", "+3", "1,234", "1234"],
    "decimals": ["0.5", ".5", "-0.25", "3.14", "3.140", "0.333333", "1e3", "100000"],
    "fractions": [
        "\\frac{1}{2}",
        "\\frac12",
        "\\dfrac{2}{4}",
        "1/2",
        "-\\frac{1}{2}",
        "\\frac{-1}{2}",
    ],
    "powers": ["2^{10}", "1024", "2^10", "x^{2}", "x^2", "\\sqrt{2}", "\\sqrt{8}", "2\\sqrt{2}", "\\sqrt[3]{8}", "2"],
    "percentages": ["50\\%", "50%", "0.5", "\\frac{1}{2}", "50", "5\\%"],
    "units": ["5\\text{ cm}", "5", "5 \\mathrm{cm}", "\\$5", "5^\\circ", "5 \\text{ meters}", "6\\text{ cm}"],
    "sets": ["\\{1,2,3\\}", "\\{3,2,1\\}", "\\{1,2\\}", "1,2,3", "\\emptyset", "\\{1\\} \\cup \\{2\\}"],
    "intervals": ["(1,2)", "[1,2]", "[1,2)", "(-\\infty,3]", "(1,2)\\cup(3,4)", "(1, 2)", "(2,1)"],
    "tuples": ["(1,2,3)", "(3,2,1)", "\\left(1,2,3\\right)", "(1, 2, 3)"],
    "matrices": [
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}",
        "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}",
    ],
    "equations": ["x=3", "3", "x = 3", "y=3", "x=2 \\text{ or } x=3", "y=2x+1", "2x+1", "y-1=2x"],
    "expressions": [
        "x+1",
        "1+x",
        "(x+1)^2",
        "x^2+2x+1",
        "\\frac{x+1}{2}",
        "2\\pi",
        "\\pi 2",
    ],
    "texts": ["\\text{Evelyn}", "Evelyn", "\\text{odd}", "\\text{even}", "\\text{(A)}", "A", "B"],
    "inequalities": ["x>3", "3<x", "x\\ge 3", "1<x<2", "x \\in (1,2)"],
    "complex": ["1+2i", "2i+1", "i", "-i", "\\frac{1+i}{2}"],
}
PAIRS = [(gold, answer) for family in FAMILIES.values() for gold, answer in itertools.product(family, family)]


HALF, HALVES, UNITS = (
    ("50\\%", "50%"),
    ("0.5", "\\frac{1}{2}"),
    (("5\\text{ cm}", "5 \\mathrm{cm}"), ("\\$5",), ("5^\\circ",), ("5 \\text{ meters}",)),
)
OTHERWISE = {
    **dict.fromkeys(itertools.product(HALF, (*HALF, *HALVES, "50")), "correct"),
    **dict.fromkeys(itertools.product(HALVES, HALF), "correct"),
    **{pair: "wrong" for one, other in itertools.permutations(UNITS, 2) for pair in itertools.product(one, other)},
    ("x \\in (1,2)", "1<x<2"): "correct",
}
"""Pairs of reference and answer that math-verify judges otherwise: it does not know percent, units and memberships."""


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def verdict_of_the_library(gold: str, answer: str) -> bool:
    return verify(parse(f"\\boxed{{{gold}}}"), parse(f"The answer is \\boxed{{{answer}}}."))


def test_pairs_cover_more_than_two_hundred_cases():
    assert len(PAIRS) > 500


@pytest.mark.parametrize("family", FAMILIES)
def test_verdict_equals_that_of_math_verify(family):
    right = 0
    for gold, answer in itertools.product(FAMILIES[family], repeat=2):
        if (gold, answer) in OTHERWISE:
            assert judge(f"\\boxed{{{answer}}}", gold, {}).status == OTHERWISE[gold, answer]
            continue
        ours = judge(f"Some steps. The answer is \\boxed{{{answer}}}.", gold, {"answer_format": "boxed"})
        expected = verdict_of_the_library(gold, answer)
        assert (ours.status == "correct") == expected, (gold, answer, ours, expected)
        right += expected
    assert right >= len(FAMILIES[family]), "every answer equals itself"


def test_verdict_on_drawn_numbers_equals_that_of_math_verify():
    rng = Random(0)

    def number() -> str:
        top, bottom, sign = rng.randint(0, 20), rng.randint(1, 12), rng.choice(("", "", "-"))
        forms = (f"{top}", f"\\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", f"\\sqrt{{{top}}}", str(top / 4))
        return sign + rng.choice(forms)

    for _ in range(200):
        gold, answer = number(), number()
        if rng.random() < 0.5:
            answer = str(Fraction(gold)) if re.fullmatch(r"-?\d+(/\d+)?", gold) else gold
        status = judge(f"\\boxed{{{answer}}}", gold, {}).status
        assert (status == "correct") == verdict_of_the_library(gold, answer), (gold, answer)


@pytest.mark.parametrize("answer", ["12 000", "12\\,000", "12,000", "12000"])
def test_judge_thousands_apart_are_one_number(answer):
    assert judge(f"\\boxed{{{answer}}}", "12 000", {}).status == "correct"
    assert judge(f"\\boxed{{{answer}}}", "0", {}).status == "wrong"


@pytest.mark.parametrize("gold", ["$\\frac{1}{2}$", "\\boxed{\\frac{1}{2}}", "so \\(0.5\\)", "1/2"])
def test_reference_may_bring_its_own_environment(gold):
    assert judge("\\boxed{0.5}", gold, {}).status == "correct"
    assert judge("\\boxed{0.6}", gold, {}).status == "wrong"


@pytest.mark.parametrize(
    ("text", "answer_format", "status"),
    [
        ("The answer is 1/2", "any", "correct"),
        ("The answer is $\\frac{1}{2}$.", "any", "correct"),
        ("The answer is 1/2", "boxed", "no_answer"),
        ("", "any", "no_answer"),
        ("I do not know", "any", "no_answer"),
        ("\\boxed{}", "any", "no_answer"),
        ("\\boxed{\\frac{1}{2}", "boxed", "no_answer"),
        ("\\boxed{1} then \\boxed{0.5}", "boxed", "correct"),
        ("\\boxed{0.5} then \\boxed{1}", "boxed", "wrong"),
        ("\\boxed{\\text{a half}}", "boxed", "wrong"),
        ("\\boxed{" + "1+" * 600 + "1}", "boxed", "unparsable"),
    ],
)
def test_answer_is_found_or_missed_by_format(text, answer_format, status):
    assert judge(text, "\\frac{1}{2}", {"answer_format": answer_format}).status == status


def test_unknown_format_is_an_error():
    assert judge("\\boxed{1}", "1", {"answer_format": "bold"}).status == "error"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{a} \\boxed{b", None),
        ("\\boxed 5", "5"),
        ("none", None),
        ("\\boxed{x\\\\}", "x\\\\"),
    ],
)
def test_last_box_is_read_with_balanced_braces(text, content):
    assert last_boxed(text) == content
