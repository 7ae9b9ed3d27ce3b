"""Functions that domains written for PipelineRL import to find the run's services."""

from omegaconf import DictConfig

from pipelinerl.world import Job


def resolve_environment_key(cfg: DictConfig, default: str | None = None) -> str | None:
    """Returns ``cfg.environment_key``, or ``default`` if it is not set.

    The name selects nothing here, because every verifier judges every kind of answer.
    """
    return cfg.get("environment_key") or default


def get_environment_jobs(cfg: DictConfig, key: str | None = None) -> list[Job]:
    """Returns the run's verifiers, as jobs of kind "environment". ``key`` has no effect."""
    return [Job(**job) for job in cfg.get("jobs") or () if job["kind"] == "environment"]
