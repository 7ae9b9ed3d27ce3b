"""The judges by name. A judge is a function ``(prediction, gold, options) -> Verdict``. It may use much CPU and memory.

An exception in a judge becomes the verdict ``error``. If the answer is to blame, the judge must return ``unparsable``.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pipelinerl.domains.countdown.judge as countdown
import pipelinerl.domains.math.judge as math
from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.reward_functions import REWARD
from pipelinerl.domains.reward_forms import judge_reward
from pipelinerl.records.verdicts import Check, Verdict, error

Judge = Callable[[str, Any, dict[str, Any]], Verdict]

JUDGES: dict[str, Judge] = {"countdown": countdown.judge, "math": math.judge}


def judges_of(names: Sequence[str]) -> dict[str, Judge]:
    """Returns the verifier's own judges, those of `verifier.judges` by their dotted names, and reward functions."""
    # A request never names a module to import: whoever can send one could run any code.
    found = {name: resolve_function(name.removeprefix(REWARD)) for name in names}
    return JUDGES | {
        name: partial(judge_reward, function) if name.startswith(REWARD) else function
        for name, function in found.items()
    }


def refusal(kind: str, judges: Collection[str]) -> str | None:
    """Returns the reason to refuse a check of this ``kind``. None: there is a judge for it."""
    if kind in judges:
        return None
    return f"kind is {kind[:100]!r}: use one of {sorted(judges)}, or name your judge in `verifier.judges`"


def judge_here(check: Check, names: Sequence[str]) -> Verdict:
    """Judges in this process, without limits of time and memory. ``names``: those of `verifier.judges`."""
    if said := refusal(check.kind, (*JUDGES, *names)):
        return error(said)
    try:
        return judges_of(names)[check.kind](check.prediction, check.gold, check.options)
    except Exception as failure:  # noqa: BLE001 — of any judge, as in a worker
        return error(f"{check.kind}: {type(failure).__name__}: {failure}"[:500])


def warm_up() -> None:
    """Does the slow initialisation of the judges, once before workers are forked."""
    math.warm_up()
