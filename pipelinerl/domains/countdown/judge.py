"""Judges a countdown answer: the last ``<answer>…</answer>`` must hit the target with the given numbers.

It is cheap and bounded, so the domain calls it directly. The verifier offers it too.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipelinerl.domains.countdown.expression import ExpressionError, evaluate
from pipelinerl.records.verdicts import Verdict, correct, no_answer, unparsable, wrong

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def judge(prediction: str, gold: dict[str, Any], options: dict[str, Any]) -> Verdict:
    """Judges a whole output.

    Args:
        prediction: the model's output.
        gold: ``{"numbers": [int, …], "target": int}``.
        options: ``{"use_all": bool}``: every number must be used (default), or each at most once.
    """
    answers = ANSWER.findall(prediction)
    if not answers:
        return no_answer("no <answer> … </answer>")
    return judge_expression(answers[-1], gold["numbers"], gold["target"], use_all=options.get("use_all", True))


def judge_expression(text: str, numbers: Sequence[int], target: int, *, use_all: bool = True) -> Verdict:
    """Judges a bare expression, which ``= value`` may follow.

    Args:
        text: the expression.
        numbers: the given numbers.
        target: the value to reach.
        use_all: every number must be used, otherwise each at most once.
    """
    expression, equals, claim = text.partition("=")
    try:
        evaluated = evaluate(expression)
        claimed = evaluate(claim).value if equals else evaluated.value
    except ExpressionError as error:
        return unparsable(str(error))
    used, given = Counter(evaluated.numbers), Counter(numbers)
    if (use_all and used != given) or not used <= given:
        return wrong(f"uses {list(evaluated.numbers)} of {list(numbers)}")
    return correct() if evaluated.value == claimed == target else wrong(f"equals {evaluated.value}")
