"""Environments of other projects as domains, one module each: ``load_problems`` and ``generate_rollout``.

Each imports its library, an extra of this package. A problem holds all settings of its rollout, so an experiment may
use a library several times. If a library's server is down, late or broken, ``TransportError`` or ``TimeoutError`` is
raised: the attempt is repeated and counted, and has no reward.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.agents import play_text_environment
from pipelinerl.agents.environment import TextEnvironment
from pipelinerl.errors import DomainError, TransportError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.utils import get_environment_jobs

TEST_SEEDS = 2**30
"""First seed of test problems: no training has that many problems."""


def library(module: str, extra: str) -> Any:
    """Imports a library's module. Raises ``DomainError`` with the name of the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DomainError(
            f"{error.name!r} is not installed, which this domain needs: pip install 'pipelinerl[{extra}]'"
        ) from error


@contextmanager
def asking(peer: str, *failures: type[Exception]) -> Iterator[None]:
    """Turns ``OSError`` and the library's ``failures`` into a ``TransportError`` about ``peer``."""
    kinds: tuple[type[Exception], ...] = (OSError, *failures)
    try:
        yield
    except kinds as error:
        raise TransportError(f"{peer} did not answer: {type(error).__name__}: {error}") from error


def served(name: str, attribute: str) -> Any:
    """Returns the object ``package.module:name``. Without a name it is the module's ``attribute``."""
    module, _, own = name.partition(":")
    return getattr(importlib.import_module(module), own or attribute)


async def play(
    cfg: DictConfig,
    llm: TrainableLLM,
    problem: dict[str, Any],
    session: aiohttp.ClientSession,
    episode: TextEnvironment,
) -> RolloutResult:
    """Plays an episode of one of ``seeded_problems``, with ``actor.system_prompt`` as the first message."""
    return await play_text_environment(
        llm,
        session,
        episode,
        max_turns=problem["max_turns"],
        seed=problem["seed"],
        system=(cfg.get("actor") or {}).get("system_prompt"),
        dataset_name=problem["dataset"],
    )


def seeded_problems(
    domain: str, dataset_names: list[str], environments: Mapping[str, Any], sizes: Mapping[str, int], seed: int
) -> list[dict[str, Any]]:
    """Makes problems ``{"dataset", "environment", "settings", "seed"}``: environments in turn, one seed per problem.

    Args:
        domain: name of the domain, for error messages.
        dataset_names: keys of ``sizes``.
        environments: name → settings.
        sizes: number of problems in ``train`` and ``test``.
        seed: the first seed of ``train``. ``test`` begins at `TEST_SEEDS`.
    """
    names = list(environments)
    problems = []
    for part in dataset_names:
        if part not in sizes:
            raise DomainError(f"{domain} has no dataset {part!r}: use `train` or `test`")
        first = TEST_SEEDS if part == "test" else seed
        for place in range(sizes[part]):
            name = names[place % len(names)]
            settings = dict(environments[name] or {})
            problems.append({"dataset": part, "environment": name, "settings": settings, "seed": first + place})
    return problems


def address_of(cfg: DictConfig, name: str, *, replica: int = 0, own_path: str = "") -> str:
    """Returns the address of a server.

    Args:
        cfg: the run's configuration.
        name: an address, which is returned unchanged, or the key of one of the run's ``environments``.
        replica: any number. It chooses one of several replicas.
        own_path: path at the run's own servers.
    Raises:
        DomainError: the run has no such environment.
    """
    if name.startswith(("http://", "https://")):
        return name
    jobs = [job for job in get_environment_jobs(cfg, name) if job.environment_key == name]
    if not jobs:
        raise DomainError(f"no entry of `environments` has the key {name!r}, and it is not an address (http://…)")
    return f"{jobs[replica % len(jobs)].url}{own_path}"
