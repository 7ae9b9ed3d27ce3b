import ast
import operator
from fractions import Fraction
from itertools import permutations

import pytest

from pipelinerl.domains.countdown import generate_rollout, load_problems
from pipelinerl.domains.countdown.judge import ExpressionError, evaluate, judge, judge_expression, part_to_judge
from pipelinerl.errors import DomainError
from pipelinerl.testing import run_rollout

REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def every_expression(numbers: tuple[int, ...]) -> list[tuple[str, Fraction | None]]:
    """All bracketed expressions over the numbers in their order, with values by brute force (None: divides by zero)."""
    if len(numbers) == 1:
        return [(str(numbers[0]), Fraction(numbers[0]))]
    found = []
    for split in range(1, len(numbers)):
        for left_text, left in every_expression(numbers[:split]):
            for right_text, right in every_expression(numbers[split:]):
                for symbol, function in OPERATORS.items():
                    undefined = left is None or right is None or (symbol == "/" and right == 0)
                    value = None if undefined else function(left, right)
                    found.append((f"({left_text}{symbol}{right_text})", value))
    return found


@pytest.mark.parametrize("numbers", [(3, 7), (2, 5, 9), (1, 1, 4), (6, 6, 6), (2, 3, 4, 5)])
def test_judge_agrees_with_brute_force_on_every_expression(numbers):
    expressions = [e for order in set(permutations(numbers)) for e in every_expression(order)]
    values = {value for _, value in expressions if value is not None}
    reachable = sorted({int(v) for v in values if v.denominator == 1 and v > 0})
    targets = [*reachable[:: max(len(reachable) // 3, 1)], max(reachable) + 1]
    for text, value in expressions:
        if value is None:
            with pytest.raises(ExpressionError, match="zero"):
                evaluate(text)
            continue
        assert evaluate(text).value == value
        for target in targets:
            assert (judge_expression(text, numbers, target).status == "correct") == (value == target)


def test_precedence_and_association_are_those_of_arithmetic():
    for text in ("1+2*3", "8-3-2", "100/5/2", "2*(3+4)*5", "7-2*3+1", "12/4*3", "1-(2-(3-4))"):
        assert evaluate(text).value == Fraction(eval(compile(ast.parse(text, mode="eval"), "", "eval")))


@pytest.mark.parametrize("text", ["3 × 4 − 2", "3·4 - 2", "(12 ÷ 3)\n+ 6", " 10 "])
def test_typographic_operators_and_blanks_are_read(text):
    assert evaluate(text).value == 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "(",
        "()",
        "1+",
        "+1",
        "-1",
        "1 2",
        "1(2)",
        "2**3",
        "2^3",
        "9**9**9**9",
        "9" * 10,
        "1e9",
        "1.5",
        "1_000",
        "007",
        "00",
        "0x10",
        "٣+٤",
        "１＋２",
        "²",
        "x",
        "abs(3)",
        "(3).__class__",
        "().__class__.__bases__[0]",
        "__import__('os').system('true')",
        "3 if 1 else 2",
        "1;2",
        "1//2",
        "1%2",
        "1/0",
        "4/(2-2)",
        "(" * 33 + "1" + ")" * 33,
        "1+" * 300 + "1",
        "1\x00+2",
    ],
)
def test_hostile_or_broken_expression_is_refused(text):
    with pytest.raises(ExpressionError):
        evaluate(text)
    assert judge_expression(text, [3], 3).status == "unparsable"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<answer>3*4</answer>", "correct"),
        ("first <answer>3+4</answer> no: <answer>4*3</answer>", "correct"),
        ("<answer>3*4 = 12</answer>", "correct"),
        ("<answer>3+4</answer>", "wrong"),
        ("<answer>12</answer>", "wrong"),
        ("<answer>3*4*1</answer>", "wrong"),
        ("<answer>3*4</answer", "no_answer"),
        ("3*4", "no_answer"),
        ("<answer></answer>", "unparsable"),
        ("<answer>3*4=12=12</answer>", "unparsable"),
        ("<answer>3+4=7</answer>", "wrong"),
        ("<answer>3*4=13</answer>", "wrong"),
        ("<answer>3*4=</answer>", "unparsable"),
        ("<answer>3*4=__import__</answer>", "unparsable"),
    ],
)
def test_whole_output_is_judged_by_its_last_answer(text, status):
    assert judge(text, {"numbers": [3, 4], "target": 12}, {}).status == status


