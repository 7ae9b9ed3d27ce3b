"""The two forms of a reward function, verl's and TRL's: what it is called with, and what it may return.

A function is called by the names of its parameters, with those that it has.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from pipelinerl.domains.columns import Messages
from pipelinerl.domains.contract import describe_error
from pipelinerl.errors import DomainError, RecordError
from pipelinerl.records.verdicts import Verdict, wrong
from pipelinerl.rollouts import finite

Form = Literal["verl", "trl"]
FORMS: dict[Form, str] = {
    "verl": "compute_score(data_source, solution_str, ground_truth, extra_info) -> float",
    "trl": "reward_func(prompts, completions, **columns) -> list[float]",
}
ANSWER_NAMES = ("solution_str", "predict_str", "model_output")
"""The parameter for the answer in functions that come with verl."""
TELLING: dict[Form, frozenset[str]] = {
    "verl": frozenset(ANSWER_NAMES),
    "trl": frozenset({"completions", "completion_ids"}),
}
"""Parameters that a function of one form has and none of the other."""
BOTH_FORMS = f"write `{FORMS['verl']}` as for verl, or `{FORMS['trl']}` as for TRL"
NOT_PASSED = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass on."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A problem and the policy's answer."""

    task: str | Messages
    output: str
    completion_ids: list[int]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row, as it was read."""
    ground_truth: Any = None
    dataset: str = ""


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters that can be given by name. Empty if the signature cannot be read."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    refused = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return {name: parameter for name, parameter in found.items() if parameter.kind not in refused}


def form_of(dotted: str, function: Callable[..., Any], kind: str) -> Form:
    """Returns the form of a function. ``kind``: `reward_function_kind`.

    Raises:
        DomainError: its parameters say neither form, or both.
    """
    if kind != "auto":
        return "verl" if kind == "verl" else "trl"
    if inspect.isclass(function):
        raise DomainError(f"`reward_function` is {dotted}, a class: name an instance of it")
    names = parameters_of(function).keys()
    found = [form for form, telling in TELLING.items() if telling & names]
    if len(found) == 1:
        return found[0]
    said = "neither of the two forms" if not found else "both forms"
    raise DomainError(
        f"`reward_function` is {dotted}({', '.join(names)}): its parameters are of {said}; {BOTH_FORMS}; or say "
        "which it is with `reward_function_kind`"
    )


def arguments(dotted: str, function: Callable[..., Any], form: Form, answered: Answered) -> dict[str, Any]:
    """Returns what the function is called with. Raises ``DomainError`` if it needs more than there is."""
    columns, takes = answered.columns, parameters_of(function)
    if form == "verl":
        there: dict[str, Any] = {
            "data_source": columns.get("data_source", answered.dataset),
            "solution_str": answered.output,
            "ground_truth": answered.ground_truth,
            "extra_info": columns.get("extra_info", dict(columns)),
        } | {name: answered.output for name in ANSWER_NAMES if name in takes}
    else:
        said = answered.output
        is_conversation = not isinstance(answered.task, str)
        there = {name: [value] for name, value in columns.items() if name not in NOT_PASSED} | {
            "prompts": [answered.task],
            "completions": [[{"role": "assistant", "content": said}] if is_conversation else said],
            "completion_ids": [answered.completion_ids],
        }
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    missing = [
        name
        for name, parameter in takes.items()
        if name not in there and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if missing:
        raise DomainError(
            f"`reward_function` is {dotted}({', '.join(takes)}): nothing is called {missing[0]!r}; {form}'s form "
            f"has {sorted(there)} here. Name a column so, give the parameter a default, or {BOTH_FORMS}"
        )
    return {name: value for name, value in there.items() if takes_all or name in takes}


def numbers_of(form: Form, returned: Any) -> dict[str, float]:
    """Returns `score`, and the other numbers of a dict of verl's form, by name. Empty: the function does not apply.

    Raises:
        DomainError: the value does not have the form's type.
        RecordError: it is no finite number.
    """
    if form == "trl":
        if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__") or len(returned) != 1:
            raise DomainError(f"it returned {repr(returned)[:200]} for one completion: TRL's form is a list of numbers")
        return {} if returned[0] is None else {"score": finite("the score", returned[0])}
    if isinstance(returned, tuple | list) and returned:
        returned = returned[0]  # as verl does with what its own functions return
    if not isinstance(returned, Mapping):
        return {"score": finite("the score", returned)}
    if "score" not in returned:
        raise DomainError(f"it returned a dict with {sorted(map(str, returned))}: verl's form has a key 'score'")
    others = {str(name): value for name, value in returned.items() if isinstance(value, Real)}
    found = {name: finite(f"the value {name!r}", value) for name, value in others.items()}
    return found | {"score": finite("the score", returned["score"])}


def judge_reward(function: Callable[..., Any], prediction: str, gold: Form, options: dict[str, Any]) -> Verdict:
    """Calls a reward function, as a judge of the verifier.

    Args:
        function: the reward function.
        prediction: not used: ``options`` holds the answer where the function expects it.
        gold: the function's form.
        options: its ``arguments``.

    Returns:
        ``correct`` with the numbers, or ``wrong`` with the error of the function.
    """
    try:
        return Verdict(status="correct", numbers=numbers_of(gold, function(**options["arguments"])))
    except MemoryError:
        raise
    except (DomainError, RecordError) as failure:
        return wrong(str(failure))
    except (Exception, SystemExit) as failure:  # noqa: BLE001 — of the user's function
        return wrong(f"it raised {describe_error(failure)}")
