"""One rollout function for problems of several domains, as in PipelineRL. A problem's `domain` selects the function.

Use it with a loader that already mixes domains. To mix domains by weight, use `domains` of the configuration instead.
"""

import inspect
from typing import Any

import aiohttp
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.dotted import resolve_function
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.utils import resolve_environment_key

_registered: dict[str, str] = {}


def register_domain_rollout(domain: str, target: str) -> None:
    """Registers a domain's rollout function in this process. It takes precedence over `actor.domain_rollouts`.

    Args:
        domain: value of the problems' `domain`.
        target: dotted name of the function, as module.function.
    Raises:
        DomainError: the name is empty or the target is not of the form module.function.
    """
    if not domain.strip() or "." not in target:
        raise DomainError(f"a domain needs a name and a function as module.function: {domain!r}, {target!r}")
    _registered[domain.strip()] = target.strip()


async def generate_multidomain_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs the rollout function of the problem's domain. Without a domain, the key of the run's environment is used.

    Raises:
        DomainError: the problem names no domain, or one without a rollout function.
    """
    functions = {**(OmegaConf.select(cfg, "actor.domain_rollouts") or {}), **_registered}
    domain = problem.get("domain") or resolve_environment_key(cfg)
    if domain not in functions:
        raise DomainError(
            f"problem['domain'] is {domain!r}: `actor.domain_rollouts` has {sorted(functions)}; add it there"
        )
    try:
        function = resolve_function(functions[domain])
    except ConfigError as error:
        raise DomainError(f"`actor.domain_rollouts.{domain}`: {error}") from error
    played = function(cfg, llm, problem, session)
    result: RolloutResult = await played if inspect.isawaitable(played) else played
    result.domain = result.domain or domain
    return result
