"""The contract of a domain: an async rollout function and a loader of problems, both named in the configuration.

The launcher uses this module to try a domain before the start, and the actor to load it.
"""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.names import with_other_names
from pipelinerl.config.sections import Config, DomainSection, SubsetSection
from pipelinerl.config.variables import references, with_values
from pipelinerl.domains.datasets import Problem
from pipelinerl.domains.rewards import with_both_spellings
from pipelinerl.errors import ConfigError, DatasetError, DomainError

ROLLOUT_ARGUMENTS = ("cfg", "llm", "problem", "session")
JUDGE_ARGUMENTS = ("cfg", "problem", "rollouts", "session")


@dataclass(frozen=True)
class Domain:
    """One domain of the run, and its place in the configuration."""

    section: DomainSection
    several: bool
    """Whether it is an entry of `domains`. False: the single domain of the top-level keys."""
    subset: SubsetSection | None = None
    """`train_subset`."""

    def key(self, name: str) -> str:
        """Returns a field's configuration key, such as `actor.rollout_policy` or `domains.math.rollout_policy`."""
        if self.several:
            return f"domains.{self.section.name}.{name}"
        return f"actor.{name}" if name == "rollout_policy" else name

    def rollout(self) -> Callable[..., Any]:
        """Imports the rollout function.

        Raises:
            DomainError: it cannot be imported, is not async, or does not take (cfg, llm, problem, session) by position.
        """
        key, dotted = self.key("rollout_policy"), self.section.rollout_policy
        function = import_named(key, dotted)
        check_async_call(key, dotted, function, ROLLOUT_ARGUMENTS)
        return function

    def group_judge(self, rollout: Callable[..., Any]) -> Callable[..., Any] | None:
        """Returns `judge_group` of the rollout function or its module. None: it has none.

        Raises:
            DomainError: it is not async, or does not take (cfg, problem, rollouts, session) by position.
        """
        judge = beside(rollout, "judge_group")
        if judge is not None:
            named = f"{self.section.rollout_policy} with judge_group"
            check_async_call(self.key("rollout_policy"), named, judge, JUDGE_ARGUMENTS)
        return judge

    def problems(self, names: Sequence[str], *, needed_for: str = "") -> list[Problem]:
        """Calls the loader and returns its problems.

        Args:
            names: data sets to load.
            needed_for: configuration key of the names, if the run needs problems. Empty: it does not.
        Raises:
            DomainError: the loader cannot be imported or called.
            DatasetError: it raises, or returns anything but dicts. ``names`` holds the data set that it could not use,
                all data sets if it does not say which, and none for an error of the machine.
        """
        key, dotted = self.key("dataset_loader"), self.section.dataset_loader
        given = self.section.dataset_loader_params
        params = with_values(given, os.environ, self.key("dataset_loader_params"))
        loader = import_named(key, dotted)
        if inspect.iscoroutinefunction(loader):
            raise DomainError(f"`{key}` is {dotted}: it is a coroutine function; define it with `def`")
        check_call(key, dotted, loader, ("dataset_names",), params, "dataset_loader_params")
        try:
            returned = loader(list(names), **params)
            problems = list(returned) if not isinstance(returned, (dict, str)) and returned is not None else None
        except Exception as error:  # the user's function
            about = error.names if isinstance(error, DatasetError) else () if isinstance(error, OSError) else names
            text = f"`{key}` is {dotted}: loading {list(names)} raised {describe_error(error)}"
            raise DatasetError(text, *about) from error
        if problems is None:
            kind = type(returned).__name__
            text = f"`{key}` is {dotted}: it must return a list of dicts, not {kind}, for {list(names)}"
            raise DatasetError(text, *names)
        for index, problem in enumerate(problems):
            if not isinstance(problem, dict):
                raise DatasetError(
                    f"`{key}` is {dotted}: problem {index} of {list(names)} is {type(problem).__name__} "
                    f"({repr(problem)[:100]}); every problem must be a dict",
                    *names,
                )
        self._check_free_of_secrets(problems, references({"dataset_loader_params": given}))
        if not problems and needed_for:
            raise DatasetError(f"`{key}` is {dotted}: it returned no problems for {needed_for}={list(names)}", *names)
        return problems

    def _check_free_of_secrets(self, problems: Sequence[Problem], names: Mapping[str, str]) -> None:
        """Raises ``DomainError`` if a problem holds the value of an environment variable that the parameters name."""
        for index, problem in enumerate(problems if names else ()):
            text = repr(problem)
            for name in names.values():
                if repr(os.environ[name])[1:-1] in text:
                    raise DomainError(
                        f"`{self.key('dataset_loader')}` is {self.section.dataset_loader}: problem {index} holds the "
                        f"value of {name}, and problems are recorded: let the rollout read it from `cfg`"
                    )

    def train_problems(self) -> list[Problem]:
        problems = self.problems(self.section.train_dataset_names, needed_for="train_dataset_names")
        if self.subset is None:
            return problems
        if len(problems) <= self.subset.begin:
            raise DomainError(
                f"`train_subset.begin` is {self.subset.begin}, but {self.section.dataset_loader} returns only "
                f"{len(problems)} problems"
            )
        return problems[self.subset.begin : self.subset.end]

    def test_problems(self) -> list[Problem]:
        names = self.section.test_dataset_names
        return self.problems(names) if names else []

    def check_keys(self, rollout: Callable[..., Any], problems: Sequence[Problem]) -> None:
        """Raises ``DomainError`` if a problem lacks a key in `required_problem_keys` of the function or its module."""
        required: tuple[str, ...] = beside(rollout, "required_problem_keys") or ()
        for index, problem in enumerate(problems):
            missing = [key for key in required if key not in problem]
            if missing:
                raise DomainError(
                    f"`{self.key('dataset_loader')}` is {self.section.dataset_loader}: problem {index} has no "
                    f"{', '.join(map(repr, missing))}, which {self.section.rollout_policy} needs; it has "
                    f"{sorted(problem)}"
                )


