"""Reads `reward_function`: one function, several, or several with weights. A name without a dot is a judge's."""

from collections.abc import Mapping, Sequence

from pipelinerl.config.sections import Config, VerifierSection

MATH = "math"
"""Name of the verifier's judge of mathematics among reward functions. Others without a dot are in `judges`."""
REWARD = "reward:"
"""What the verifier's name of a reward function begins with, where that of a judge does not."""


def weights_of(given: str | Sequence[str] | Mapping[str, float] | None) -> dict[str, float]:
    """Returns dotted name → weight.

    >>> weights_of(["a.accuracy", "a.brief"])
    {'a.accuracy': 1.0, 'a.brief': 1.0}
    """
    if isinstance(given, Mapping):
        return {str(dotted): float(weight) for dotted, weight in given.items()}
    return dict.fromkeys([given] if isinstance(given, str) else given or (), 1.0)


def name_of(dotted: str) -> str:
    """Returns the function's own name, which its metric has."""
    return dotted.rpartition(".")[2]


def judge_names(given: str | Sequence[str] | Mapping[str, float] | None) -> tuple[str, ...]:
    """Returns the names under which a verifier knows the functions."""
    return tuple(REWARD + name for name in weights_of(given) if not is_judge(name))


def is_judge(name: str) -> bool:
    return "." not in name


def verifier_of(config: Config) -> VerifierSection:
    """Returns the section `verifier` with the reward functions among its judges."""
    judges = [*config.verifier.judges, *judge_names(config.reward_function)]
    return config.verifier.model_copy(update={"judges": judges})
