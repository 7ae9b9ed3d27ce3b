"""Tries the domain before the run does: `python -m pipelinerl.launcher.domain_check < configuration as JSON`.

Imports the rollout function and the loader, checks how they can be called, loads the problems and plays a few rollouts
against a scripted model. Prints one JSON object {"refusal": text or null, "warnings": [text]} as its last line.
A refusal is only what would fail in the run as well: what is slow or needs a service that is not up is a warning.
"""

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from pipelinerl.config.load import resolve_function
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.launcher.trial import TrialFailure, try_rollouts

ROLLOUT_ARGUMENTS = ("cfg", "llm", "problem", "session")


@dataclass(frozen=True, kw_only=True)
class DomainFunctions:
    """What one domain names."""

    label: str
    """Where in the configuration it is named; empty for the top level."""
    rollout_policy: str
    dataset_loader: str
    dataset_loader_params: dict[str, Any]
    train_dataset_names: list[str]
    test_dataset_names: list[str]


class OutOfTimeError(Exception):
    """The deadline of the check passed; that proves nothing against the domain."""


def domains_of(container: dict[str, Any]) -> list[DomainFunctions]:
    """The single domain of the top level, or those of `domains`."""
    names = ("dataset_loader", "dataset_loader_params", "train_dataset_names", "test_dataset_names")
    if container.get("domains"):
        return [
            DomainFunctions(
                label=f"domains.{domain['name']}.",
                rollout_policy=domain["rollout_policy"],
                **{name: domain[name] for name in names},
            )
            for domain in container["domains"]
        ]
    policy = container["actor"]["rollout_policy"]
    return [DomainFunctions(label="", rollout_policy=policy, **{name: container[name] for name in names})]


def resolve_rollout(domain: DomainFunctions) -> Callable[..., Any]:
    """The rollout function: async, taking cfg, llm, problem and session by position."""
    key = f"{domain.label}rollout_policy" if domain.label else "actor.rollout_policy"
    function = import_named(key, domain.rollout_policy)
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise DomainError(
            f"`{key}` is {domain.rollout_policy}: it must be an async function ({', '.join(ROLLOUT_ARGUMENTS)})"
        )
    check_call(key, domain.rollout_policy, function, ROLLOUT_ARGUMENTS, {})
    return function


def resolve_loader(domain: DomainFunctions) -> Callable[..., Any]:
    key = f"{domain.label}dataset_loader"
    function = import_named(key, domain.dataset_loader)
    check_call(key, domain.dataset_loader, function, ([],), domain.dataset_loader_params)
    return function


def import_named(key: str, dotted: str) -> Callable[..., Any]:
    try:
        return resolve_function(dotted)
    except ConfigError as error:
        raise DomainError(f"`{key}`: {error}") from error
    except OutOfTimeError:
        raise
    except Exception as error:  # anything that the domain's module does at import
        raise DomainError(f"`{key}` is {dotted}: importing it raised {describe(error)}") from error


def check_call(
    key: str, dotted: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = "(dataset_names, **dataset_loader_params)" if args != ROLLOUT_ARGUMENTS else f"({', '.join(args)})"
        raise DomainError(f"`{key}` is {dotted}{signature}: it cannot be called with {wanted}: {error}") from error


def load_problems(domain: DomainFunctions, loader: Callable[..., Any], names: list[str], which: str) -> list[dict]:
    """The loader's problems, checked: a list of dicts, not empty where problems are needed."""
    key = f"{domain.label}dataset_loader"
    try:
        problems = loader(list(names), **domain.dataset_loader_params)
    except OutOfTimeError:
        raise
    except Exception as error:  # the user's function
        raise DomainError(f"`{key}` is {domain.dataset_loader}: loading {names} raised {describe(error)}") from error
    if not isinstance(problems, list):
        kind = type(problems).__name__
        raise DomainError(
            f"`{key}` is {domain.dataset_loader}: it must return a list of dicts and returned {kind} for {names}"
        )
    wrong = next((problem for problem in problems if not isinstance(problem, dict)), None)
    if wrong is not None:
        raise DomainError(
            f"`{key}` is {domain.dataset_loader}: every problem must be a dict and one of {names} is "
            f"{type(wrong).__name__}"
        )
    if not problems and which == "train":
        raise DomainError(
            f"`{key}` is {domain.dataset_loader}: it returned no problems for {which}_dataset_names={names}"
        )
    return problems


def check_required_keys(domain: DomainFunctions, rollout: Callable[..., Any], problems: list[dict]) -> None:
    """`required_problem_keys` of the rollout function or its module names what every problem must have."""
    module = sys.modules.get(getattr(rollout, "__module__", ""), None)
    required: tuple[str, ...] = getattr(rollout, "required_problem_keys", ())
    required = required or getattr(module, "required_problem_keys", ())
    for index, problem in enumerate(problems):
        missing = [key for key in required if key not in problem]
        if missing:
            raise DomainError(
                f"`{domain.label}dataset_loader` is {domain.dataset_loader}: problem {index} has no "
                f"{', '.join(map(repr, missing))}, which {domain.rollout_policy} needs; it has {sorted(problem)}"
            )


def describe(error: BaseException) -> str:
    """Type, message and the innermost line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def check(container: dict[str, Any], warnings: list[str]) -> None:
    """Check every domain; appends warnings, raises `DomainError` on the first refusal."""
    domains = domains_of(container)
    resolved = [(domain, resolve_rollout(domain), resolve_loader(domain)) for domain in domains]
    for domain, rollout, loader in resolved:
        train = load_problems(domain, loader, domain.train_dataset_names, "train")
        test = load_problems(domain, loader, domain.test_dataset_names, "test") if domain.test_dataset_names else []
        if domain.test_dataset_names and not test:
            warnings.append(
                f"{domain.dataset_loader} returns no problems for {domain.test_dataset_names}: no evaluation"
            )
        check_required_keys(domain, rollout, train + test)
        try:
            asyncio.run(try_rollouts(OmegaConf.create(container), rollout, train))
        except TrialFailure as failure:
            text = f"{domain.rollout_policy} {failure}"
            if failure.certain:
                raise DomainError(text) from failure
            warnings.append(text)


@contextlib.contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """Raises `OutOfTimeError` inside whatever runs when the time is up."""

    def expire(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-s", type=float, required=True)
    arguments = parser.parse_args()
    container = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the domain prints is not the answer
    warnings: list[str] = []
    refusal = None
    try:
        with deadline(arguments.timeout_s):
            check(container, warnings)
    except OutOfTimeError:
        warnings.append(f"the domain's problems took more than {arguments.timeout_s:g} s to load: not checked further")
    except DomainError as error:
        refusal = str(error)
    answer.write(json.dumps({"refusal": refusal, "warnings": warnings}) + "\n")
    answer.flush()
    os._exit(0)  # threads that the domain left behind must not hold the launcher up


if __name__ == "__main__":
    main()
