"""The judges by name. A judge is a function ``(prediction, gold, options) -> Verdict``; it may be slow or greedy.

What a judge raises is an ``error``: a judge says ``unparsable`` itself when the answer is to blame.
"""

from collections.abc import Callable
from typing import Any

import pipelinerl.domains.countdown.judge as countdown
import pipelinerl.domains.instructions.judge as instructions
import pipelinerl.domains.math.judge as math
from pipelinerl.records.verdicts import Verdict

Judge = Callable[[str, Any, dict[str, Any]], Verdict]

JUDGES: dict[str, Judge] = {
    "countdown": countdown.judge,
    "instructions": instructions.judge,
    "math": math.judge,
}


def warm_up() -> None:
    """What every worker would otherwise do at its first check."""
    math.warm_up()
