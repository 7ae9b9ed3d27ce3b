"""The judges by name. A judge is a function ``(prediction, gold, options) -> Verdict``. It may use much CPU and memory.

An exception in a judge becomes the verdict ``error``. If the answer is to blame, the judge must return ``unparsable``.
"""

from collections.abc import Callable
from typing import Any

import pipelinerl.domains.countdown.judge as countdown
import pipelinerl.domains.instructions.judge as instructions
import pipelinerl.domains.math.judge as math
from pipelinerl.records.verdicts import Check, Verdict, error

Judge = Callable[[str, Any, dict[str, Any]], Verdict]

JUDGES: dict[str, Judge] = {
    "countdown": countdown.judge,
    "instructions": instructions.judge,
    "math": math.judge,
}


def judge_here(check: Check) -> Verdict:
    """Judges in this process, without limits of time and memory."""
    try:
        return JUDGES[check.kind](check.prediction, check.gold, check.options)
    except Exception as failure:  # noqa: BLE001 — of any judge, as in a worker
        return error(f"{check.kind}: {type(failure).__name__}: {failure}"[:500])


def warm_up() -> None:
    """Does the slow initialisation that every worker would otherwise do at its first check."""
    math.warm_up()
