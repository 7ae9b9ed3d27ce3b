"""For domains written for PipelineRL: finds the run's services."""

import httpx
from omegaconf import DictConfig

from pipelinerl.world import Job
from pipelinerl.world.proxies import own_client

HEALTH_TIMEOUT_S = 5.0
"""A server that answers later counts as frozen."""


def resolve_environment_key(cfg: DictConfig, default: str | None = None) -> str | None:
    """Returns ``cfg.environment_key``, else the key of the only environment, else ``default``."""
    keys = {job.environment_key for job in _environments(cfg)} - {None}
    return cfg.get("environment_key") or (keys.pop() if len(keys) == 1 else default)


def get_environment_jobs(cfg: DictConfig, key: str | None = None) -> list[Job]:
    """Returns the servers of the environment with this key, or of all environments.

    Verifiers count as environments without a key. They are returned if no environment has the given one, because every
    verifier judges every kind of answer.
    """
    jobs = _environments(cfg)
    own = [job for job in jobs if job.environment_key is not None]
    verifiers = [job for job in jobs if job.environment_key is None]
    if key is None:
        return own or verifiers
    return [job for job in own if job.environment_key == key] or verifiers or own


def is_healthy(url: str) -> bool:
    """Whether a server answers ``GET /health``. 404 counts, too: a server may lack that route."""
    try:
        answer = httpx.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S, **own_client())
        return answer.status_code < 500
    except httpx.HTTPError:
        return False


def _environments(cfg: DictConfig) -> list[Job]:
    return [Job(**job) for job in cfg.get("jobs") or () if job["kind"] == "environment"]