def test_use_all_false_allows_to_leave_numbers_out_but_not_to_repeat_them():
    gold = {"numbers": [3, 4, 7], "target": 12}
    assert judge("<answer>3*4</answer>", gold, {"use_all": False}).status == "correct"
    assert judge("<answer>3*4</answer>", gold, {"use_all": True}).status == "wrong"
    assert judge("<answer>3*(7-3)</answer>", gold, {"use_all": False}).status == "wrong"


def test_generated_problems_are_solvable_new_and_split():
    params = {"num_numbers": (2, 3), "max_number": 12, "max_target": 99, "num_train_problems": 400}
    train, test = load_problems(["train"], **params), load_problems(["test"], **params, num_test_problems=60)
    assert len(train) == 400
    assert len(test) == 60
    keys = [{(tuple(sorted(p["numbers"])), p["target"]) for p in part} for part in (train, test)]
    assert not keys[0] & keys[1]
    assert len(keys[0]) == 400
    for problem in train[:60] + test[:20]:
        values = [v for order in permutations(problem["numbers"]) for _, v in every_expression(order)]
        assert problem["target"] in values


def test_seed_changes_train_only():
    params = {"num_train_problems": 20, "num_test_problems": 20}
    assert load_problems(["train"], **params, seed=1) != load_problems(["train"], **params, seed=2)
    assert load_problems(["train"], **params, seed=1) == load_problems(["train"], **params, seed=1)
    assert load_problems(["test"], **params, seed=1) == load_problems(["test"], **params, seed=2)


def test_small_space_gives_all_its_problems():
    problems = load_problems(["train", "test"], num_numbers=(2, 2), max_number=2, operators="+", max_target=9)
    assert {(tuple(sorted(p["numbers"])), p["target"]) for p in problems} == {((1, 1), 2), ((1, 2), 3), ((2, 2), 4)}


def test_unknown_dataset_is_named():
    with pytest.raises(DomainError, match="'dev'"):
        load_problems(["dev"])


@pytest.mark.parametrize(
    ("reply", "reward"), [("<answer>4*3</answer>", 1), ("<answer>4+3</answer>", 0), ("<answer>4**3</answer>", -1)]
)
async def test_rollout_pays_by_the_reward_table(reply, reward):
    problem = {"dataset": "train", "numbers": [3, 4], "target": 12, "use_all": True}
    result = await run_rollout(generate_rollout, problem, [reply], {"rewards": REWARDS})
    assert result.metrics.reward == reward
    assert result.training_texts[0].reward == reward


@pytest.mark.parametrize("sign", ["*", "×", "·", "⋅", "\\times", "\\cdot ", " \\times "])
def test_every_sign_of_multiplication_is_read(sign):
    assert judge_expression(f"(3 + 4){sign}5", [3, 4, 5], 35).status == "correct"
    assert judge_expression(f"(3 + 4){sign}5", [3, 4, 5], 36).status == "wrong"


def test_another_command_is_refused():
    assert judge_expression("3\\timesx 4", [3, 4], 12).status == "unparsable"


@pytest.mark.parametrize(
    "text",
    [r"\frac{8}{3-\frac{8}{3}}", r"\dfrac{8}{3 - 8/3}", r"8/\left(3-8/3\right) = 24", r"\tfrac{8}{(3-\frac{8}{3})}"],
)
def test_fraction_is_a_quotient(text):
    assert judge_expression(text, [8, 3, 8, 3], 24).status == "correct"
    assert judge_expression(text, [8, 3, 8, 4], 24).status == "wrong"


@pytest.mark.parametrize(
    "text", [r"\frac84", r"\frac{8}4", r"\frac{8}{4-4}", r"{8}/4", r"\frac{8)(4}", r"\left 8", r"\frac{8}"]
)
def test_broken_fraction_is_refused(text):
    assert judge_expression(text, [8, 4], 2).status == "unparsable"


@pytest.mark.parametrize(
    ("output", "part"),
    [
        ("<answer>1</answer> <answer>2</answer>", "<answer>2</answer>"),
        ("<answer><answer>1</answer></answer>", "<answer>1</answer>"),
        ("<answer>1</answer> <answer>2", "<answer>1</answer>"),
        ("</answer><answer>", ""),
        ("1</answer>", ""),
    ],
)
def test_part_to_judge_is_the_last_answer_that_is_closed(output, part):
    assert part_to_judge(output) == part
