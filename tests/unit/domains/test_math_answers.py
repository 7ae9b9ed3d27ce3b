r"""Answers that a fair examiner accepts or refuses, in the tables of ``math_answers/``.

``honest`` and ``cheats`` were written beside the rules, ``exam_…`` before them. ``kinds_…`` has what students write, by
kind; ``variants_…`` other orders, spellings and units, and what lies beside answers that were judged wrongly;
``datasets_…`` references in the forms of published data sets.
"""

from pathlib import Path

import pytest

from pipelinerl.domains.math.answers import units
from pipelinerl.domains.math.answers.parser import parse
from pipelinerl.domains.math.answers.trees import NotParsedError
from pipelinerl.domains.math.judge import judge, parse_with_library

HONEST = ("honest", "exam_honest", "kinds_honest", "variants_honest", "datasets_honest")
CHEATS = ("cheats", "exam_cheats", "kinds_cheats", "variants_cheats", "datasets_cheats")
TABLES = Path(__file__).with_name("math_answers")


def table(name: str) -> list[tuple[str, str]]:
    """Pairs of reference and answer."""
    lines = (TABLES / f"{name}.txt").read_text().splitlines()
    return [tuple(line.split(" <- ")) for line in lines if line and not line.startswith("# ")]  # type: ignore[misc]


def status(answer: str, gold: str, **options: object) -> str:
    return judge(f"\\boxed{{{answer}}}", gold, dict(options)).status


@pytest.mark.parametrize("name", HONEST)
def test_judge_honest_answer_is_correct(name: str) -> None:
    assert [(gold, answer) for gold, answer in table(name) if status(answer, gold) != "correct"] == []


@pytest.mark.parametrize("name", CHEATS)
def test_judge_answer_that_is_not_the_reference_is_refused(name: str) -> None:
    judged = [(gold, answer, status(answer, gold)) for gold, answer in table(name)]
    assert [one for one in judged if one[2] not in ("wrong", "unparsable")] == []


def test_tables_have_hundreds_of_pairs_and_none_twice() -> None:
    tables = [table(name) for name in (*HONEST, *CHEATS)]
    assert [len(set(one)) for one in tables] == [len(one) for one in tables]
    assert not set().union(*tables[: len(HONEST)]) & set().union(*tables[len(HONEST) :])
    assert min(map(len, tables)) >= 150


def test_every_reference_equals_itself() -> None:
    references = {gold for name in (*HONEST, *CHEATS) for gold, _ in table(name)}
    assert [gold for gold in references if status(gold, gold + " ") != "correct"] == []


def test_math_verify_alone_accepts_many_of_the_cheats() -> None:
    from math_verify import verify

    def accepts(gold: str, answer: str) -> bool:
        sides = [list(parse_with_library(f"\\boxed{{{text}}}")) for text in (gold, answer)]
        return verify(*sides, timeout_seconds=None)

    assert sum(accepts(gold, answer) for gold, answer in table("cheats")[:60]) >= 20


def test_judge_what_is_left_undone_is_accepted_where_the_options_or_the_reference_allow_it() -> None:
    assert status(r"\gcd(84,126)", "42", operators="allow") == "correct"
    assert status(r"\gcd(84,127)", "42", operators="allow") == "wrong"
    assert status("40 + 2", "42", operators="allow") == "correct"
    assert status(r"\gcd(84,126)", r"\gcd(84,126)") == "correct"
    assert status(r"2 \cdot 3 + 1", r"1 + 2 \cdot 3") == "correct"
    assert status(r"1 \lor 42", "42", operators="allow") == "wrong"
    assert status("42", "42", operators="perhaps") == "error"


def test_judge_kind_of_bracket_and_name_matter_only_where_judging_is_strict() -> None:
    assert status("[1,2]", "(1,2)") == "wrong"
    assert status("[1,2]", "(1,2)", strict=False) == "correct"
    assert status("y=3", "x=3") == "wrong"
    assert status("y=3", "x=3", strict=False) == "correct"


def test_judge_prose_without_a_box_is_held_to_the_same_rules() -> None:
    assert judge(r"The answer is $1 \lor 2 \lor 42$.", "42", {}).status == "wrong"
    assert judge(r"The answer is $x = 42$.", "42", {}).status == "correct"
    for text in (
        "The answer is 42 or 43.",
        "It is 43 or 42",
        "The answer is half of 42.",
        "The answer is negative $42$",
    ):
        assert judge(text, "42", {}).status != "correct", text
    assert judge("The answer is 42 or 43.", "42, 43", {}).status == "correct"
    assert judge("The answer is negative 42.", "-42", {}).status == "correct"
    assert judge("Each of the bags is filled with 42 apples.", "42", {}).status == "correct"
    assert judge("Since 6 and 7 are given, the answer is simply 42.", "42", {}).status == "correct"


