"""One rollout function for problems of several domains, as in PipelineRL: a problem's `domain` chooses the function.

What is trained follows the problems' order, so a domain of long rollouts gets no share of its own: `domains` of the
configuration mixes by weight. Use this one for loaders that already mix.
"""

from typing import Any

import aiohttp
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.load import resolve_function
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

_registered: dict[str, str] = {}


def register_domain_rollout(domain: str, target: str) -> None:
    """Adds a rollout function of a dotted name in this process; it wins over the configuration's.

    Raises:
        DomainError: the name is empty or the function is not named as module.function.
    """
    if not domain.strip() or "." not in target:
        raise DomainError(f"a domain needs a name and a function as module.function: {domain!r}, {target!r}")
    _registered[domain.strip()] = target.strip()


async def generate_multidomain_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """The rollout of the problem's domain.

    Raises:
        DomainError: the problem names no domain, or one without a rollout function.
    """
    functions = {**(OmegaConf.select(cfg, "actor.domain_rollouts") or {}), **_registered}
    domain = problem.get("domain")
    if domain not in functions:
        raise DomainError(
            f"problem['domain'] is {domain!r}: `actor.domain_rollouts` has {sorted(functions)}; add it there"
        )
    try:
        function = resolve_function(functions[domain])
    except ConfigError as error:
        raise DomainError(f"`actor.domain_rollouts.{domain}`: {error}") from error
    result = await function(cfg, llm, problem, session)
    result.domain = result.domain or domain
    return result