def cfg_of_domains(container: Mapping[str, Any]) -> DictConfig:
    """Returns a plain configuration as rollout functions get it: with values for references, and keys by all names."""
    env = {name: re.sub(r"(\\*)\$\{", r"\1\1\\${", value) for name, value in os.environ.items()}  # no interpolations
    return with_both_spellings(OmegaConf.create(with_other_names(with_values(container, env))))


def domains_of(cfg: Config) -> tuple[Domain, ...]:
    """Returns the domains of the run. A run without `domains` has one, named after its loader's module."""
    if cfg.domains:
        return tuple(Domain(section, several=True, subset=cfg.train_subset) for section in cfg.domains)
    name = cfg.dataset_loader.rsplit(".", 2)[-2] if "." in cfg.dataset_loader else cfg.dataset_loader
    section = DomainSection(
        name=name,
        weight=1.0,
        rollout_policy=cfg.actor.rollout_policy,
        dataset_loader=cfg.dataset_loader,
        dataset_loader_params=cfg.dataset_loader_params,
        train_dataset_names=cfg.train_dataset_names,
        test_dataset_names=cfg.test_dataset_names,
    )
    return (Domain(section, several=False, subset=cfg.train_subset),)


def import_named(key: str, dotted: str) -> Callable[..., Any]:
    try:
        return resolve_function(dotted)
    except ConfigError as error:
        raise DomainError(f"`{key}`: {error}") from error
    except Exception as error:  # anything that the domain's module does at import
        raise DomainError(f"`{key}` is {dotted}: importing it raised {describe_error(error)}") from error


def beside(rollout: Callable[..., Any], name: str) -> Any:
    """Returns what a rollout function, or else its module, has by this name. None: neither has it."""
    return getattr(rollout, name, None) or getattr(sys.modules.get(getattr(rollout, "__module__", "")), name, None)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or an instance that can be called, is defined with ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_async_call(key: str, dotted: str, function: Callable[..., Any], args: Sequence[str]) -> None:
    """Checks as ``check_call`` does, and that the function is async."""
    if not is_async(function):
        raise DomainError(f"`{key}` is {dotted}: it is not async; define it with `async def` ({', '.join(args)})")
    check_call(key, dotted, function, args, {})


def check_call(
    key: str,
    dotted: str,
    function: Callable[..., Any],
    args: Sequence[str],
    kwargs: dict[str, Any],
    kwargs_key: str = "",
) -> None:
    """Checks that a user's function takes these arguments. Does not call it.

    Args:
        key: configuration key that names the function, for the message.
        dotted: the function's dotted name, for the message.
        function: passes if its signature cannot be read.
        args: names of the positional arguments.
        kwargs: the keyword arguments.
        kwargs_key: configuration key of ``kwargs``, for the message.
    Raises:
        DomainError: the signature does not fit. The message shows it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = ", ".join([*args, *([f"**{kwargs_key}"] if kwargs_key else [])])
        raise DomainError(f"`{key}` is {dotted}{signature}: it cannot be called with ({wanted}): {error}") from error


def describe_error(error: BaseException) -> str:
    """Describes an exception by type, message and the innermost line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