@pytest.mark.parametrize(
    ("text", "same_as", "factor"),
    [
        ("cm", "m", "1/100"),
        ("square meters", "m^2", "1"),
        ("cubic feet", "ft^3", "1"),
        ("kilometers per hour", "km/h", "1"),
        ("mph", "ft/s", "22/15"),
        ("GHz", "Hz", "1000000000"),
        ("hrs", "minutes", "60"),
        ("cents", "dollars", "1/100"),
        ("mph", "miles", None),
        ("kWh", "kW", None),
        ("degC", "degF", None),
        ("apples", "m", None),
    ],
)
def test_factor_of_two_units_is_exact(text: str, same_as: str, factor: str | None) -> None:
    found = units.factor(units.read(text), units.read(same_as))
    assert (None if found is None else str(found)) == factor


@pytest.mark.parametrize("words", ["apples", "cats", "ways", "students", "red balls"])
def test_nouns_are_no_units(words: str) -> None:
    assert units.read(words).nouns
    assert not units.read(words).units


@pytest.mark.parametrize(
    "text", ["4 2", r"42_{41}^", "(1", r"\frac{1}", "1 + + 2", r"\unknown 3", "", "()", "42?", r"41 \to 42"]
)
def test_parse_nothing_is_skipped(text: str) -> None:
    with pytest.raises(NotParsedError):
        parse(text)


@pytest.mark.parametrize(
    "answer", ["10^{10^{10}}", "2^{2^{2^{2^{2^{2}}}}}", "1000000!", "9" * 990, "(" * 400 + "1" + ")" * 400]
)
def test_judge_answer_that_would_take_for_ever_ends_at_once(answer: str) -> None:
    assert status(answer, r"\frac{1}{2}") in ("wrong", "unparsable")


@pytest.mark.parametrize(
    "output",
    [
        r"\boxed {42}",
        "\\boxed\n{42}",
        r"\boxed{\begin{aligned}x &= 42\end{aligned}}",
        r"\boxed{\Large 42}",
        r"\boxed{\left.42\right.}",
        r"\boxed{\text{ } 42}",
        r"\boxed{\boxed{42}}",
    ],
)
def test_judge_layout_of_a_box_has_no_meaning(output: str) -> None:
    assert judge(output, "42", {"answer_format": "boxed"}).status == "correct"


def test_judge_numbers_that_differ_by_less_than_can_be_compared_are_not_the_same() -> None:
    assert status(r"1 + e^{-10^3}", "1") == "wrong"
    assert status(r"1 + e^{-10^4}", "1") == "unparsable"
    assert status(r"\tanh(10^{9})", "1") == "unparsable"


def test_judge_long_sum_is_judged_within_the_depth_of_the_interpreter() -> None:
    assert status("+".join(["1"] * 400), "400") in ("wrong", "unparsable")
    assert status("+".join(["x"] * 400), "400x") in ("correct", "unparsable")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("x(^\\ln1", "2"),
        ("x = f(", "2"),
        ("1e9999_5", "2"),
        ("5\\text{ /l}", "5\\text{ MB}"),
        ("5\\text{ m//s}", "5\\text{ m/s}"),
    ],
)
def test_judge_broken_answer_gets_a_verdict(answer: str, gold: str) -> None:
    verdict = judge(f"\\boxed{{{answer}}}", gold, {})
    assert verdict.status in ("wrong", "unparsable")
    assert "fails" not in verdict.detail


def test_judge_failure_is_blamed_on_the_answer_only_where_the_reference_can_be_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipelinerl.domains.math import judge as module

    def broken(answer: object, wanted: object, rules: object) -> None:
        raise OverflowError("too large")

    def broken_by_seven(answer: object, wanted: object, rules: object) -> None:
        if answer == parse("7"):
            raise OverflowError("too large")

    monkeypatch.setattr(module, "same", broken_by_seven)
    verdict = judge("\\boxed{7}", "42", {})
    assert (verdict.status, "OverflowError: too large" in verdict.detail) == ("unparsable", True)
    monkeypatch.setattr(module, "same", broken)
    with pytest.raises(OverflowError):
        judge("\\boxed{7}", "42", {})


def test_judge_library_that_cannot_parse_the_reference_leaves_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelinerl.domains.math import judge as module

    monkeypatch.setattr(module, "parse_with_library", lambda text: ())
    assert judge("\\boxed{4}", "x=3", {"strict": False}).status == "wrong"
    assert judge("\\boxed{4}", "\\unknown", {}).status == "error"
